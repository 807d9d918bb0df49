"""Leaf in a stored member of a ZIP archive, at any strides.

The array is transposed, repeated, or a slice of a larger array. Its dimensions in the order of their strides are the
dimensions of a row-major array, of which it is a box; a request is one to that array, with its buffer's dimensions in
that order. Where a stride is no multiple of the next one (every second column of an odd number), there is such an array
for each index of the dimensions before. The member's crc32 is its checksum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from functools import partial

import numpy as np

from orbax_t5x.concurrency import reader_pool, run_in_pool
from orbax_t5x.errors import CheckpointError, error_at
from orbax_t5x.files.crc import CRC32, Crc
from orbax_t5x.files.interface import StoredFile
from orbax_t5x.files.windows import MAX_GAP_BYTES
from orbax_t5x.lazy.box import Box, box_shape, full_box, union_size
from orbax_t5x.lazy.leaf import Checksums, FileExtent, Request
from orbax_t5x.lazy.read_stats import ChecksummedRange, ReadStats
from orbax_t5x.readers.ranges.byte_range import ByteRange, ReadOutcome
from orbax_t5x.readers.ranges.coverage import RangeChecksums
from orbax_t5x.readers.ranges.leaf import RangeLeaf, read_unchanged
from orbax_t5x.readers.zip_members import Archive


def last_element(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Returns the last element's position from the first element."""
    return sum([(size - 1) * stride for size, stride in zip(shape, strides, strict=True)])


def has_overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Tests if indices share elements, repeats by stride 0 aside."""
    reached = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride:
            if stride <= reached:
                return True
            reached += (size - 1) * stride
    return False


class StridedRange:
    """Strided array with element 0 at `offset` of a file or member.

    The reader has proven that its elements are inside.
    """

    def __init__(
        self,
        file: StoredFile,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: np.dtype,
        *,
        swap: bool,
        kind: Crc,
    ):
        self.shape = shape
        self.dtype = dtype
        self._file, self._offset, self._swap, self._kind = file, offset, swap, kind
        self._strides = strides
        axes = [axis for axis, size in enumerate(shape) if size > 1 and strides[axis]]
        axes.sort(key=lambda axis: -strides[axis])
        first = max(0, len(axes) - 1)
        while first and strides[axes[first - 1]] % strides[axes[first]] == 0:
            first -= 1
        self._outer, self._inner = axes[:first], axes[first:]
        steps = [strides[axis] for axis in self._inner] or [1]
        self._base = (
            *(shape[axis] for axis in self._inner[:1]),
            *(before // after for before, after in itertools.pairwise(steps)),
            steps[-1],
        )
        self._order = [sorted(self._inner).index(axis) for axis in self._inner]

    def bytes_of(self, boxes: tuple[Box, ...]) -> int:
        """Counts the bytes of boxes, each element as often as stored."""
        axes = self._outer + self._inner
        stored = {tuple(box[axis] for axis in axes) for box in boxes if 0 not in box_shape(box)}
        return union_size(tuple(stored)) * self.dtype.itemsize

    def read(self, requests: Sequence[Request], *, checksum: bool, leaf: str, start: int = 0) -> ReadOutcome:
        """Fills all requests from the member that begins at `start`."""
        for box, out in requests:
            if box_shape(box) != out.shape or out.dtype != self.dtype:
                raise ValueError(
                    f"{leaf}: a buffer of {out.dtype} {out.shape} for {box} of an array of {self.dtype} {self.shape}"
                )
        wanted = [request for request in requests if request.out.size]
        ranges: list[ChecksummedRange] = []
        sizes = [0, 0]
        for index, inner in self._by_outer_index(wanted):
            at = sum([i * self._strides[axis] for i, axis in zip(index, self._outer, strict=True)])
            offset = self._offset + at * self.dtype.itemsize
            stored = ByteRange(self._file, start + offset, self._base, self.dtype, self._swap, self._kind)
            outcome = stored.read(inner, checksum=checksum and not self._outer, leaf=leaf)
            ranges += [one._replace(start=one.start + offset, stop=one.stop + offset) for one in outcome.ranges]
            sizes = [sizes[0] + outcome.wanted, sizes[1] + outcome.gaps]
        for _, out in wanted:
            self._repeat(out)
        return ReadOutcome(ranges, sizes[0], sizes[1])

    def _by_outer_index(self, requests: Sequence[Request]) -> Iterator[tuple[tuple[int, ...], list[Request]]]:
        """Yields each wanted outer index with requests below it."""
        if not requests:
            return
        sides = [[request.box[axis] for request in requests] for axis in self._outer]
        spans = [range(min(low for low, _ in side), max(high for _, high in side)) for side in sides]
        for index in itertools.product(*spans):
            inner = [
                self._inner_request(request, index)
                for request in requests
                if all(
                    request.box[axis][0] <= i < request.box[axis][1] for i, axis in zip(index, self._outer, strict=True)
                )
            ]
            if inner:
                yield index, inner

    def _inner_request(self, request: Request, index: tuple[int, ...]) -> Request:
        box, out = request
        places = dict(zip(self._outer, index, strict=True))
        at = [
            slice(None) if axis in self._inner else places[axis] - box[axis][0] if axis in places else 0
            for axis in range(out.ndim)
        ]
        buffer = out[(*at, ...)].transpose(self._order)[..., None]
        return Request((*(box[axis] for axis in self._inner), (0, 1)), buffer)

    def _repeat(self, out: np.ndarray) -> None:
        """Copies read elements along the dimensions of stride 0."""
        read = set(self._outer + self._inner)
        first = tuple(slice(None) if axis in read else slice(1) for axis in range(out.ndim))
        if out[first].size < out.size:
            out[...] = out[first]


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a row-major array, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


class ZipLeaf(RangeLeaf):
    """Array in a member of an archive."""

    __slots__ = ("_archive", "_crc", "_head", "_name", "_range", "_repeated", "_start", "storage")

    def __init__(
        self,
        name: str,
        archive: Archive,
        member: str,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: np.dtype,
        *,
        swap: bool = False,
        head: bytes = b"",
    ):
        super().__init__(name, archive.file, shape, dtype)
        self._archive, self._name = archive, member
        self._start: int | None = None
        self._range = StridedRange(archive.file, offset, shape, strides, dtype, swap=swap, kind=CRC32)
        self._repeated = tuple(
            axis for axis, (stride, size) in enumerate(zip(strides, shape, strict=True)) if not stride and size > 1
        )
        self.storage: Hashable = (archive.file.path, member, offset, shape, strides, dtype, swap)
        self._crc = archive.members[member].crc
        self._head = ChecksummedRange(0, len(head), CRC32.extend(0, head))

    @property
    def checksums(self) -> Checksums | None:
        return None if self._crc is None else _MemberChecksum(self, self._crc)

    @property
    def repeated(self) -> tuple[int, ...]:
        return self._repeated

    @property
    def extent(self) -> FileExtent | None:
        extent = self._archive.extent(self._name)
        beside = extent.stop - extent.start - self._range.bytes_of((full_box(self.shape),))
        return extent if beside < MAX_GAP_BYTES else None

    def bytes_of(self, boxes: tuple[Box, ...]) -> int:
        return self._range.bytes_of(boxes)

    def read_blocking(self, requests: Sequence[Request], stats: ReadStats) -> None:
        checksum = self._crc is not None and stats.verify != "off"
        read = partial(self._range.read, requests, checksum=checksum, leaf=self.name, start=self.start())
        outcome = read_unchanged(self._archive.file, read, self.name, stats)
        stats.count(outcome.wanted, outcome.gaps)
        for one in (self._head, *outcome.ranges) if outcome.ranges and self._head.stop else outcome.ranges:
            stats.add_range(self, one)

    @property
    def is_found(self) -> bool:
        """True once the member's first byte is known."""
        return self._start is not None

    def start(self) -> int:
        """Finds the member's first byte, once."""
        if self._start is None:
            try:
                self._start = self._archive.start_of(self._name)
            except CheckpointError as error:
                raise error_at(error, path=self.path, leaf=self.name) from None
        return self._start

    def member(self) -> ByteRange:
        """Returns the bytes of the member."""
        size = self._archive.members[self._name].size
        return ByteRange(self._archive.file, self.start(), (size,), np.dtype(np.uint8), kind=CRC32)


class _MemberChecksum(Checksums):
    kind = CRC32

    def __init__(self, leaf: ZipLeaf, crc: int):
        self._leaf, self._crc = leaf, crc

    async def verify(self, stats: ReadStats, ranges: Sequence[ChecksummedRange]) -> bool:
        if self._leaf.is_found:  # waking a thread for each of many leaves costs more than their sums
            stored = self._leaf.member()
        else:
            stored = await run_in_pool(reader_pool(), self._leaf.member)
        return await RangeChecksums(self._leaf, [(stored, self._crc)], CRC32).verify(stats, ranges)
