"""Chooses the stored chunks of an array, and their boxes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from orbax_t5x.lazy import Box, View

# Larger chunks make a restore of one shard of many decode too much, and leave room for few at a time within a limit;
# smaller ones cost a write each.
MOST_BLOCK_BYTES = 16 << 20
# Each chunk costs a commit of the database, some 10 ms where it is waited for: a limit of 64 bytes took 107 s for
# 74 KiB. A chunk of this size is larger than such a limit, and is written by itself.
LEAST_BLOCK_BYTES = 1 << 20


class ChunkPreferences(NamedTuple):
    """A caller's preferences for the chunks of an array."""

    nbytes: int | None = None
    cut_first: tuple[int, ...] = ()


def choose_chunk(
    shape: Sequence[int], itemsize: int, limit: int, unit: Sequence[int] | None = None, *, cut_first: Sequence[int] = ()
) -> tuple[int, ...]:
    """Chooses the shape of an array's stored chunks.

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


def block_bytes(limit: int, copies: int) -> int:
    """Chooses the bytes of a block."""
    return min(MOST_BLOCK_BYTES, max(LEAST_BLOCK_BYTES, limit // (2 * copies)))


def stored_chunk(view: View) -> tuple[int, ...] | None:
    """Returns the chunks of a view's only leaf, or None."""
    leaves = view.leaves()
    return leaves[0].chunks if len(leaves) == 1 and leaves[0].shape == view.shape else None


def chunk_of(view: View, limit: int, wishes: ChunkPreferences | None = None) -> tuple[int, ...]:
    """Chooses the shape of a view's stored chunks."""
    nbytes, cut_first = wishes or ChunkPreferences()
    if nbytes is None:
        return choose_chunk(view.shape, view.dtype.itemsize, limit, stored_chunk(view), cut_first=cut_first)
    # Chunks of the source may be larger than the preference.
    return choose_chunk(view.shape, view.dtype.itemsize, min(limit, nbytes), cut_first=cut_first)


def _even_parts(size: int, least: int) -> int:
    """Returns a near count that divides `size`, else `least`."""
    return next((parts for parts in range(least, min(2 * least, size) + 1) if size % parts == 0), least)


def grid_boxes(shape: Sequence[int], chunk: Sequence[int]) -> Iterator[Box]:
    """Yields the boxes of an array's chunks, in C order."""
    starts = (range(0, size, step) for size, step in zip(shape, chunk, strict=True))
    for corner in itertools.product(*starts):
        yield tuple((start, min(start + step, size)) for start, step, size in zip(corner, chunk, shape, strict=True))
