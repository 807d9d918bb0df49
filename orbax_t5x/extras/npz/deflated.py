"""Leaf in a compressed member.

It is decompressed whole, within limits, and its crc32 is compared at each read.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from orbax_t5x.errors import CorruptCheckpointError, LimitExceededError, error_at
from orbax_t5x.extras.npz.header import ArrayHeader
from orbax_t5x.files.crc import CRC32
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.memory import strided
from orbax_t5x.files.windows import WINDOW_BYTES
from orbax_t5x.lazy.box import box_slices, union_size
from orbax_t5x.lazy.leaf import FileExtent, Request
from orbax_t5x.lazy.read_stats import ReadStats
from orbax_t5x.readers.ranges.leaf import RangeLeaf
from orbax_t5x.readers.ranges.scatter import Elements
from orbax_t5x.readers.zip_members import Archive

_READ_BYTES = 1 << 20
# A raw stream without the header and the checksum of zlib.
_RAW = -15


def decompress_head(data: bytes, size: int) -> bytes:
    """Decompresses the first `size` bytes of a member, or fewer.

    The member's beginning is enough.

    Raises:
      CorruptCheckpointError: without the file.
    """
    try:
        return zlib.decompressobj(_RAW).decompress(data, size)
    except zlib.error as error:
        raise CorruptCheckpointError(f"it cannot be decompressed: {error}") from None


class DeflatedLeaf(RangeLeaf):
    """An array in a compressed member; `chunks` is its whole shape."""

    __slots__ = ("_archive", "_header", "_limits", "_member", "_start", "chunks")

    def __init__(self, name: str, archive: Archive, member: str, start: int, header: ArrayHeader, limits: Limits):
        """Describes the array at `start` of the decompressed member."""
        super().__init__(name, archive.file, header.shape, header.dtype)
        self._archive, self._member, self._start = archive, member, start
        self._header, self._limits = header, limits
        self.chunks: tuple[int, ...] | None = tuple(max(1, size) for size in header.shape)

    @property
    def chunk_checksum(self) -> str | None:
        return None if self._archive.members[self._member].crc is None else "zip"

    @property
    def extent(self) -> FileExtent | None:
        # What is decompressed together with others takes no memory that `read_into` would have to wait for.
        is_small = self._archive.members[self._member].size <= WINDOW_BYTES
        return self._archive.extent(self._member) if is_small else None

    async def read_into(self, requests: Sequence[Request], stats: ReadStats) -> None:
        size = self._archive.members[self._member].size
        await stats.decoding.take(size)
        try:
            await super().read_into(requests, stats)
        finally:
            stats.decoding.give(size)

    def read_blocking(self, requests: Sequence[Request], stats: ReadStats) -> None:
        self._archive.file.require_open()
        wanted = [request for request in requests if request.out.size]
        if not wanted:
            return
        data = self._decompress()
        self._archive.file.check_unchanged(leaf=self.name)
        array = strided(
            np.frombuffer(data, self.dtype, offset=self._start),
            self.shape,
            [stride * self.dtype.itemsize for stride in self._header.strides],
            writeable=False,
        )
        elements = Elements(self.dtype, self._header.swap, self.path, self.name)
        for box, out in wanted:
            elements.copy(np.ascontiguousarray(array[box_slices(box)]).reshape(out.shape), out)
        stats.count(union_size(tuple(request.box for request in wanted)) * self.dtype.itemsize)

    def _decompress(self) -> bytearray:
        """Reads and decompresses the member, up to its recorded size."""
        member = self._archive.members[self._member]
        try:
            self._limits.require_chunk(member.size, f"the array {self._member!r}, decompressed,")
        except LimitExceededError as error:
            raise error_at(error, path=self.path, leaf=self.name) from None
        start = self._archive.local_start(self._member)
        pieces = [(at, min(_READ_BYTES, member.stored - at)) for at in range(0, member.stored, _READ_BYTES)]
        file = self._archive.file.ahead((start + at, size) for at, size in pieces)
        buffer = np.empty(min(_READ_BYTES, member.stored), np.uint8)
        stream = zlib.decompressobj(_RAW)
        data = bytearray()
        try:
            for at, size in pieces:
                file.read_into(start + at, [buffer[:size]], leaf=self.name)
                data += stream.decompress(buffer[:size].tobytes(), member.size - len(data) + 1)
                if len(data) > member.size:
                    break
        except zlib.error as error:
            raise self._corrupt(f"it cannot be decompressed: {error}") from None
        if len(data) != member.size or not stream.eof or stream.unused_data:
            raise self._corrupt(f"its member decompresses to other than {member.size} bytes")
        if member.crc is not None and CRC32.extend(0, np.frombuffer(data, np.uint8)) != member.crc:
            raise self._corrupt("its member does not have its crc32; the data are damaged")
        return data

    def _corrupt(self, message: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(message, path=self.path, leaf=self.name)
