"""Checksums of the boxes of an array.

They are made during the save, and compared while boxes of any shape are read. A checksum is the crc32c of a box's
elements in row-major order, as they are in memory on a little-endian machine, whatever the chunks and the compression
of the stored array. What a reader compares are byte ranges of the boxes laid end to end (`ChecksummedRange`): reads
that together cover a box verify it. Everything but `BoxChecksums` works on arrays in memory, a block at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from orbax_t5x.concurrency import reader_pool, run_in_pool
from orbax_t5x.errors import CheckpointError, CorruptCheckpointError
from orbax_t5x.files.crc import CRC32C
from orbax_t5x.files.interface import Snapshot
from orbax_t5x.files.memory import empty_array
from orbax_t5x.lazy.box import Box, box_shape, box_size, box_text, intersect, slices_within, union_size
from orbax_t5x.lazy.leaf import Checksums, Leaf, Request
from orbax_t5x.lazy.read_stats import ChecksummedRange, ReadStats
from orbax_t5x.readers.ranges.byte_range import byte_strides
from orbax_t5x.readers.ranges.coverage import cover
from orbax_t5x.readers.ranges.elements import LOW_BITS

# What is copied and summed at a time: it stays in a core's cache, and a sum holds the interpreter for 0.2 ms.
_BLOCK_BYTES = 1 << 20
# Of a box that is read in part, each index of the dimensions before the last that matters is a range of its own. A box
# with more of them stays unverified.
_MAX_ROWS = 1 << 14
# What `verify="full"` reads at a time only for checksums, where a row of chunks is not larger.
_VERIFY_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True)
class BoxSums:
    """Checksums of boxes that tile an array."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...]
    crcs: tuple[int, ...]

    @property
    def is_complete(self) -> bool:
        """True if the boxes, which are distinct, hold as many elements as the array."""
        return sum(map(box_size, self.boxes)) == math.prod(self.shape)

    @functools.cached_property
    def bases(self) -> tuple[int, ...]:
        """The byte offsets of the concatenated boxes, and their end."""
        itemsize = np.dtype(self.dtype).itemsize
        return tuple(itertools.accumulate((box_size(box) * itemsize for box in self.boxes), initial=0))

    @functools.cached_property
    def _corners(self) -> np.ndarray:
        return np.asarray(self.boxes, np.int64).reshape(len(self.boxes), len(self.shape), 2)

    def overlapping(self, box: Box) -> list[int]:
        """Lists the numbers of the boxes that overlap this box."""
        low, high = np.asarray(box, np.int64).reshape(-1, 2).T
        corners = self._corners
        return np.flatnonzero(np.all((corners[:, :, 0] < high) & (corners[:, :, 1] > low), axis=1)).tolist()


class Mismatch(NamedTuple):
    """A damaged box and the checksum that was read."""

    number: int
    crc: int | None


class Comparison(NamedTuple):
    """Result of a comparison: uncovered boxes and the first mismatch."""

    uncovered: list[int]
    mismatch: Mismatch | None


def array_crc(array: np.ndarray, crc: int = 0) -> int:
    """Extends `crc` by an array's elements in row-major order."""
    for block in _blocks(array):
        crc = CRC32C.extend(crc, _canonical(block))
    return crc


def sums_of(reads: Sequence[Request], sums: BoxSums) -> Iterator[ChecksummedRange]:
    """Yields the checksums of filled buffers."""
    met: dict[int, list[Request]] = {}
    for read in reads:
        for number in sums.overlapping(read.box):
            met.setdefault(number, []).append(read)
    for number, some in met.items():
        box, base, stop = sums.boxes[number], sums.bases[number], sums.bases[number + 1]
        whole = next((read for read in some if intersect(read.box, box) == box), None)
        if whole is not None:
            yield ChecksummedRange(base, stop, array_crc(whole.out[slices_within(box, whole.box)]))
            continue
        boxes = [common for read in some if (common := intersect(read.box, box)) is not None]
        if union_size(tuple(boxes)) == box_size(box):
            yield ChecksummedRange(base, stop, _joined_crc(box, some))
        else:
            for common, read in zip(boxes, some, strict=True):
                yield from _run_sums(common, box, read, base)


def compare_box_sums(ranges: Sequence[ChecksummedRange], sums: BoxSums) -> Comparison:
    """Compares the checksums of ranges with the stored checksums."""
    own: dict[int, list[ChecksummedRange]] = {}
    starts = np.asarray(sums.bases[:-1], np.int64)
    for one in ranges:
        number = int(np.searchsorted(starts, one.start, side="right")) - 1
        base = sums.bases[number]
        own.setdefault(number, []).append(one._replace(start=one.start - base, stop=one.stop - base))
    uncovered: list[int] = []
    for number, stored in enumerate(sums.crcs):
        found = cover(own.get(number, ()), sums.bases[number + 1] - sums.bases[number])
        if found.conflict is not None or (found.crc is not None and found.crc != stored):
            return Comparison(uncovered, Mismatch(number, found.crc))
        if found.crc is None or not found.complete:
            uncovered.append(number)
    return Comparison(uncovered, None)


def row_boxes(box: Box, itemsize: int, limit: int, rows: int = 1) -> Iterator[Box]:
    """Cuts a box along axis 0 into boxes of bounded size."""
    if not box:
        yield box
        return
    (low, high), *rest = box
    row_bytes = math.prod([stop - start for start, stop in rest]) * itemsize
    step = max(1, limit // max(1, row_bytes) // rows) * rows
    cuts = [low, *range((low // step + 1) * step, high, step), high]
    for start, stop in itertools.pairwise(cuts):
        yield ((start, stop), *rest)


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yields an array in row-major order as contiguous blocks."""
    if array.nbytes <= _BLOCK_BYTES or not array.ndim:
        yield np.ascontiguousarray(array)
        return
    rows = _BLOCK_BYTES // (array.nbytes // len(array))
    if not rows:
        for row in array:
            yield from _blocks(row)
        return
    for start in range(0, len(array), rows):
        yield np.ascontiguousarray(array[start : start + rows])


def _canonical(block: np.ndarray) -> np.ndarray:
    """Returns a contiguous block as bytes, without padding bits."""
    mask = LOW_BITS.get(block.dtype)
    return block if mask is None else block.view(np.uint8) & np.uint8(mask)


def _joined_crc(box: Box, reads: Sequence[Request]) -> int:
    """Returns the checksum of a box that several buffers hold together."""
    dtype = reads[0].out.dtype
    crc = 0
    for block in _small_boxes(box, dtype.itemsize):
        scratch = np.empty(box_shape(block), dtype)
        for read in reads:
            common = intersect(read.box, block)
            if common is not None:
                scratch[slices_within(common, block)] = read.out[slices_within(common, read.box)]
        crc = CRC32C.extend(crc, _canonical(scratch))
    return crc


def _small_boxes(box: Box, itemsize: int) -> Iterator[Box]:
    """Splits a box into boxes of at most `_BLOCK_BYTES`."""
    for axis in range(len(box)):
        row_bytes = math.prod([stop - start for start, stop in box[axis + 1 :]]) * itemsize
        if row_bytes <= _BLOCK_BYTES:
            for outer in itertools.product(*(range(*side) for side in box[:axis])):
                fixed = tuple((index, index + 1) for index in outer)
                for inner in row_boxes(box[axis:], itemsize, _BLOCK_BYTES):
                    yield (*fixed, *inner)
            return
    yield box


def _run_sums(common: Box, box: Box, read: Request, base: int) -> Iterator[ChecksummedRange]:
    """Yields the checksums of a box's byte ranges within another."""
    axis = len(box) - 1  # from here on it is one range
    while axis > 0 and common[axis] == box[axis]:
        axis -= 1
    counts = box_shape(common)[:axis]
    if math.prod(counts) > _MAX_ROWS:
        return
    values = read.out[slices_within(common, read.box)]
    strides = byte_strides(box_shape(box), values.dtype.itemsize)
    first = base + sum(
        (low - start) * stride for (low, _), (start, _), stride in zip(common, box, strides, strict=True)
    )
    for outer in np.ndindex(*counts):
        start = first + sum(index * stride for index, stride in zip(outer, strides, strict=False))
        yield ChecksummedRange(start, start + values[outer].nbytes, array_crc(values[outer]))


class BoxChecksums(Checksums):
    """Checksums of boxes that tile an array."""

    def __init__(self, leaf: Leaf, sums: BoxSums, files: Snapshot):
        self._leaf, self._sums, self._files = leaf, sums, files

    async def verify(self, stats: ReadStats, ranges: Sequence[ChecksummedRange]) -> bool:
        sums = self._sums
        found = compare_box_sums(ranges, sums)
        if found.mismatch is not None:
            raise await run_in_pool(reader_pool(), self._damage, found.mismatch)
        if found.uncovered and stats.verify == "full":
            for number in found.uncovered:
                crc = await self._read_crc(sums.boxes[number], stats)
                if crc != sums.crcs[number]:
                    raise await run_in_pool(reader_pool(), self._damage, Mismatch(number, crc))
            return True
        return not found.uncovered

    async def _read_crc(self, box: Box, stats: ReadStats) -> int:
        """Reads a box for its checksum only, by rows of chunks."""
        leaf, crc = self._leaf, 0
        rows = leaf.chunks[0] if leaf.chunks else 1
        reading = ReadStats("off")
        reading.decoding = stats.decoding
        for rows_box in row_boxes(box, leaf.dtype.itemsize, _VERIFY_BYTES, rows):
            out = empty_array(box_shape(rows_box), leaf.dtype)
            await leaf.read_into([Request(rows_box, out)], reading)
            crc = await run_in_pool(reader_pool(), array_crc, out, crc)
        stats.count(reading.bytes_read)
        return crc

    def _damage(self, mismatch: Mismatch) -> CheckpointError:
        """Returns the error of a wrong checksum."""
        leaf = self._leaf
        try:
            self._files.check_unchanged(leaf=leaf.name)
        except CheckpointError as error:
            return error
        box = box_text(self._sums.boxes[mismatch.number]) if leaf.shape else "its value"
        stored = self._sums.crcs[mismatch.number]
        if mismatch.crc is None:
            message = f"{box} gave different values when read twice; the files are changing"
        else:
            message = f"{box} has the crc32c {mismatch.crc:#010x}, stored is {stored:#010x}; the data are damaged"
        return CorruptCheckpointError(message, path=leaf.path, leaf=leaf.name)
