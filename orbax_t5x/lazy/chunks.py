"""Chooses the chunks in which an array is stored, and their boxes: pure geometry on integers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from orbax_t5x.lazy import Box


class ChunkPreferences(NamedTuple):
    """Preferences of a caller for the chunks of one array: the most bytes, and dimensions to cut before others."""

    nbytes: int | None = None
    cut_first: tuple[int, ...] = ()


def choose_chunk(
    shape: Sequence[int], itemsize: int, limit: int, unit: Sequence[int] | None = None, *, cut_first: Sequence[int] = ()
) -> tuple[int, ...]:
    """Chooses the shape of the chunks in which an array is stored: at most `limit` bytes, but at least one `unit`.

    Whole trailing dimensions come first, so that a chunk is few runs of a row-major source. The dimension that is cut
    is cut evenly, into a number of parts that divides its size where one is near: shards of a restore then share no
    chunk. Chunks of the source (`unit`) are never cut: each piece of one would cost decoding all of it.
    """
    unit = [max(1, min(size, part)) for size, part in zip(shape, unit or (1,) * len(shape), strict=True)]
    chunk = list(unit)
    for axis in sorted(reversed(range(len(shape))), key=lambda axis: axis in cut_first):
        rest = math.prod(chunk) // chunk[axis] * itemsize
        if rest * shape[axis] <= limit:
            chunk[axis] = max(1, shape[axis])
            continue
        units = -(-shape[axis] // unit[axis])
        parts = _even_parts(units, -(-units // max(1, limit // (rest * unit[axis]))))
        chunk[axis] = -(-units // parts) * unit[axis]
        break
    return tuple(chunk)


def _even_parts(size: int, least: int) -> int:
    """Returns a count from `least` up to twice that which divides `size`, else `least`."""
    return next((parts for parts in range(least, min(2 * least, size) + 1) if size % parts == 0), least)


def grid_boxes(shape: Sequence[int], chunk: Sequence[int]) -> Iterator[Box]:
    """Yields the boxes of an array's chunks, in C order."""
    starts = (range(0, size, step) for size, step in zip(shape, chunk, strict=True))
    for corner in itertools.product(*starts):
        yield tuple((start, min(start + step, size)) for start, step, size in zip(corner, chunk, shape, strict=True))
