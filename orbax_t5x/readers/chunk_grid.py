"""Boxes and keys of an array's chunks.

A few bytes of metadata may describe billions of chunks of which none is stored; an absent chunk stands for the fill
value. So the work of a read follows the box that is wanted and the chunks that are stored: what else the box covers is
filled at once. Grids are regular and begin at the origin.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from orbax_t5x.errors import LimitExceededError
from orbax_t5x.lazy.box import Box, box_slices, intersect, shift, union_size
from orbax_t5x.lazy.leaf import Request


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


class ChunkKeys(NamedTuple):
    """Keys of an array's stored chunks.

    A key is `prefix`, then the indices joined by `separator`.
    """

    prefix: str
    separator: str

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> ChunkKeys:
        """Returns the keys of an array with these metadata."""
        if metadata.get("zarr_format") != 3:
            return cls("", metadata.get("dimension_separator", "."))
        encoding = metadata["chunk_key_encoding"]
        is_default = encoding["name"] == "default"
        separator = encoding.get("configuration", {}).get("separator", "/" if is_default else ".")
        return cls("c" if is_default else "", separator)

    def key(self, index: Sequence[int]) -> str:
        """Returns the key of a chunk."""
        numbers = [str(number) for number in index]
        return self.separator.join([self.prefix, *numbers] if self.prefix else numbers or ["0"])

    def indices(self, keys: Sequence[str], grid: Sequence[int]) -> np.ndarray:
        """Returns the indices of chunk keys, sorted."""
        found = {index for key in keys if (index := self._index(key, grid)) is not None}
        return np.array(sorted(found), np.int64).reshape(len(found), len(grid))

    def _index(self, key: str, grid: Sequence[int]) -> tuple[int, ...] | None:
        numbers = key.split(self.separator)
        if self.prefix or not grid:
            numbers = numbers[1:]
        if len(numbers) != len(grid) or not all(number.isdecimal() and len(number) < 20 for number in numbers):
            return None
        index = tuple(map(int, numbers))
        is_inside = all(number < count for number, count in zip(index, grid, strict=True))
        return index if is_inside and self.key(index) == key else None


class StoredChunks:
    """The stored chunks of an array, listed at its first read.

    `Snapshot` notices chunks that are added later.

    A remote store that keeps chunks as files has no list of them: there each chunk of a read is asked for, and one read
    may have at most `most` of them.
    """

    def __init__(self, cell: tuple[int, ...], grid: tuple[int, ...], most: int):
        self._cell = cell
        self._grid = grid
        self._most = most
        self._listed: np.ndarray | None = None

    async def find(self, keys: ChunkKeys, names: Callable[[], Awaitable[list[str]]]) -> None:
        """Lists the chunks once."""
        if self._listed is None:
            self._listed = keys.indices(await names(), self._grid)

    def require_few(self, boxes: Sequence[Box], chunk: Sequence[int]) -> None:
        """Refuses boxes of too many chunks without a list."""
        if (count := count_chunks(boxes, chunk)) > self._most:
            raise LimitExceededError(
                f"one read has {count} chunks, which the store cannot list, more than Limits.chunks = {self._most}"
            )

    def fill(self, requests: Sequence[Request], value: np.ndarray) -> tuple[list[Request], int]:
        """Fills the uncovered rest of a mostly empty box."""
        stored = self._listed
        assert stored is not None
        left: list[Request] = []
        used = np.zeros(len(stored), np.bool_)
        for request in requests:
            inside = self._inside(request.box, stored)
            used |= inside
            indices = stored[inside]
            if 2 * len(indices) >= count_chunks([request.box], self._cell):
                left.append(request)
                continue
            request.out[...] = value
            left += [self._piece(request, index) for index in indices.tolist()]
        absent = count_chunks([request.box for request in requests], self._cell) - int(np.count_nonzero(used))
        return left, absent

    def _inside(self, box: Box, stored: np.ndarray) -> np.ndarray:
        """Returns a mask of the stored chunks that a box overlaps."""
        inside = np.ones(len(stored), np.bool_)
        for axis, (low, high) in enumerate(chunk_indices(box, self._cell)):
            inside &= (low <= stored[:, axis]) & (stored[:, axis] < high)
        return inside

    def _piece(self, request: Request, index: Sequence[int]) -> Request:
        """Returns the part of a request in a chunk."""
        chunk = tuple([(number * size, (number + 1) * size) for number, size in zip(index, self._cell, strict=True)])
        box = intersect(chunk, request.box)
        assert box is not None
        return Request(box, request.out[box_slices(shift(box, request.box))])
