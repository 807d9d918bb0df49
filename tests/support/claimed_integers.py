"""Small files with each integer of their headers set to a limit, in turn; checksums and lengths stay right."""

from __future__ import annotations

import io
import json
import re
import struct
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any

import google_crc32c
import msgpack

from tests.fuzz.mutations import entries_of
from tests.support.bundle_writer import table, varint
from tests.support.zip_files import Entry, archive_of

# The limits of a reader's own (shards, leaves), and those of the integers that hold a claim.
CLAIMS = (65_536, 100_000, 2_000_000, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1)
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5


def in_tree(tree: Any) -> Iterator[Any]:
    """Trees of dicts, lists and msgpack's extensions with one of their integers replaced."""
    if type(tree) is int:
        yield from CLAIMS
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from ({**tree, key: changed} for changed in in_tree(value))
    elif isinstance(tree, list):
        for at, value in enumerate(tree):
            yield from ([*tree[:at], changed, *tree[at + 1 :]] for changed in in_tree(value))
    elif isinstance(tree, msgpack.ExtType):
        yield from (msgpack.ExtType(tree.code, changed) for changed in in_msgpack(tree.data))


def in_msgpack(data: bytes) -> Iterator[bytes]:
    for tree in in_tree(msgpack.unpackb(data, strict_map_key=False)):
        yield msgpack.packb(tree)


def in_json(data: bytes) -> Iterator[bytes]:
    for tree in in_tree(json.loads(data)):
        yield json.dumps(tree).encode()


def in_safetensors(data: bytes) -> Iterator[bytes]:
    size = int.from_bytes(data[:8], "little")
    for claim in CLAIMS:
        yield struct.pack("<Q", claim) + data[8:]
    for header in in_json(data[8 : 8 + size]):
        yield struct.pack("<Q", len(header)) + header + data[8 + size :]


def _fields(data: bytes) -> list[tuple[int, int, bytes]] | None:
    """The fields of a protocol buffer message as (number, kind, value); None for bytes that are no message."""
    fields, at = [], 0

    def take() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return value

    try:
        while at < len(data):
            number, kind = divmod(take(), 8)
            if kind == _VARINT:
                value = varint(take())
            elif kind in (_FIXED_32, _FIXED_64, _BYTES):
                size = take() if kind == _BYTES else 4 if kind == _FIXED_32 else 8
                value, at = data[at : at + size], at + size
            else:
                return None
            if at > len(data) or not number:
                return None
            fields.append((number, kind, value))
    except IndexError:
        return None
    return fields


def _message(fields: Iterable[tuple[int, int, bytes]]) -> bytes:
    return b"".join(
        varint(number << 3 | kind) + (varint(len(value)) if kind == _BYTES else b"") + value
        for number, kind, value in fields
    )


def in_message(data: bytes) -> Iterator[bytes]:
    fields = _fields(data) or []
    for at, (number, kind, value) in enumerate(fields):
        if kind == _VARINT:
            changes: Iterable[bytes] = map(varint, CLAIMS)
        elif kind == _BYTES:
            changes = in_message(value)
        else:
            changes = [b"\xff" * len(value)]
        for changed in changes:
            yield _message([*fields[:at], (number, kind, changed), *fields[at + 1 :]])


def in_table(data: bytes) -> Iterator[bytes]:
    entries = entries_of(data) or []
    for at, (key, value) in enumerate(entries):
        for changed in in_message(value):
            yield table([*entries[:at], (key, changed), *entries[at + 1 :]])


def in_fields(data: bytes) -> Iterator[bytes]:
    """Replaces four and eight bytes at each place: the integers of a header without alignment are among them.

    Of places with the same bytes around them, as in a list of equal texts, the first.
    """
    places = {data[max(0, at - 24) : at + 32]: at for at in reversed(range(len(data) - 8))}
    for at in sorted(places.values()):
        for form, claims in (("<I", CLAIMS[:5]), ("<Q", CLAIMS[5:])):
            for claim in claims:
                edited = bytearray(data)
                struct.pack_into(form, edited, at, claim)
                yield bytes(edited)


def in_npz(data: bytes) -> Iterator[bytes]:
    """Sizes and places of members, and the shapes in the headers of arrays."""

    def members() -> list[Entry]:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return [Entry(info.orig_filename.encode(), archive.read(info)) for info in archive.infolist()]

    for at in range(len(members())):
        for field in ("size", "stored", "header"):
            for claim in CLAIMS[:5]:
                changed = members()
                setattr(changed[at], field, claim)
                yield archive_of(changed)
        text = members()[at].data
        for number in re.finditer(rb"(?<=[(, ])\d+(?=[,)])", text[:200]):
            for claim in CLAIMS:
                changed = members()
                size = int.from_bytes(text[8:10], "little")
                header = text[10 : number.start()] + b"%d" % claim + text[number.end() : 10 + size]
                changed[at].data = text[:8] + struct.pack("<H", len(header)) + header + text[10 + size :]
                yield archive_of(changed)


def in_manifest(data: bytes) -> Iterator[bytes]:
    """Puts a number in the place of each byte between a manifest's length and its checksum."""
    body = data[12:-4]
    for at in range(len(body)):
        for claim in CLAIMS:
            changed = body[:at] + varint(claim) + body[at + 1 :]
            whole = data[:4] + struct.pack("<Q", len(changed) + 16) + changed
            yield whole + struct.pack("<I", google_crc32c.value(whole))


CLAIMS_IN = {
    "tf_bundle": in_table,
    "safetensors": in_safetensors,
    "flax_msgpack": in_msgpack,
    "t5x": in_msgpack,
    "zarray": in_json,
    "orbax_metadata": in_json,
    "npz": in_npz,
    "gguf": in_fields,
    "ocdbt": in_manifest,
}
"""By the names of `tests.fuzz.targets`."""
