"""The members of a ZIP archive: named byte ranges of a file.

Each has a crc32. The archive is as PyTorch and NumPy write it. Opening reads the central directory alone. It must be
all that lies between the last member and the end of the file, and no two members may share a byte, so that a file has
one reading. The local header of a member is compared with the directory when the member is first read.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import NamedTuple

from orbax_t5x.errors import CorruptCheckpointError, LimitExceededError
from orbax_t5x.files.crc import CRC32
from orbax_t5x.files.interface import StoredFile
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.paths import split_name
from orbax_t5x.files.windows import read_windows, windows_of
from orbax_t5x.lazy.leaf import FileExtent
from orbax_t5x.readers.hub_files import LFS_POINTER, refuse_lfs_pointer

STORED, DEFLATED = 0, 8
_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64 = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s4x2H4x3L4H6xL")  # without versions, times and attributes
_LOCAL = struct.Struct("<4s5H3L2H")
_EXTRA = struct.Struct("<2H")
_EXTRA_64 = 1
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
      flags: of the directory.
    """

    header: int
    stored: int
    size: int
    crc: int | None
    method: int
    name: bytes
    flags: int


class Archive:
    """An open archive.

    Attributes:
      file: that holds it.
      members: by name, in the order of the directory.
      index_bytes: how many bytes opening read.
    """

    def __init__(self, file: StoredFile, limits: Limits):
        self.file = file
        refuse_lfs_pointer(bytes(file.read(0, min(file.size, len(LFS_POINTER)))), file.path)
        self.members: dict[str, Member] = {}
        start, end, count = self._directory(limits)
        self.index_bytes: int = end - start + _END.size
        self._parse(bytes(file.read(start, end - start)), count, start, limits)

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
        start = member.header + _LOCAL.size + name_bytes + extra_bytes
        if magic != b"PK\x03\x04" or name_bytes != len(member.name) or head[_LOCAL.size :] != member.name:
            raise self.corrupt(f"the local header of {name!r} has another name than the directory")
        if _FULL_32 in (stored, size):
            extra = self.near(start - extra_bytes, extra_bytes, member.header, data)
            size, stored = self._widened((size, stored), extra, name)
        own = (crc, stored, size)
        theirs = (member.crc or 0, member.stored, member.size)
        absent = bool(flags & _DESCRIPTOR)
        agree = all(a == b or (absent and a in (0, _FULL_32)) for a, b in zip(own, theirs, strict=True))
        if method != member.method or flags != member.flags or not agree:
            raise self.corrupt(f"the local header of {name!r} and the directory disagree")
        if start + member.stored > self._directory_start:
            raise self.corrupt(f"the member {name!r} ends behind the last one")
        return start

    def corrupt(self, message: str) -> CorruptCheckpointError:
        """Makes an error of this archive."""
        return CorruptCheckpointError(message, path=self.file.path)

    # -- the directory

    def _read(self, offset: int, size: int) -> bytes:
        if offset + size > self.file.size:
            raise self.corrupt(f"bytes {offset} to {offset + size} of a file of {self.file.size} bytes")
        return bytes(self.file.read(offset, size))

    def _directory(self, limits: Limits) -> tuple[int, int, int]:
        """Finds the central directory: begin, end and number of entries."""
        at = self.file.size - _END.size
        if at < 0:
            raise self.corrupt(f"{self.file.size} bytes are too few for a ZIP archive")
        magic, *disks, here, count, size, start, comment = _END.unpack(self._read(at, _END.size))
        if magic != b"PK\x05\x06" or comment:
            raise self.corrupt("the file does not end as a ZIP archive does: it was cut, or something follows it")
        plain = (here, count, size, start)
        if at >= _LOCATOR_64.size + _END_64.size:
            magic, disk, where, _ = _LOCATOR_64.unpack(self._read(at - _LOCATOR_64.size, _LOCATOR_64.size))
            if magic == b"PK\x06\x07":
                at -= _LOCATOR_64.size + _END_64.size
                magic, length, *_, first, second, here, count, size, start = _END_64.unpack(
                    self._read(at, _END_64.size)
                )
                disks += [disk, first, second]
                if magic != b"PK\x06\x06" or where != at or length != _END_64.size - 12:
                    raise self.corrupt("the ZIP64 record at its end is damaged")
        wide = (here, count, size, start)
        full = (_FULL_16, _FULL_16, _FULL_32, _FULL_32)
        if any(a not in (b, c) for a, b, c in zip(plain, wide, full, strict=True)) or any(disks) or here != count:
            raise self.corrupt("the records at its end contradict each other")
        if start + size != at:
            raise self.corrupt(f"its directory is at [{start}, {start + size}), and must end at {at}")
        if size > limits.index_bytes or count > limits.entries:
            raise LimitExceededError(
                f"a directory of {count} members in {size} bytes, over Limits.entries or Limits.index_bytes",
                path=self.file.path,
            )
        self._directory_start = start
        return start, at, count

    def _parse(self, data: bytes, count: int, start: int, limits: Limits) -> None:
        at = 0
        for _ in range(count):
            if at + _ENTRY.size > len(data):
                raise self.corrupt(f"its directory ends before the last of {count} entries")
            magic, flags, method, crc, stored, size, *lengths, disk, header = _ENTRY.unpack_from(data, at)
            name_bytes, extra_bytes, comment = lengths
            at += _ENTRY.size
            end = at + name_bytes + extra_bytes + comment
            if magic != b"PK\x01\x02" or end > len(data) or disk:
                raise self.corrupt(f"the entry {len(self.members)} of its directory is damaged")
            limits.require_name_length(name_bytes, self.file.path)
            name_field = data[at : at + name_bytes]
            name = self._name(name_field, flags)
            if _FULL_32 in (size, stored, header):
                extra = data[at + name_bytes : at + name_bytes + extra_bytes]
                size, stored, header = self._widened((size, stored, header), extra, name)
            at = end
            if name in self.members:
                raise self.corrupt(f"the member {name!r} is twice in its directory")
            if flags & _ENCRYPTED:
                raise self.corrupt(f"the member {name!r} is encrypted")
            if method == STORED and stored != size:
                raise self.corrupt(f"the member {name!r} is stored in {stored} bytes and has {size}")
            self.members[name] = Member(header, stored, size, crc, method, name_field, flags)
        if at != len(data):
            raise self.corrupt(f"{len(data) - at} bytes follow the {count} entries of its directory")
        self._check_extents(start)
        if not any(member.crc for member in self.members.values()):  # PyTorch can be told to compute none
            self.members = {name: member._replace(crc=None) for name, member in self.members.items()}

    def _check_extents(self, stop: int) -> None:
        """Proves that the members fill the file without overlap."""
        reached = 0
        members = sorted(self.members.values())
        self._stops = dict(itertools.pairwise([*(member.header for member in members), stop]))
        for number, member in enumerate(members):
            if member.header < reached or (not number and member.header):
                raise self.corrupt(f"the member {member.name!r} overlaps another one, or something precedes it")
            reached = member.header + _LOCAL.size + len(member.name) + member.stored
        if reached > stop:
            raise self.corrupt(f"its members end at {reached}, in the directory at {stop}")

    def _name(self, data: bytes, flags: int) -> str:
        try:
            name = data.decode("utf-8" if flags & _UTF8 else "cp437")
        except UnicodeDecodeError:
            raise self.corrupt(f"the name {data[:80]!r} is not UTF-8") from None
        split_name(name, path=self.file.path)
        return name

    def _widened(self, values: Sequence[int], extra: bytes, name: str) -> list[int]:
        """Returns a header's numbers, full numbers from the ZIP64 field."""
        at, fields = 0, []
        while at + _EXTRA.size <= len(extra):
            kind, size = _EXTRA.unpack_from(extra, at)
            at += _EXTRA.size + size
            if kind == _EXTRA_64:
                fields.append(extra[at - size : at])
        full = [value == _FULL_32 for value in values]
        if len(fields) != 1 or at > len(extra) or len(fields[0]) < 8 * sum(full):
            raise self.corrupt(f"the member {name!r} has no sound ZIP64 sizes")
        numbers = iter(struct.unpack_from(f"<{sum(full)}Q", fields[0]))
        return [next(numbers) if is_full else value for is_full, value in zip(full, values, strict=True)]
