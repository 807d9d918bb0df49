"""ZIP archives field by field, right or wrong."""

from __future__ import annotations

import dataclasses
import struct
import zlib


@dataclasses.dataclass
class Entry:
    """A member; what is None is what a right archive has."""

    name: bytes
    data: bytes
    flags: int = 0
    method: int = 0
    size: int | None = None
    stored: int | None = None
    crc: int | None = None
    header: int | None = None
    local_name: bytes | None = None
    local_method: int | None = None
    local_crc: int | None = None
    extra: bytes = b""
    local_extra: bytes = b""


def sizes_64(*numbers: int) -> bytes:
    """A ZIP64 field."""
    return struct.pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers)


def archive_of(
    entries: list[Entry], *, zip64: dict | None = None, before: bytes = b"", after: bytes = b"", **end
) -> bytes:
    """The bytes of an archive; `end` and `zip64` are fields of the records at its end."""

    def right(value, other):
        return other if value is None else value

    made, directory = before, b""
    for entry in entries:
        crc = right(entry.crc, zlib.crc32(entry.data))
        stored, size = right(entry.stored, len(entry.data)), right(entry.size, len(entry.data))
        header = right(entry.header, len(made) - len(before))
        local_name = right(entry.local_name, entry.name)
        common = (0, 0, crc, stored, size)
        made += struct.pack(
            *("<4s5H3L2H", b"PK\3\4", 20, entry.flags, right(entry.local_method, entry.method), 0, 0),
            *(right(entry.local_crc, crc), stored, size, len(local_name), len(entry.local_extra)),
        )
        made += local_name + entry.local_extra + entry.data
        directory += struct.pack(
            *("<4s6H3L5H2L", b"PK\1\2", 20, 20, entry.flags, entry.method, *common),
            *(len(entry.name), len(entry.extra), 0, 0, 0, 0, header),
        )
        directory += entry.name + entry.extra
    start = len(made) - len(before)
    fields = {
        "disk": 0,
        "first": 0,
        "here": len(entries),
        "count": len(entries),
        "size": len(directory),
        "start": start,
    }
    made += directory
    if zip64 is not None:
        where = len(made) - len(before)
        wide = {"length": 44, "where": where, **fields, **zip64}
        numbers = [wide[key] for key in ("here", "count", "size", "start")]
        made += struct.pack("<4sQ2H2L4Q", b"PK\6\6", wide["length"], 45, 45, wide["disk"], wide["first"], *numbers)
        made += struct.pack("<4sLQL", b"PK\6\7", 0, wide["where"], 1)
    fields |= end
    return made + struct.pack("<4s4H2LH", b"PK\5\6", *fields.values(), 0) + after
