"""Leaf in a compressed member.

It is decompressed as a stream, within limits, and its crc32 is compared at each read.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from orbax_t5x.errors import CorruptCheckpointError, LimitExceededError, error_at
from orbax_t5x.extras.npz.header import ArrayHeader
from orbax_t5x.files.crc import CRC32
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.windows import WINDOW_BYTES
from orbax_t5x.lazy.box import full_box, union_size
from orbax_t5x.lazy.leaf import FileExtent, Request
from orbax_t5x.lazy.read_stats import ReadStats
from orbax_t5x.readers.ranges.byte_runs import WindowGrid, union_runs
from orbax_t5x.readers.ranges.leaf import RangeLeaf
from orbax_t5x.readers.ranges.scatter import Elements, Scatter
from orbax_t5x.readers.ranges.strided import row_major
from orbax_t5x.readers.zip_members import Archive

_READ_BYTES = 1 << 20
# Of a read: what was read, decompressed, held over and placed.
_WORKING_BYTES = 4 * WINDOW_BYTES
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

    @property
    def working_bytes(self) -> int:
        return min(_WORKING_BYTES, self._archive.members[self._member].size)

    async def read_into(self, requests: Sequence[Request], stats: ReadStats) -> None:
        await stats.decoding.take(self.working_bytes)
        try:
            await super().read_into(requests, stats)
        finally:
            stats.decoding.give(self.working_bytes)

    def read_blocking(self, requests: Sequence[Request], stats: ReadStats) -> None:
        self._archive.file.require_open()
        wanted = [request for request in requests if request.out.size]
        if not wanted:
            return
        shape, stored = self.shape, wanted
        if self._header.strides != row_major(shape):
            # By columns: the rows of the transposed array.
            shape, stored = shape[::-1], [Request(box[::-1], out.T) for box, out in wanted]
        itemsize = self.dtype.itemsize
        grid = WindowGrid(shape, itemsize, WINDOW_BYTES)
        scatter = Scatter(shape, grid.depth, stored, Elements(self.dtype, self._header.swap, self.path, self.name))
        pieces = self._decompressed()
        held = bytearray()
        read_over = self._start
        for window in grid.windows(union_runs(shape, itemsize, [full_box(shape)], 0)[0]):
            while len(held) < read_over + window.stop - window.start:
                held += next(pieces)
            data = np.frombuffer(bytes(held[read_over : read_over + window.stop - window.start]), np.uint8)
            scatter.window(window, data)
            del held[: read_over + data.size]
            read_over = 0
        for _ in pieces:
            pass  # what it ends with is compared
        self._archive.file.check_unchanged(leaf=self.name)
        stats.count(union_size(tuple([request.box for request in wanted])) * itemsize)

    def _decompressed(self) -> Iterator[bytes]:
        """Yields the decompressed member; at its end, size and checksum are compared."""
        member = self._archive.members[self._member]
        try:
            self._limits.require_chunk(member.size, f"the array {self._member!r}, decompressed,")
        except LimitExceededError as error:
            raise error_at(error, path=self.path, leaf=self.name) from None
        start = self._archive.local_start(self._member)
        ranges = [(at, min(_READ_BYTES, member.stored - at)) for at in range(0, member.stored, _READ_BYTES)]
        file = self._archive.file.ahead((start + at, size) for at, size in ranges)
        buffer = np.empty(min(_READ_BYTES, member.stored), np.uint8)
        stream = zlib.decompressobj(_RAW)
        crc = found = 0
        try:
            for at, size in ranges:
                file.read_into(start + at, [buffer[:size]], leaf=self.name)
                data = buffer[:size].tobytes()
                is_full = True
                # A full piece may leave some of its input's output in the stream.
                while (data or is_full) and found <= member.size:
                    piece = stream.decompress(data, _READ_BYTES)
                    data, is_full = stream.unconsumed_tail, len(piece) == _READ_BYTES
                    crc, found = CRC32.extend(crc, piece), found + len(piece)
                    yield piece
        except zlib.error as error:
            raise self._corrupt(f"it cannot be decompressed: {error}") from None
        if found != member.size or not stream.eof or stream.unused_data:
            raise self._corrupt(f"its member decompresses to other than {member.size} bytes")
        if member.crc is not None and crc != member.crc:
            raise self._corrupt("its member does not have its crc32; the data are damaged")

    def _corrupt(self, message: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(message, path=self.path, leaf=self.name)
