"""A leaf stored in pieces, each with a place of its own and a checksum of its own: a partitioned TensorFlow variable.

A read of a box touches the pieces that the box meets, and no others. The checksummed extent of the leaf is its pieces'
extents one after the other, in the order of the pieces.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from orbax_t5x.concurrency import reader_pool, run_in_pool
from orbax_t5x.errors import CheckpointError
from orbax_t5x.lazy.box import Box, intersect, shift
from orbax_t5x.lazy.leaf import Request
from orbax_t5x.lazy.read_stats import ChecksummedRange, ReadStats
from orbax_t5x.readers.ranges.leaf import RangeLeaf, StoredRange, read_unchanged, verify_range, verify_rest


class Piece(NamedTuple):
    """What one byte range holds of a leaf, and the crc32c over it."""

    box: Box
    range: StoredRange
    crc: int


class SlicedLeaf(RangeLeaf):
    """One array in pieces that tile it; whoever makes one has proven that they do."""

    __slots__ = ("_bases", "_pieces")

    has_checksum = True

    def __init__(
        self,
        name: str,
        path: str,
        shape: tuple[int, ...],
        dtype: np.dtype,
        pieces: Sequence[Piece],
        error: CheckpointError | None = None,
    ):
        super().__init__(name, path, shape, dtype, error)
        self._pieces = tuple(pieces)
        self._bases = list(itertools.accumulate((piece.range.nbytes for piece in pieces), initial=0))

    def bytes_of(self, boxes: tuple[Box, ...]) -> int:
        """Of each piece, what is wanted of it; see `Leaf.bytes_of`."""
        total = 0
        for piece in self._pieces:
            met = [part for box in boxes if (part := intersect(box, piece.box)) is not None]
            total += piece.range.bytes_of(tuple([shift(part, piece.box) for part in met]))
        return total

    def read_blocking(self, requests: Sequence[Request], stats: ReadStats) -> None:
        """See `Leaf.read_into`."""
        self.raise_error()
        checksum = stats.verify != "off"
        for base, piece in zip(self._bases, self._pieces, strict=False):
            wanted = [part for request in requests if (part := _within(request, piece.box)) is not None]
            if not wanted:
                continue
            outcome = read_unchanged(piece.range, wanted, checksum=checksum, leaf=self.name)
            stats.count(outcome.wanted, outcome.gaps)
            for part in outcome.parts:
                stats.add_range(self, _moved(part, base))

    async def verify_checksum(self, stats: ReadStats, parts: Sequence[ChecksummedRange]) -> bool | None:
        """See `Leaf.verify_checksum`."""
        if stats.verify == "off":
            return None
        by_piece: list[list[ChecksummedRange]] = [[] for _ in self._pieces]
        for part in parts:
            number = bisect.bisect_right(self._bases, part.start) - 1
            by_piece[number].append(_moved(part, -self._bases[number]))
        verified = True
        for piece, own in zip(self._pieces, by_piece, strict=True):
            if verify_range(piece.range, piece.crc, own, self.name):
                continue
            if stats.verify == "full":
                await run_in_pool(reader_pool(), verify_rest, piece.range, piece.crc, own, self.name, stats)
            else:
                verified = False
        return verified


def _moved(part: ChecksummedRange, offset: int) -> ChecksummedRange:
    return part._replace(start=part.start + offset, stop=part.stop + offset)


def _within(request: Request, box: Box) -> Request | None:
    """The part of a request that a piece holds, in the piece's own coordinates; None where they do not meet."""
    theirs: list[tuple[int, int]] = []
    ours: list[slice] = []
    for (low, high), (first, last) in zip(request.box, box, strict=True):
        start, stop = max(low, first), min(high, last)
        if start >= stop:
            return None
        theirs.append((start - first, stop - first))
        ours.append(slice(start - low, stop - low))
    return Request(tuple(theirs), request.out[tuple(ours)])
