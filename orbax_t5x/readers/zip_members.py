"""The members of a ZIP archive: named byte ranges of a file.

Each has a crc32. The archive is as PyTorch and NumPy write it. Opening reads the central directory alone, by Python's
`zipfile`. No two members may have one name or share a byte, so that a file has one reading. The local header of a
member is compared with the directory when the member is first read.
"""

from __future__ import annotations

import io
import itertools
import os
import struct
import zipfile
from typing import NamedTuple

from orbax_t5x.errors import CheckpointError, CorruptCheckpointError, LimitExceededError
from orbax_t5x.files.crc import CRC32
from orbax_t5x.files.interface import StoredFile
from orbax_t5x.files.paths import split_name
from orbax_t5x.files.windows import read_windows, windows_of
from orbax_t5x.lazy.leaf import FileExtent
from orbax_t5x.readers.hub_files import LFS_POINTER, refuse_lfs_pointer

STORED, DEFLATED = 0, 8
_LOCAL = struct.Struct("<4s5H3L2H")
_END = struct.Struct("<4s6xH10x")
_FULL_32, _FULL_16 = 0xFFFFFFFF, 0xFFFF
# Bits of the flags: encrypted in one way or another; sizes and crc follow the data; the name is UTF-8.
_ENCRYPTED, _DESCRIPTOR, _UTF8 = 0x2041, 0x0008, 0x0800


class Member(NamedTuple):
    """A file in an archive.

    Attributes:
      header: where its local header begins.
      stored: its bytes as stored.
      size: its bytes when they are decompressed.
      crc: the crc32 of these, or None where the writer of the archive computed none.
      method: of compression.
      name: as bytes, as both headers have it.
    """

    header: int
    stored: int
    size: int
    crc: int | None
    method: int
    name: bytes


class Archive:
    """An open archive.

    Attributes:
      file: that holds it.
      members: by name, in the order of the directory.
      index_bytes: how many bytes opening read.
    """

    def __init__(self, file: StoredFile):
        self.file = file
        refuse_lfs_pointer(bytes(file.read(0, min(file.size, len(LFS_POINTER)))), file.path)
        self.members: dict[str, Member] = {}
        self.index_bytes: int = 0
        self._list()

    def read(self, name: str, limit: int, bound: str) -> bytes:
        """Reads a small member whole, and compares its checksum."""
        member = self.members[name]
        if member.size > limit:
            raise LimitExceededError(f"{name!r} has {member.size} bytes, over {bound}", path=self.file.path)
        start = self.start_of(name)
        data = bytes(self.file.read(start, member.size))
        self.index_bytes += member.size
        if member.crc is not None and CRC32.extend(0, data) != member.crc:
            raise self.corrupt(f"the member {name!r} does not have its crc32; it is damaged")
        return data

    def start_of(self, name: str) -> int:
        """Returns the first byte of a stored member."""
        member = self.members[name]
        if member.method != STORED:
            raise self.corrupt(f"the member {name!r} is compressed, and can only be read whole")
        return self.local_start(name)

    def extent(self, name: str) -> FileExtent:
        """Returns the bytes from a member's header to the next."""
        start = self.members[name].header
        return FileExtent(self.file, start, self._stops[start])

    def read_heads(self, size: int) -> dict[str, bytes]:
        """Reads the first bytes of each member."""
        names = list(self.members)
        starts = [member.header for member in self.members.values()]
        ranges = [(start, min(start + size, self._stops[start])) for start in starts]
        heads: dict[str, bytes] = {}
        for window, data in read_windows(self.file, windows_of(ranges)):
            self.index_bytes += window.size
            for number in window.members:
                start, stop = ranges[number]
                heads[names[number]] = data[start - window.start : stop - window.start].tobytes()
        return heads

    def near(self, offset: int, size: int, start: int, data: bytes) -> bytes:
        """Returns a file's bytes, from `data` at `start` if inside."""
        if start <= offset and offset + size <= start + len(data):
            return data[offset - start : offset - start + size]
        return self._read(offset, size)

    def local_start(self, name: str, data: bytes = b"") -> int:
        """Returns the first byte of a member, compressed or not."""
        member = self.members[name]
        head = self.near(member.header, _LOCAL.size + len(member.name), member.header, data)
        magic, _, flags, method, _, _, crc, stored, size, name_bytes, extra_bytes = _LOCAL.unpack_from(head)
        if magic != b"PK\x03\x04" or name_bytes != len(member.name) or head[_LOCAL.size :] != member.name:
            raise self.corrupt(f"the local header of {name!r} has another name than the directory")
        # Sizes may follow the data, or be in a field for large ones.
        has_sizes = not flags & _DESCRIPTOR and _FULL_32 not in (stored, size)
        is_equal = (crc, stored, size) == (member.crc or 0, member.stored, member.size)
        if method != member.method or (has_sizes and not is_equal):
            raise self.corrupt(f"the local header of {name!r} and the directory disagree")
        start = member.header + _LOCAL.size + name_bytes + extra_bytes
        if start + member.stored > self._stops[member.header]:
            raise self.corrupt(f"the member {name!r} overlaps another one, or the directory")
        return start

    def corrupt(self, message: str) -> CorruptCheckpointError:
        """Makes an error of this archive."""
        return CorruptCheckpointError(message, path=self.file.path)

    # -- the directory

    def _read(self, offset: int, size: int) -> bytes:
        if offset + size > self.file.size:
            raise self.corrupt(f"bytes {offset} to {offset + size} of a file of {self.file.size} bytes")
        return bytes(self.file.read(offset, size))

    def _list(self) -> None:
        """Reads the central directory."""
        reader = _DirectoryReader(self.file)
        magic, count = _END.unpack(self._read(max(0, self.file.size - _END.size), _END.size))
        if magic != b"PK\x05\x06":
            raise self.corrupt("the file does not end as a ZIP archive does: it was cut, or something follows it")
        try:
            with zipfile.ZipFile(reader) as archive:
                entries, directory = archive.infolist(), archive.start_dir
        except CheckpointError:
            raise
        except Exception as error:  # `zipfile` has several types for what may be wrong
            raise self.corrupt(f"it is no ZIP archive, or it was cut: {error}") from None
        # `zipfile` goes by the directory's size: damaged lengths in it would hide members.
        if count not in (_FULL_16, len(entries)):
            raise self.corrupt(f"its directory has {len(entries)} members, and its end says {count}")
        self.index_bytes = reader.bytes_read
        self.file.limits.require_entries(len(entries), self.file.path)
        has_sums = any(entry.CRC for entry in entries)  # PyTorch can be told to compute none
        for entry in entries:
            name = entry.orig_filename
            split_name(name, path=self.file.path)
            if name in self.members:
                raise self.corrupt(f"the member {name!r} is twice in its directory")
            if entry.flag_bits & _ENCRYPTED:
                raise self.corrupt(f"the member {name!r} is encrypted")
            if entry.compress_type == STORED and entry.compress_size != entry.file_size:
                message = f"is stored in {entry.compress_size} bytes and has {entry.file_size}"
                raise self.corrupt(f"the member {name!r} {message}")
            self.members[name] = Member(
                header=entry.header_offset,
                stored=entry.compress_size,
                size=entry.file_size,
                crc=entry.CRC if has_sums else None,
                method=entry.compress_type,
                name=name.encode("utf-8" if entry.flag_bits & _UTF8 else "cp437"),
            )
        members = sorted(self.members.values())
        self._stops = dict(itertools.pairwise([*(member.header for member in members), directory]))
        for member in members:
            if member.header + _LOCAL.size + len(member.name) + member.stored > self._stops[member.header]:
                raise self.corrupt(f"the member {member.name!r} overlaps another one, or the directory")


class _DirectoryReader(io.RawIOBase):
    """Reader of an archive's end for `zipfile`.

    Attributes:
      bytes_read: how many bytes were read.
    """

    def __init__(self, file: StoredFile):
        super().__init__()
        self._file = file
        self._at = 0
        self.bytes_read: int = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size}[whence]
        if start + offset < 0:
            raise OSError("before the first byte")  # as files do, which `zipfile` relies on
        self._at = start + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._file.size - self._at)
        size = left if size < 0 else min(size, left)
        if size > self._file.limits.index_bytes:
            most = self._file.limits.index_bytes
            message = f"a directory of {size} bytes, more than Limits.index_bytes = {most}"
            raise LimitExceededError(message, path=self._file.path)
        data = bytes(self._file.read(self._at, size))
        self._at += size
        self.bytes_read += size
        return data
