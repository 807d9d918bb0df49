"""Chunks of an array, and the index boxes that overlap them.

Pure geometry over a regular grid that begins at the origin.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorstore as ts

from orbax_t5x.lazy.box import Box, box_slices, shift, union_size
from orbax_t5x.lazy.leaf import Request

# Boxes of one request that are awaited one by one; more would cost more than they show.
_MAX_BOXES = 4096


class ArrayLayout(NamedTuple):
    """Shape, dtype and chunk grids of a chunked array.

    `shard` holds the index of its chunks; `chunk` is decoded at a time.

    They are the same where chunks are stored by themselves, and () for a rank-0 array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    shard: tuple[int, ...]

    @classmethod
    def of(cls, array: ts.TensorStore) -> ArrayLayout:
        """Returns the layout of an array that is open."""
        shape, layout = tuple(array.shape), array.chunk_layout
        chunk, shard = (
            tuple([max(1, size or whole) for size, whole in zip(cell.shape or shape, shape, strict=True)])
            for cell in (layout.read_chunk, layout.write_chunk)
        )
        return cls(shape, np.dtype(array.dtype.numpy_dtype), chunk, shard)


def chunk_boxes(box: Box, chunks: Sequence[int]) -> Iterator[Box]:
    """Cuts a box at the borders of chunks."""
    cuts: list[list[tuple[int, int]]] = [[side] for side in box]
    count = 1
    for dimension, (side, size) in enumerate(zip(box, chunks, strict=False)):
        cuts[dimension] = _cuts(side, size)
        count *= len(cuts[dimension])
        if count > _MAX_BOXES:
            cuts[dimension] = [side]
            break
    yield from itertools.product(*cuts)


def count_chunks(boxes: Iterable[Box], chunks: Sequence[int]) -> int:
    """Counts the chunks that boxes overlap together."""
    return union_size(tuple([chunk_indices(box, chunks) for box in boxes]))


def requests_by_chunk(requests: Iterable[Request], chunks: Sequence[int]) -> Iterator[list[Request]]:
    """Yields, for each chunk that requests overlap, their boxes in it."""
    found: dict[tuple[int, ...], list[Request]] = {}
    for box, out in requests:
        for inner in itertools.product(*map(_cuts, box, chunks)):
            chunk = tuple([low // size for (low, _), size in zip(inner, chunks, strict=True)])
            found.setdefault(chunk, []).append(Request(inner, out[(*box_slices(shift(inner, box)), ...)]))
    yield from found.values()


def chunk_indices(box: Box, chunks: Sequence[int]) -> Box:
    """Returns the index box of the chunks that a box overlaps."""
    return tuple([(low // size, -(-high // size)) for (low, high), size in zip(box, chunks, strict=True)])


def _cuts(side: tuple[int, int], size: int) -> list[tuple[int, int]]:
    """Cuts a dimension of a box at the borders of chunks."""
    low, high = side
    return list(itertools.pairwise([low, *range((low // size + 1) * size, high, size), high]))
