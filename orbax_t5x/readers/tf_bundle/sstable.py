"""LevelDB tables, read from end to end.

The index of a TensorFlow bundle is such a table. A table is blocks of sorted, prefix-compressed entries, an index block
with their offsets, and a footer with where that is. Everything is proven before it is used: a length is compared with
the file and the limits before anything is allocated, each block is read once and its checksum holds, blocks follow one
another, and keys ascend strictly through the whole table. One block is in memory at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import cramjam

from orbax_t5x.errors import CorruptCheckpointError, LimitExceededError, UnsupportedCheckpointError
from orbax_t5x.files.crc import CRC32C
from orbax_t5x.files.interface import StoredFile

MAGIC = bytes.fromhex("57fb808b247547db")
_FOOTER_BYTES = 48
# Behind each block: one byte for the compression, four of checksum.
_TRAILER_BYTES = 5
_RAW, _SNAPPY = 0, 1
# Writers make blocks of 256 KiB; a longer one only takes memory.
_MOST_BLOCK_BYTES = 64 << 20
# Ten groups of seven bits hold 64.
_MAX_VARINT_BYTES = 10
_MASK_DELTA = 0xA282EAD8


class BadVarint(ValueError):
    """Error of bytes that are no varint of at most 64 bits.

    It becomes a typed error as soon as file and leaf are known.
    """


def unmask(masked: int) -> int:
    """Returns the checksum behind a `masked` checksum."""
    rotated = (masked - _MASK_DELTA) & 0xFFFFFFFF
    return ((rotated >> 17) | (rotated << 15)) & 0xFFFFFFFF


def read_varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Reads the varint at `at`; returns it and the next position."""
    value = shift = 0
    for place in range(at, min(end, at + _MAX_VARINT_BYTES)):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                break
            return value, place + 1
        shift += 7
    raise BadVarint(f"no varint at byte {at}")


class _Handle(NamedTuple):
    """Offset and size of a block."""

    offset: int
    size: int

    @property
    def stop(self) -> int:
        return self.offset + self.size + _TRAILER_BYTES


def _read_handle(data: bytes, at: int, end: int) -> tuple[_Handle, int]:
    offset, at = read_varint(data, at, end)
    size, at = read_varint(data, at, end)
    return _Handle(offset, size), at


def is_table(file: StoredFile) -> bool:
    """Reports whether a file ends as a table does."""
    return file.size >= _FOOTER_BYTES and bytes(file.read(file.size - len(MAGIC), len(MAGIC))) == MAGIC


class Table:
    """Open table that reads its blocks as they are iterated."""

    def __init__(self, file: StoredFile):
        self._file = file
        # What the file, and what blocks and their keys may take: snappy makes blocks longer, shared beginnings keys.
        self._left = file.limits.index_bytes
        self._take(file.size)
        self._left = file.limits.index_bytes
        if file.size < _FOOTER_BYTES:
            raise self._corrupt(f"not an SSTable: {file.size} bytes are less than its footer has")
        footer = bytes(file.read(file.size - _FOOTER_BYTES, _FOOTER_BYTES))
        if not footer.endswith(MAGIC):
            raise self._corrupt(
                f"not an SSTable: it ends in {footer[-len(MAGIC) :].hex()}, not {MAGIC.hex()}; it may be cut"
            )
        try:
            meta, at = _read_handle(footer, 0, _FOOTER_BYTES - len(MAGIC))
            index, _ = _read_handle(footer, at, _FOOTER_BYTES - len(MAGIC))
        except BadVarint:
            raise self._corrupt("the footer holds no block handles") from None
        self._end = file.size - _FOOTER_BYTES
        self._check(meta)
        self._check(index)
        self._blocks = self._read_index(index, meta)

    def _corrupt(self, message: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(message, path=self._file.path)

    def _take(self, nbytes: int) -> None:
        """Counts bytes of blocks or keys."""
        self._left -= nbytes
        if self._left < 0:
            message = f"the index has more bytes than Limits.index_bytes = {self._file.limits.index_bytes}"
            raise LimitExceededError(message, path=self._file.path)

    def _check(self, handle: _Handle) -> None:
        if handle.stop > self._end:
            raise self._corrupt(
                f"a block of {handle.size} bytes at {handle.offset} reaches beyond the footer at {self._end}"
            )

    def _read_index(self, index: _Handle, meta: _Handle) -> list[_Handle]:
        """Reads the handle of each data block."""
        blocks: list[_Handle] = []
        reached = 0
        for _, value in self._entries(index, self._read_block(index)):
            try:
                handle, at = _read_handle(value, 0, len(value))
            except BadVarint:
                raise self._corrupt("an entry of the index block holds no block handle") from None
            if at != len(value):
                raise self._corrupt("an entry of the index block holds more than a block handle")
            self._check(handle)
            apart = handle.offset >= reached and all(
                handle.stop <= other.offset or other.stop <= handle.offset for other in (index, meta)
            )
            if not apart:
                raise self._corrupt(f"the block at {handle.offset} begins inside another one, or before it")
            reached = handle.stop
            blocks.append(handle)
        return blocks

    def _read_block(self, handle: _Handle) -> bytes:
        stored = bytes(self._file.read(handle.offset, handle.size + _TRAILER_BYTES))
        kind = stored[handle.size]
        (masked,) = struct.unpack_from("<I", stored, handle.size + 1)
        computed = CRC32C.extend(0, stored[: handle.size + 1])
        if unmask(masked) != computed:
            raise self._corrupt(
                f"the block at {handle.offset} has the crc32c {computed:#010x}, stored is {unmask(masked):#010x}:"
                " the index is damaged"
            )
        if kind == _RAW:
            block = stored[: handle.size]
        elif kind == _SNAPPY:
            block = self._decompress(stored[: handle.size], handle)
        else:
            raise UnsupportedCheckpointError(
                f"the block at {handle.offset} has compression {kind}; 0 (none) and 1 (snappy) can be read",
                path=self._file.path,
            )
        self._take(len(block))
        return block

    def _decompress(self, stored: bytes, handle: _Handle) -> bytes:
        try:
            size, _ = read_varint(stored, 0, len(stored))
        except BadVarint:
            raise self._corrupt(f"the snappy block at {handle.offset} has no length") from None
        if size > _MOST_BLOCK_BYTES:
            raise LimitExceededError(
                f"the block at {handle.offset} unpacks to {size} bytes, the limit is {_MOST_BLOCK_BYTES}",
                path=self._file.path,
            )
        # Three bytes make at most 64: a length beyond that is false and would only allocate memory.
        if size > len(stored) * 22 + 64:
            raise self._corrupt(f"{len(stored)} bytes of snappy at {handle.offset} cannot unpack to {size}")
        block = bytearray(size)
        try:
            written = cramjam.snappy.decompress_raw_into(stored, block)
        except Exception as error:  # cramjam has one type for all that can be wrong, and may add others
            raise self._corrupt(f"the snappy block at {handle.offset} is damaged: {error}") from None
        if written != size:
            raise self._corrupt(
                f"the snappy block at {handle.offset} unpacks to {written} bytes, not to the {size} of its header"
            )
        return bytes(block)

    def _entries(self, handle: _Handle, block: bytes) -> Iterator[tuple[bytes, bytes]]:
        where = f"the block at {handle.offset}"
        if len(block) < 4:
            raise self._corrupt(f"{where} has no restart points")
        (count,) = struct.unpack_from("<I", block, len(block) - 4)
        end = len(block) - 4 - 4 * count
        if end < 0:
            raise self._corrupt(f"{where} of {len(block)} bytes claims {count} restart points")
        at = 0
        key = b""
        try:
            while at < end:
                start = at
                shared, unshared, size = block[at : at + 3]  # restart points follow, so there are three
                if shared | unshared | size < 0x80 and at + 3 <= end:
                    at += 3
                else:
                    shared, at = read_varint(block, at, end)
                    unshared, at = read_varint(block, at, end)
                    size, at = read_varint(block, at, end)
                if shared > len(key) or unshared + size > end - at:
                    raise self._corrupt(f"an entry of {where} at byte {start} reaches outside of it")
                self._take(shared)
                key = key[:shared] + block[at : at + unshared]
                at += unshared
                yield key, block[at : at + size]
                at += size
        except BadVarint:
            raise self._corrupt(f"an entry of {where} has no proper lengths") from None

    def entries(self) -> Iterator[tuple[bytes, bytes]]:
        """Yields all (key, value) of the table, strictly ascending."""
        last: bytes | None = None
        for handle in self._blocks:
            for key, value in self._entries(handle, self._read_block(handle)):
                if last is not None and key <= last:
                    raise self._corrupt(f"the key {key[:80]!r} does not come after {last[:80]!r}")
                last = key
                yield key, value
