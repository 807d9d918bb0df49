"""Leaf in a file's byte range, with or without a crc32c."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from orbax_t5x import on_demand
from orbax_t5x.concurrency import reader_pool, run_in_pool, waiting_pool
from orbax_t5x.errors import CheckpointError, CorruptCheckpointError
from orbax_t5x.files.crc import CRC32C
from orbax_t5x.files.interface import FilePlace, StoredBytes
from orbax_t5x.lazy.box import Box, box_slices
from orbax_t5x.lazy.leaf import BlockingLeaf, Checksums, FileExtent, HeldRead, Request
from orbax_t5x.lazy.read_stats import ChecksummedRange, ReadStats
from orbax_t5x.readers.ranges.byte_range import ByteRange, ReadOutcome, StoredRange
from orbax_t5x.readers.ranges.elements import as_stored

# Of formats with checksums only.
_range_checksums = on_demand.function("orbax_t5x.readers.ranges.coverage", "RangeChecksums")


class RangeLeaf(BlockingLeaf):
    """Base of leaves with blocking reads, made in threads."""

    __slots__ = ("dtype", "error", "is_remote", "name", "path", "shape")

    def __init__(
        self,
        name: str,
        place: FilePlace,
        shape: tuple[int, ...],
        dtype: np.dtype,
        error: CheckpointError | None = None,
        *,
        path: str | None = None,
    ):
        self.name: str = name
        self.path: str = place.path if path is None else path
        self.is_remote: bool = place.is_remote
        self.shape: tuple[int, ...] = shape
        self.dtype: np.dtype = dtype
        self.error: CheckpointError | None = error

    async def read_into(self, requests: Sequence[Request], stats: ReadStats) -> None:
        pool = waiting_pool() if self.is_remote else reader_pool()
        await run_in_pool(pool, self.read_blocking, requests, stats)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} {self.dtype} {self.shape} of {self.path!r}>"


class ByteRangeLeaf(RangeLeaf):
    """Array in a byte range of a file, perhaps with crc32c."""

    __slots__ = ("crc", "range")

    def __init__(self, name: str, range: StoredRange, crc: int | None = None, error: CheckpointError | None = None):
        # As `RangeLeaf` does it: there is one for each of many leaves.
        file = range.file
        self.name: str = name
        self.path: str = file.path
        self.is_remote: bool = file.is_remote
        self.shape: tuple[int, ...] = range.shape
        self.dtype: np.dtype = range.dtype
        self.error: CheckpointError | None = error
        self.range: StoredRange = range
        self.crc: int | None = crc

    @property
    def checksums(self) -> Checksums | None:
        return None if self.crc is None else _range_checksums(self, [(self.range, self.crc)])

    @property
    def extent(self) -> FileExtent | None:
        offset = self.range.offset
        return FileExtent(self.range.file, offset, offset + self.range.nbytes)

    def bytes_of(self, boxes: tuple[Box, ...]) -> int:
        return self.range.bytes_of(boxes)

    def read_blocking(self, requests: Sequence[Request], stats: ReadStats) -> None:
        self.raise_error()
        checksum = self.crc is not None and stats.verify != "off"
        read = partial(self.range.read, requests, checksum=checksum, leaf=self.name)
        outcome = read_unchanged(self.range.file, read, self.name, stats)
        stats.count(outcome.wanted, outcome.gaps)
        for one in outcome.ranges:
            stats.add_range(self, one)

    @classmethod
    def read_held(cls, reads: Sequence[HeldRead], stats: ReadStats) -> int:
        total = 0
        for leaf, requests, data in reads:
            assert isinstance(leaf, ByteRangeLeaf)
            stored, dtype = leaf.range, leaf.dtype
            is_one = len(requests) == 1
            wanted = requests[0].out.nbytes if is_one else leaf.bytes_of(tuple([request.box for request in requests]))
            is_summed = leaf.crc is not None and stats.verify != "off"
            # An extent may have more bytes than the array, and a sum is of the whole.
            is_other = data.nbytes != stored.nbytes or (is_summed and wanted != data.nbytes)
            if is_other or not isinstance(stored, ByteRange) or stored.swap or not as_stored(dtype):
                leaf.read_blocking(requests, stats)
                continue
            array = data.view(dtype).reshape(leaf.shape)
            for box, out in requests:
                part = array if out.shape == leaf.shape else array[box_slices(box)]
                if part.shape != out.shape or out.dtype != dtype:
                    raise ValueError(f"{leaf.name}: a buffer of {out.dtype} {out.shape} for {box} of {leaf!r}")
                out[...] = part
            if is_summed and wanted:
                stats.add_range(leaf, ChecksummedRange(0, wanted, stored.kind.extend(0, data)))
            total += wanted
        return total

    def copy_blocking(self, box: Box, sink: Callable[[int, np.ndarray], None], stats: ReadStats) -> int | None:
        """Passes a box's bytes to `sink`, returns their crc32c; blocks."""
        self.raise_error()
        found = self.range.as_in_memory(box)
        if found is None or not isinstance(self.range, ByteRange) or self.range.kind is not CRC32C:
            return None
        outcome = self.range.sum([found], leaf=self.name, sink=sink)
        stats.prove_unchanged(self.range.file, leaf=self.name)
        stats.count(outcome.wanted)
        for one in outcome.ranges if self.crc is not None and stats.verify != "off" else ():
            stats.add_range(self, one)
        return outcome.ranges[0].crc if outcome.ranges else 0


def read_unchanged(file: StoredBytes, read: Callable[[], ReadOutcome], leaf: str, stats: ReadStats) -> ReadOutcome:
    """Reads a file, proven unchanged since its opening; blocks."""
    try:
        outcome = read()
    except CorruptCheckpointError:
        file.check_unchanged(leaf=leaf)
        raise
    stats.prove_unchanged(file, leaf=leaf)
    return outcome
