"""Leaf in slices, as of a partitioned TensorFlow variable.

Each slice has a byte range and a checksum of its own. A read of a box touches the slices that the box meets, and no
others. The checksummed extent of the leaf is its slices' extents one after the other, in the order of the slices.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from orbax_t5x.errors import CheckpointError
from orbax_t5x.files.interface import FilePlace
from orbax_t5x.lazy.box import Box, intersect, shift
from orbax_t5x.lazy.leaf import Checksums, Request
from orbax_t5x.lazy.read_stats import ReadStats
from orbax_t5x.readers.ranges.byte_range import StoredRange
from orbax_t5x.readers.ranges.coverage import RangeChecksums, moved
from orbax_t5x.readers.ranges.leaf import RangeLeaf, read_unchanged


class StoredSlice(NamedTuple):
    """A box of a leaf, its byte range and its crc32c."""

    box: Box
    range: StoredRange
    crc: int


class SlicedLeaf(RangeLeaf):
    """Array in slices, proven to tile it."""

    __slots__ = ("_bases", "_slices")

    def __init__(
        self,
        name: str,
        place: FilePlace,
        path: str,
        shape: tuple[int, ...],
        dtype: np.dtype,
        slices: Sequence[StoredSlice],
        error: CheckpointError | None = None,
    ):
        super().__init__(name, place, shape, dtype, error, path=path)
        self._slices = tuple(slices)
        self._bases = list(itertools.accumulate((one.range.nbytes for one in slices), initial=0))

    @property
    def checksums(self) -> Checksums:
        return RangeChecksums(self, [(one.range, one.crc) for one in self._slices])

    def bytes_of(self, boxes: tuple[Box, ...]) -> int:
        total = 0
        for one in self._slices:
            met = [part for box in boxes if (part := intersect(box, one.box)) is not None]
            total += one.range.bytes_of(tuple([shift(part, one.box) for part in met]))
        return total

    def read_blocking(self, requests: Sequence[Request], stats: ReadStats) -> None:
        self.raise_error()
        checksum = stats.verify != "off"
        for base, one in zip(self._bases, self._slices, strict=False):
            wanted = [part for request in requests if (part := _within(request, one.box)) is not None]
            if not wanted:
                continue
            read = partial(one.range.read, wanted, checksum=checksum, leaf=self.name)
            outcome = read_unchanged(one.range.file, read, self.name, stats)
            stats.count(outcome.wanted, outcome.gaps)
            for covered in outcome.ranges:
                stats.add_range(self, moved(covered, base))


def _within(request: Request, box: Box) -> Request | None:
    """Returns a request's part within a slice, or None."""
    theirs: list[tuple[int, int]] = []
    ours: list[slice] = []
    for (low, high), (first, last) in zip(request.box, box, strict=True):
        start, stop = max(low, first), min(high, last)
        if start >= stop:
            return None
        theirs.append((start - first, stop - first))
        ours.append(slice(start - low, stop - low))
    return Request(tuple(theirs), request.out[tuple(ours)])
