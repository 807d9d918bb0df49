"""Leaf in a stored member of a ZIP archive, at any strides.

The member's crc32 is its checksum.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from orbax_t5x.files.crc import CRC32
from orbax_t5x.files.limits import charge_metadata
from orbax_t5x.files.windows import MAX_GAP_BYTES
from orbax_t5x.lazy.box import Box, full_box
from orbax_t5x.lazy.leaf import Checksums, FileExtent, Request
from orbax_t5x.lazy.read_stats import ChecksummedRange, ReadStats
from orbax_t5x.readers.ranges.byte_range import ByteRange
from orbax_t5x.readers.ranges.coverage import RangeChecksums
from orbax_t5x.readers.ranges.leaf import RangeLeaf, read_unchanged
from orbax_t5x.readers.ranges.strided import StridedRange
from orbax_t5x.readers.zip_members import Archive, member_bytes

# What such a leaf takes beyond others.
_MORE_BYTES = 1200


class ZipLeaf(RangeLeaf):
    """Array in a member of an archive."""

    __slots__ = ("_archive", "_crc", "_head", "_member", "_name", "_range", "_repeated", "storage")

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
        """Describes the array."""
        charge_metadata(_MORE_BYTES, archive.file.path)
        super().__init__(name, archive.file, shape, dtype)
        stored = member_bytes(archive, member, name)
        self._archive, self._name = archive, member
        self._range = StridedRange(stored, offset, shape, strides, dtype, swap=swap, kind=CRC32)
        self._repeated = tuple(
            axis for axis, (stride, size) in enumerate(zip(strides, shape, strict=True)) if not stride and size > 1
        )
        self._member = ByteRange(stored, 0, (archive.members[member].size,), np.dtype(np.uint8), kind=CRC32)
        self.storage: Hashable = (archive.file.path, member, offset, shape, strides, dtype, swap)
        self._crc = archive.members[member].crc
        self._head = ChecksummedRange(0, len(head), CRC32.extend(0, head))

    @property
    def checksums(self) -> Checksums | None:
        return None if self._crc is None else RangeChecksums(self, [(self._member, self._crc)], CRC32)

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
        outcome = read_unchanged(self._range, requests, checksum=checksum, leaf=self.name)
        stats.count(outcome.wanted, outcome.gaps)
        for one in (self._head, *outcome.ranges) if outcome.ranges and self._head.stop else outcome.ranges:
            stats.add_range(self, one)
