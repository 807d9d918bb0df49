"""Writes TensorFlow bundles by hand, sound ones and hostile ones whose checksums hold all the same.

Each layer is a function from values to bytes, so that a test changes one thing (a field, a handle, a length) and seals
what is around it: damage that a checksum would catch first proves nothing about what lies behind. TensorFlow itself
reads what is written soundly here (`test_tensorflow_oracle.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import cramjam
import google_crc32c
import ml_dtypes
import numpy as np

from orbax_t5x.readers.tf_bundle.proto import Extent, slice_key

MAGIC = bytes.fromhex("57fb808b247547db")
STRING = 7
DTYPES = {
    "float32": 1,
    "float64": 2,
    "int32": 3,
    "uint8": 4,
    "int16": 5,
    "int8": 6,
    "complex64": 8,
    "int64": 9,
    "bool": 10,
    "bfloat16": 14,
    "uint16": 17,
    "complex128": 18,
    "float16": 19,
    "uint32": 22,
    "uint64": 23,
    "float8_e5m2": 24,
    "float8_e4m3fn": 25,
    "float8_e4m3fnuz": 26,
    "float8_e4m3b11fnuz": 27,
    "float8_e5m2fnuz": 28,
    "int4": 29,
    "uint4": 30,
    "int2": 31,
    "uint2": 32,
    "float4_e2m1fn": 33,
}


def np_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


# -- wire format


def varint(value: int) -> bytes:
    """Negative numbers as protobuf does: 64 bits, ten bytes."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def integer(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value) if value else b""


def message(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def masked(crc: int) -> int:
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def header(num_shards: int = 1, endianness: int = 0, producer: int = 1, min_consumer: int = 0) -> bytes:
    version = integer(1, producer) + integer(2, min_consumer)
    return integer(1, num_shards) + integer(2, endianness) + message(3, version)


def shape_proto(shape: Iterable[int]) -> bytes:
    return b"".join(message(2, integer(1, size)) for size in shape)


def slice_proto(extents: Iterable[Extent]) -> bytes:
    """A length of -1 (the whole dimension) is told by its absence, one of 0 is written."""
    encoded = []
    for start, length in extents:
        told = b"" if length == -1 else varint(2 << 3) + varint(length)
        encoded.append(message(1, integer(1, start) + told))
    return b"".join(encoded)


def entry(
    dtype: int | str,
    shape: Iterable[int],
    *,
    shard: int = 0,
    offset: int = 0,
    size: int = 0,
    crc: int = 0,
    slices: Sequence[Iterable[Extent]] = (),
) -> bytes:
    """BundleEntryProto; `crc` is not masked yet."""
    number = DTYPES.get(dtype, STRING) if isinstance(dtype, str) else dtype
    checksum = struct.pack("<BI", 6 << 3 | 5, masked(crc)) if not slices else b""
    return (
        integer(1, number)
        + message(2, shape_proto(shape))
        + integer(3, shard)
        + integer(4, offset)
        + integer(5, size)
        + checksum
        + b"".join(message(7, slice_proto(one)) for one in slices)
    )


# -- SSTable


def block_entries(entries: Sequence[tuple[bytes, bytes]], restart_interval: int = 16) -> tuple[bytes, list[int]]:
    """Prefix-compressed entries and their restart points."""
    out = bytearray()
    restarts = [0]
    last = b""
    for number, (key, value) in enumerate(entries):
        shared = 0
        if number % restart_interval:
            while shared < min(len(key), len(last)) and key[shared] == last[shared]:
                shared += 1
        elif number:
            restarts.append(len(out))
        out += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        last = key
    return bytes(out), restarts


def block(entries: Sequence[tuple[bytes, bytes]], restart_interval: int = 16) -> bytes:
    data, restarts = block_entries(entries, restart_interval)
    return data + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))


def sealed(data: bytes, kind: int = 0, *, compress: bool = True) -> bytes:
    """A block as it stands in the file: compressed (1: snappy), its type, the checksum over both."""
    if kind == 1 and compress:
        data = bytes(cramjam.snappy.compress_raw(data))
    data += bytes([kind])
    return data + struct.pack("<I", masked(google_crc32c.value(data)))


def handle(offset: int, size: int) -> bytes:
    return varint(offset) + varint(size)


def footer(meta: bytes, index: bytes) -> bytes:
    return (meta + index).ljust(40, b"\0") + MAGIC


Handles = list[tuple[bytes, int, int]]


def table_of_blocks(
    blocks: Sequence[tuple[bytes, bytes]], *, edit: Callable[[Handles], Handles] | None = None, index_kind: int = 0
) -> bytes:
    """A table of (last key, sealed block); `edit` may change what the index block says about them."""
    out = bytearray()
    handles: Handles = []
    for key, data in blocks:
        handles.append((key, len(out), len(data) - 5))
        out += data
    meta_at, meta = len(out), sealed(block([]))
    out += meta
    index_at = len(out)
    if edit is not None:
        handles = edit(handles)
    index = sealed(block([(key, handle(offset, size)) for key, offset, size in handles], 1), index_kind)
    out += index
    return bytes(out) + footer(handle(meta_at, len(meta) - 5), handle(index_at, len(index) - 5))


def table(
    entries: Sequence[tuple[bytes, bytes]], *, block_bytes: int = 4096, restart_interval: int = 16, snappy: bool = False
) -> bytes:
    """A table of entries in the order given, cut into blocks of about `block_bytes`."""
    blocks: list[tuple[bytes, bytes]] = []
    group: list[tuple[bytes, bytes]] = []
    size = 0
    for number, (key, value) in enumerate(entries):
        group.append((key, value))
        size += len(key) + len(value)
        if size >= block_bytes or number == len(entries) - 1:
            blocks.append((key, sealed(block(group, restart_interval), int(snappy))))
            group, size = [], 0
    return table_of_blocks(blocks, index_kind=int(snappy))


# -- bundles


def string_bytes(values: Iterable[bytes]) -> tuple[bytes, int]:
    """A string tensor as stored, and its checksum."""
    values = list(values)
    lengths = b"".join(struct.pack("<I", len(value)) for value in values)
    stored = struct.pack("<I", masked(google_crc32c.value(lengths)))
    text = b"".join(values)
    return b"".join(varint(len(value)) for value in values) + stored + text, google_crc32c.value(
        lengths + stored + text
    )


def array_bytes(array: np.ndarray, *, big_endian: bool = False) -> tuple[bytes, int]:
    """An array as stored, and its checksum."""
    if array.dtype == object:
        return string_bytes(array.reshape(-1).tolist())
    data = array.tobytes()
    width = array.dtype.itemsize // (2 if array.dtype.kind == "c" else 1)
    if big_endian and width > 1:
        data = np.frombuffer(data, f"u{width}").byteswap().tobytes()
    return data, google_crc32c.value(data)


class Bundle:
    """Shards and entries, put together in order; `write` makes the files.

    Attributes:
      shards: the bytes of each.
      entries: encoded entries by key; tests replace them at will.
    """

    def __init__(self, num_shards: int = 1, *, big_endian: bool = False):
        self.shards = [bytearray() for _ in range(num_shards)]
        self.entries: dict[bytes, bytes] = {}
        self.header = header(num_shards, int(big_endian))
        self._big_endian = big_endian

    def store(self, array: np.ndarray, shard: int | None = None) -> dict[str, int]:
        """Appends an array to a shard (the smallest); where it is."""
        if shard is None:
            shard = min(range(len(self.shards)), key=lambda number: len(self.shards[number]))
        data, crc = array_bytes(array, big_endian=self._big_endian)
        place = {"shard": shard, "offset": len(self.shards[shard]), "size": len(data), "crc": crc}
        self.shards[shard] += data
        return place

    def add(self, name: str, array: np.ndarray, shard: int | None = None) -> None:
        self.entries[name.encode()] = entry(array.dtype.name, array.shape, **self.store(array, shard))

    def add_sliced(self, name: str, array: np.ndarray, slices: Sequence[Sequence[Extent]]) -> None:
        """A partitioned variable: an entry without data, and one for each slice."""
        for extents in slices:
            index = tuple(slice(start, None if length == -1 else start + length) for start, length in extents)
            part = np.ascontiguousarray(array[index]).reshape(array[index].shape)
            key = slice_key(name.encode(), tuple(extents))
            self.entries[key] = entry(array.dtype.name, part.shape, **self.store(part))
        self.entries[name.encode()] = entry(array.dtype.name, array.shape, slices=slices)

    def index(self, **options) -> bytes:
        """The table of header and entries; options as `table`."""
        return table([(b"", self.header), *sorted(self.entries.items())], **options)

    def write(self, directory: Path, name: str = "model.ckpt-1", index: bytes | None = None, **options) -> Path:
        """The files; returns the prefix."""
        prefix = directory / name
        for number, data in enumerate(self.shards):
            shard_path(prefix, number, len(self.shards)).write_bytes(bytes(data))
        Path(f"{prefix}.index").write_bytes(self.index(**options) if index is None else index)
        return prefix


def shard_path(prefix: Path, number: int = 0, count: int = 1) -> Path:
    return Path(f"{prefix}.data-{number:05d}-of-{count:05d}")


def bundle_of(arrays: Mapping[str, np.ndarray], num_shards: int = 1, *, big_endian: bool = False) -> Bundle:
    bundle = Bundle(num_shards, big_endian=big_endian)
    for name, array in arrays.items():
        bundle.add(name, array)
    return bundle


def partitions(rows: int, columns: int) -> list[list[Extent]]:
    """Uneven slices of a (7, 6) variable; a dimension that is not cut has length -1, as TensorFlow says it."""
    row_cuts = [Extent(0, -1)] if rows == 1 else [Extent(0, 3), Extent(3, 2), Extent(5, 2)]
    column_cuts = [Extent(0, -1)] if columns == 1 else [Extent(0, 2), Extent(2, 4)]
    return [[row, column] for row in row_cuts for column in column_cuts]
