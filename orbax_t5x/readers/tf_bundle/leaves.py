"""Makes leaves of the entries of a bundle's index.

Every number in an entry is proven against the files first. An entry that cannot be right makes its own leaf unreadable
and no other: the leaf is listed, with its shape and dtype where these are known, and using it raises what is wrong.
Shards are measured (`fstat`), never read. Nothing is sized by an entry's numbers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from orbax_t5x import on_demand
from orbax_t5x.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LimitExceededError,
    UnsupportedCheckpointError,
    error_at,
)
from orbax_t5x.files.interface import Files, StoredFile
from orbax_t5x.lazy.box import Box, box_shape, box_size, box_text
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.readers.leaves import BrokenLeaf
from orbax_t5x.readers.ranges.byte_range import ByteRange, StoredRange
from orbax_t5x.readers.ranges.leaf import ByteRangeLeaf
from orbax_t5x.readers.tf_bundle.proto import (
    BadMessage,
    BundleEntry,
    BundleHeader,
    Extent,
    parse_entry,
    slice_key,
    variable_of_slice,
)
from orbax_t5x.readers.tf_bundle.sstable import unmask

# TensorFlow's DataType. Those with an `ml_dtypes` name take one byte per element below 8 bits, too.
_DTYPES: dict[int, np.dtype] = {
    number: np.dtype(kind)
    for number, kind in {
        **{1: np.float32, 2: np.float64, 3: np.int32, 4: np.uint8, 5: np.int16, 6: np.int8, 8: np.complex64},
        **{9: np.int64, 10: np.bool_, 14: ml_dtypes.bfloat16, 17: np.uint16, 18: np.complex128, 19: np.float16},
        **{22: np.uint32, 23: np.uint64, 24: ml_dtypes.float8_e5m2, 25: ml_dtypes.float8_e4m3fn},
        **{26: ml_dtypes.float8_e4m3fnuz, 27: ml_dtypes.float8_e4m3b11fnuz, 28: ml_dtypes.float8_e5m2fnuz},
        **{29: ml_dtypes.int4, 30: ml_dtypes.uint4, 31: ml_dtypes.int2, 32: ml_dtypes.uint2},
        33: ml_dtypes.float4_e2m1fn,
    }.items()
}
STRING = 7
_OBJECT = np.dtype(object)
# Quantised types mean nothing without the ranges that are stored elsewhere; the others are no arrays.
_UNSUPPORTED = {
    **{0: "no dtype", 11: "qint8", 12: "quint8", 13: "qint32", 15: "qint16", 16: "quint16"},
    **{20: "a resource handle", 21: "a variant"},
}
_FIRST_REFERENCE_TYPE = 101

# Bundles with partitioned variables, or with strings, only.
_sliced_leaf: Callable[..., Leaf] = on_demand.function("orbax_t5x.readers.ranges.sliced_leaf", "SlicedLeaf")
_stored_slice = on_demand.function("orbax_t5x.readers.ranges.sliced_leaf", "StoredSlice")
_string_range: Callable[..., StoredRange] = on_demand.function(
    "orbax_t5x.readers.tf_bundle.string_range", "StringRange"
)

_BIG_ENDIAN = 1
# Slices of even grids, as TensorFlow's partitioners make them, have as many cells as slices.
_MOST_CELLS = 1 << 24


class BundleLeaves:
    """The leaves of a bundle.

    `shards` are the files that were looked at, or why they cannot be read.
    """

    def __init__(self, files: Files, prefix: str, header: BundleHeader):
        self._files = files
        self._prefix = prefix
        self._index_path = files.join(f"{prefix}.index")
        self._num_shards = header.num_shards
        self._limits = files.limits
        self._swap = (header.endianness == _BIG_ENDIAN) != (sys.byteorder == "big")
        self.shards: dict[int, StoredFile | CheckpointError] = {}
        # Shapes and dtypes of entries, by the entry's dtype and shape; most are those of other entries.
        self._proven: dict[tuple[int, tuple[int, ...] | None], tuple[tuple[int, ...], np.dtype]] = {}

    def _shard_name(self, number: int) -> str:
        return f"{self._prefix}.data-{number:05d}-of-{self._num_shards:05d}"

    def named_sizes(self) -> list[int | None]:
        """Returns the sizes of the shards that entries name."""
        sizes: list[int | None] = [None] * self._num_shards
        for number, shard in self.shards.items():
            sizes[number] = None if isinstance(shard, CheckpointError) else shard.size
        return sizes

    def shard(self, number: int) -> StoredFile | CheckpointError:
        """Returns the file of a shard, measured once."""
        if number not in self.shards:
            name = self._shard_name(number)
            try:
                self.shards[number] = self._files.file(name)
            except CheckpointNotFoundError:
                self.shards[number] = CorruptCheckpointError("the shard is missing", path=self._files.join(name))
            except CheckpointError as error:
                self.shards[number] = error
        return self.shards[number]

    def leaves(self, entries: Mapping[bytes, bytes], slices: Mapping[bytes, bytes]) -> dict[str, Leaf]:
        """Makes the leaves by name; `slices` are encoded entries by key."""
        leaves: dict[str, Leaf] = {}
        unclaimed = set(slices)
        broken: set[bytes] = set()
        for key, value in entries.items():
            name = self._name(key)
            try:
                leaves[name] = self._leaf(name, value, slices, unclaimed)
            except CheckpointError as error:
                leaves[name] = BrokenLeaf(name, error, self._index_path)
            if isinstance(leaves[name], BrokenLeaf):
                broken.add(key)
        # A variable whose entry cannot be read does not show which slices are its own.
        orphans = [key for key in unclaimed if variable_of_slice(key) not in broken]
        if orphans:
            raise CorruptCheckpointError(
                f"an entry under the key {min(orphans)[:80]!r} is no slice of any variable", path=self._index_path
            )
        return leaves

    def _name(self, key: bytes) -> str:
        try:
            name = key.decode("utf-8")
        except UnicodeDecodeError:
            raise CorruptCheckpointError(f"the name {key[:80]!r} is not UTF-8", path=self._index_path) from None
        if "\0" in name:
            raise CorruptCheckpointError(f"the name {name[:80]!r} holds a NUL", path=self._index_path)
        self._limits.require_name(name, self._index_path)
        return name

    # -- single leaves; an error without a file is about the index

    def _parse(self, value: bytes) -> BundleEntry:
        try:
            return parse_entry(value, self._limits.rank)
        except BadMessage as problem:
            raise CorruptCheckpointError(f"its entry cannot be read: {problem}") from None

    def _leaf(self, name: str, value: bytes, slices: Mapping[bytes, bytes], unclaimed: set[bytes]) -> Leaf:
        entry = self._parse(value)
        kind = entry.dtype, entry.shape
        if kind not in self._proven:
            shape, dtype = _shape_of(entry), _OBJECT if entry.dtype == STRING else _DTYPES.get(entry.dtype)
            self._limits.require_shape(shape, dtype or _OBJECT)
            if dtype is None:
                return BrokenLeaf(name, _unsupported_dtype(entry.dtype), self._index_path, shape=shape)
            self._proven[kind] = shape, dtype
        shape, dtype = self._proven[kind]
        try:
            if entry.slices:
                return self._sliced(name, entry, shape, dtype, slices, unclaimed)
            return ByteRangeLeaf(name, self._range(entry, shape, dtype), unmask(entry.masked_crc))
        except CheckpointError as error:
            return BrokenLeaf(name, error, self._index_path, shape=shape, dtype=dtype)

    def _range(self, entry: BundleEntry, shape: tuple[int, ...], dtype: np.dtype) -> StoredRange:
        """Returns an entry's bytes, proven against shard and shape."""
        count = math.prod(shape)
        if entry.dtype == STRING:
            # Each string takes a byte of length at least, and four bytes of checksum follow the lengths, even of none.
            if entry.size > self._limits.index_bytes:
                raise LimitExceededError(
                    f"strings of {entry.size} bytes are read whole, the limit is {self._limits.index_bytes}"
                    " (Limits.index_bytes)"
                )
            if entry.size < count + 4:
                raise CorruptCheckpointError(f"{entry.size} bytes for {count} strings")
            self._limits.require_entries(count, self._index_path)
        elif entry.size != count * dtype.itemsize:
            needed = count * dtype.itemsize
            raise CorruptCheckpointError(f"{entry.size} bytes, but {dtype} of shape {shape} takes {needed}")
        if not 0 <= entry.shard < self._num_shards:
            raise CorruptCheckpointError(f"in shard {entry.shard} of {self._num_shards}")
        if entry.offset < 0:
            raise CorruptCheckpointError(f"at byte {entry.offset} of its shard")
        file = self.shard(entry.shard)
        if isinstance(file, CheckpointError):
            raise error_at(file, path=file.path, leaf=None)
        if entry.offset + entry.size > file.size:
            raise CorruptCheckpointError(
                f"bytes {entry.offset} to {entry.offset + entry.size} of a shard of {file.size}: cut, or of"
                " another checkpoint",
                path=file.path,
            )
        if entry.dtype != STRING:
            return ByteRange(file, entry.offset, shape, dtype, self._swap and dtype.itemsize > 1)
        if self._swap:
            raise UnsupportedCheckpointError("strings of the other byte order are not read (nor does TensorFlow)")
        return _string_range(file, entry.offset, shape, dtype, entry.size)

    def _sliced(
        self,
        name: str,
        entry: BundleEntry,
        shape: tuple[int, ...],
        dtype: np.dtype,
        slices: Mapping[bytes, bytes],
        unclaimed: set[bytes],
    ) -> Leaf:
        keys = [slice_key(name.encode(), extents) for extents in entry.slices]
        unclaimed.difference_update(keys)
        boxes = [_box_of(extents, shape) for extents in entry.slices]
        _require_tiling(shape, boxes)
        stored_slices: list[Any] = []
        for key, box in zip(keys, boxes, strict=True):
            if key not in slices:
                raise CorruptCheckpointError(f"the slice {box_text(box)} has no entry")
            own = self._parse(slices[key])
            if own.dtype != entry.dtype or own.slices:
                message = f"the slice {box_text(box)} has dtype {own.dtype}, the variable {entry.dtype}"
                raise CorruptCheckpointError(message)
            own_shape = _shape_of(own)
            if own_shape != box_shape(box):
                raise CorruptCheckpointError(f"the slice {box_text(box)} has the shape {own_shape}")
            stored = self._range(own, own_shape, dtype)
            stored_slices.append(_stored_slice(box, stored, unmask(own.masked_crc)))
        return _sliced_leaf(name, self._files, self._index_path, shape, dtype, stored_slices)


def _shape_of(entry: BundleEntry) -> tuple[int, ...]:
    if entry.shape is None:
        raise CorruptCheckpointError("its entry has an unknown rank")
    if any(size < 0 for size in entry.shape):
        raise CorruptCheckpointError(f"a negative dimension in the shape {entry.shape}")
    return entry.shape


def _unsupported_dtype(number: int) -> UnsupportedCheckpointError:
    fallback = "unknown" if number < _FIRST_REFERENCE_TYPE else "a reference type"
    kind = _UNSUPPORTED.get(number, fallback)
    return UnsupportedCheckpointError(f"TensorFlow's dtype {number} ({kind}) is not read")


def _box_of(extents: tuple[Extent, ...], shape: tuple[int, ...]) -> Box:
    if len(extents) != len(shape):
        raise CorruptCheckpointError(f"a slice of {len(extents)} dimensions of the shape {shape}")
    box: list[tuple[int, int]] = []
    for (start, length), size in zip(extents, shape, strict=True):
        stop = size if length == -1 else start + length
        if start < 0 or length < -1 or stop > size or (length == -1 and start):
            raise CorruptCheckpointError(f"a slice of {length} from {start} in a dimension of {size}")
        box.append((start, stop))
    return tuple(box)


def _require_tiling(shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Proves that each element of an array is in exactly one of some boxes inside it."""
    if (elements := sum(map(box_size, boxes))) != math.prod(shape):
        raise CorruptCheckpointError(f"its slices have {elements} elements, and the shape {shape} {math.prod(shape)}")
    edges = [sorted({0, size, *(edge for box in boxes for edge in box[axis])}) for axis, size in enumerate(shape)]
    cells = tuple([len(marks) - 1 for marks in edges])
    if math.prod(cells) > _MOST_CELLS:
        raise CorruptCheckpointError(f"its {len(boxes)} slices make a grid of {math.prod(cells)} cells")
    numbers = [{edge: number for number, edge in enumerate(marks)} for marks in edges]
    is_held = np.zeros(cells, np.bool_)
    for box in boxes:
        held = is_held[tuple([slice(marks[low], marks[high]) for (low, high), marks in zip(box, numbers, strict=True)])]
        if held.any():
            raise CorruptCheckpointError(f"the slice {box_text(box)} overlaps another one")
        held[...] = True
