"""The two messages of a bundle's index, parsed strictly.

A general protobuf parser accepts what no writer makes: duplicate fields (the last wins), lengths that hide others,
nesting without end. Here each known field occurs at most once, with its own wire type and in its own range; fields that
are not known are skipped, as protobuf promises to newer writers; nothing is nested deeper than the messages are. What
is wrong is a `BadMessage`; the caller knows the file and the leaf.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from orbax_t5x.readers.tf_bundle.sstable import BadVarint, read_varint

# OrderedCode: what ends a string, and what orders last, must not occur in it.
_ESCAPED = {0x00: b"\x00\xff", 0xFF: b"\xff\x00"}

_VARINT, _BYTES, _FIXED32 = 0, 2, 5
_FIXED_BYTES = {1: 8, _FIXED32: 4}
_MAX_FIELD_NUMBER = 1 << 29


class BadMessage(ValueError):
    """Error of an invalid message."""


class Extent(NamedTuple):
    """A slice of a dimension; length -1 is the whole dimension."""

    start: int
    length: int


class BundleHeader(NamedTuple):
    """BundleHeaderProto."""

    num_shards: int
    endianness: int
    producer: int
    min_consumer: int


class BundleEntry(NamedTuple):
    """A BundleEntryProto.

    `masked_crc` is as stored (`sstable.unmask`), `shape` is None if the rank is unknown.
    """

    dtype: int
    shape: tuple[int, ...] | None
    shard: int
    offset: int
    size: int
    masked_crc: int
    slices: tuple[tuple[Extent, ...], ...]


def _scan(data: bytes, kind: str, wires: dict[int, int], repeated: int = 0) -> dict[int, Any]:
    """Scans a message's known fields by number.

    Values are integers and bytes, and for the field `repeated` a list of bytes.
    """
    found: dict[int, Any] = {}
    at, end = 0, len(data)
    try:
        while at < end:
            tag = data[at]
            at += 1
            if tag >= 0x80:
                tag, at = read_varint(data, at - 1, end)
            number, wire = tag >> 3, tag & 7
            value: Any
            if wire == _VARINT:
                value = data[at]
                at += 1
                if value >= 0x80:
                    value, at = read_varint(data, at - 1, end)
            else:
                if wire == _BYTES:
                    size = data[at]
                    at += 1
                    if size >= 0x80:
                        size, at = read_varint(data, at - 1, end)
                elif wire in _FIXED_BYTES:
                    size = _FIXED_BYTES[wire]
                else:
                    raise BadMessage(f"field {number} of {kind} has wire type {wire}")
                if size > end - at:
                    raise BadMessage(f"field {number} of {kind} has {size} bytes, {end - at} are left")
                value = data[at : at + size]
                at += size
            wanted = wires.get(number)
            if wanted is None:
                if not 0 < number < _MAX_FIELD_NUMBER:
                    raise BadMessage(f"field number {number} in {kind}")
                continue
            if wire != wanted:
                raise BadMessage(f"field {number} of {kind} has wire type {wire}, not {wanted}")
            if number == repeated:
                found.setdefault(number, []).append(value)
            elif number in found:
                raise BadMessage(f"field {number} of {kind} occurs twice")
            else:
                found[number] = value
    except (BadVarint, IndexError):
        raise BadMessage(f"{kind} is cut, or none") from None
    return found


def _signed_field(fields: dict[int, Any], number: int, kind: str, bits: int = 64) -> int:
    """Returns a signed integer, 0 if absent."""
    value = fields.get(number, 0)
    if value < 1 << 31:
        return value
    value -= (value >> 63) << 64
    if not -(1 << (bits - 1)) <= value < 1 << (bits - 1):
        raise BadMessage(f"field {number} of {kind} is {value}, which takes more than {bits} bits")
    return value


_HEADER = {1: _VARINT, 2: _VARINT, 3: _BYTES}
_VERSION = {1: _VARINT, 2: _VARINT}
_ENTRY = {1: _VARINT, 2: _BYTES, 3: _VARINT, 4: _VARINT, 5: _VARINT, 6: _FIXED32, 7: _BYTES}
_SHAPE = {2: _BYTES, 3: _VARINT}
_DIM = {1: _VARINT, 2: _BYTES}
_SLICE = {1: _BYTES}
_EXTENT = {1: _VARINT, 2: _VARINT}


def parse_bundle_header(data: bytes) -> BundleHeader:
    """Parses a BundleHeaderProto."""
    header = _scan(data, "BundleHeaderProto", _HEADER)
    version = _scan(header.get(3, b""), "VersionDef", _VERSION)
    return BundleHeader(
        num_shards=_signed_field(header, 1, "BundleHeaderProto", 32),
        endianness=_signed_field(header, 2, "BundleHeaderProto", 32),
        producer=_signed_field(version, 1, "VersionDef", 32),
        min_consumer=_signed_field(version, 2, "VersionDef", 32),
    )


# An index has many entries of few shapes.
@functools.lru_cache(maxsize=1 << 10)
def _parse_shape(data: bytes, max_rank: int) -> tuple[int, ...] | None:
    shape = _scan(data, "TensorShapeProto", _SHAPE, repeated=2)
    if shape.get(3):
        return None
    dims = shape.get(2, ())
    if len(dims) > max_rank:
        raise BadMessage(f"a shape of {len(dims)} dimensions, the limit is {max_rank} (Limits.rank)")
    return tuple([_signed_field(_scan(dim, "Dim", _DIM), 1, "Dim") for dim in dims])


def _parse_slice(data: bytes, max_rank: int) -> tuple[Extent, ...]:
    extents = _scan(data, "TensorSliceProto", _SLICE, repeated=1).get(1, ())
    if len(extents) > max_rank:
        raise BadMessage(f"a slice of {len(extents)} dimensions, the limit is {max_rank} (Limits.rank)")
    result: list[Extent] = []
    for extent in extents:
        fields = _scan(extent, "Extent", _EXTENT)
        length = _signed_field(fields, 2, "Extent") if 2 in fields else -1
        result.append(Extent(_signed_field(fields, 1, "Extent"), length))
    return tuple(result)


def parse_entry(data: bytes, max_rank: int) -> BundleEntry:
    """Parses a BundleEntryProto."""
    kind = "BundleEntryProto"
    entry = _scan(data, kind, _ENTRY, repeated=7)
    return BundleEntry(
        dtype=_signed_field(entry, 1, kind, 32),
        shape=_parse_shape(entry.get(2, b""), max_rank),
        shard=_signed_field(entry, 3, kind, 32),
        offset=_signed_field(entry, 4, kind),
        size=_signed_field(entry, 5, kind),
        masked_crc=int.from_bytes(entry.get(6, b""), "little"),
        slices=tuple([_parse_slice(extents, max_rank) for extents in entry.get(7, ())]),
    )


def _ordered_unsigned(value: int) -> bytes:
    digits = value.to_bytes((value.bit_length() + 7) // 8, "big")
    return bytes([len(digits)]) + digits


def _ordered_signed(value: int) -> bytes:
    """Encodes a number in n bytes that sort as the numbers do.

    A sign and 7n - 1 bits; the first n bits, inverted, give n.
    """
    magnitude = ~value if value < 0 else value
    size = 1
    while magnitude >> (7 * size - 1):
        size += 1
    bits = 8 * size
    header = ((1 << size) - 1) << (bits - size)
    return ((value & ((1 << bits) - 1)) ^ header).to_bytes(size, "big")


def slice_key(name: bytes, extents: tuple[Extent, ...]) -> bytes:
    """Returns the key of the entry of a variable's slice."""
    escaped = b"".join(_ESCAPED.get(byte, bytes([byte])) for byte in name)
    parts = [_ordered_unsigned(0), escaped, b"\x00\x01", _ordered_unsigned(len(extents))]
    for extent in extents:
        parts += [_ordered_signed(extent.start), _ordered_signed(extent.length)]
    return b"".join(parts)


def variable_of_slice(key: bytes) -> bytes | None:
    """Returns the variable's name in a slice's key, or None."""
    escaped, end, _ = key[1:].partition(b"\x00\x01")
    if not end:
        return None
    return escaped.replace(b"\xff\x00", b"\xff").replace(b"\x00\xff", b"\x00")
