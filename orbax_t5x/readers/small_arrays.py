"""Small arrays of an OCDBT database, decoded from its values.

They are not opened in TensorStore. A node of the database's tree holds the values of thousands of small arrays. It is
read once, and they are decoded here. Small values beside the tree are read by windows of their data file. Arrays are
alike: one of those with the same metadata is opened by TensorStore, which so decides on the metadata of all.
TensorStore reads what is large, not stored, or encoded in another way than Orbax's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import cramjam
import numpy as np

from orbax_t5x.concurrency import reader_pool, run_in_pool, waiting_pool
from orbax_t5x.errors import CheckpointError, CorruptCheckpointError
from orbax_t5x.files.interface import Files, StoredFile
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.windows import MAX_GAP_BYTES
from orbax_t5x.lazy.box import Box, intersect, slices_within
from orbax_t5x.lazy.leaf import BlockingLeaf, FileExtent, Request
from orbax_t5x.lazy.read_stats import ReadStats
from orbax_t5x.readers.box_sums import BoxSums
from orbax_t5x.readers.chunk_grid import ArrayLayout, chunk_boxes
from orbax_t5x.readers.fetched_array import SHARD_ENTRY_BYTES, FetchedArray, Sharding, most_encoded
from orbax_t5x.readers.ocdbt_values import OcdbtValues, ValueLocation
from orbax_t5x.readers.ranges.scatter import as_stored
from orbax_t5x.readers.tensorstore_leaf import TensorStoreLeaf

# Of all chunks of an array, decoded: larger ones gain nothing here.
_SMALL_BYTES = 1 << 18
_MOST_CHUNKS = 64
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# The bit of a frame's descriptor after which its content's size follows, and those of a dictionary that must be unset.
_ONE_SEGMENT = 0x20


class ArrayKind(NamedTuple):
    """Arrays of the same metadata.

    Attributes:
      layout: of each.
      keys, boxes: of all chunks, below the array's name.
      is_rows: whether the chunks, stacked, are the array.
      is_compressed: whether chunks are zstd frames; else they are elements.
      sharding: shards that hold one chunk each, or None.
      most: bytes that a chunk may have as it is stored.
    """

    layout: ArrayLayout
    keys: tuple[str, ...]
    boxes: tuple[Box, ...]
    is_rows: bool
    is_compressed: bool
    sharding: Sharding | None
    most: int

    @classmethod
    def of(cls, array: FetchedArray) -> ArrayKind | None:
        """Returns the kind of an array, or None."""
        layout = array.layout
        shape, chunk, sharding = layout.shape, layout.chunk, array.sharding
        counts = [-(-size // side) for size, side in zip(shape, chunk, strict=True)]
        count = math.prod(counts)
        codecs = _codecs(array.metadata if sharding is None else {"codecs": sharding.codecs})
        is_small = count <= _MOST_CHUNKS and count * array.chunk_bytes <= _SMALL_BYTES
        if codecs not in ([], ["zstd"]) or not is_small or layout.shard != layout.chunk or not as_stored(layout.dtype):
            return None
        keys = tuple(map(array.keys.key, itertools.product(*map(range, counts))))
        boxes = tuple(chunk_boxes(tuple([(0, size) for size in shape]), chunk))
        is_rows = chunk[1:] == shape[1:] and (not shape or shape[0] % chunk[0] == 0)
        most = most_encoded(array.chunk_bytes + SHARD_ENTRY_BYTES)
        return cls(layout, keys, boxes, is_rows, bool(codecs), sharding, most)

    def decoded(self, values: Sequence[bytes]) -> np.ndarray:
        """Decodes chunks, stacked."""
        shape, dtype = self.layout.chunk, self.layout.dtype
        size = math.prod(shape) * dtype.itemsize
        memory = np.empty((len(values), size), np.uint8)
        if self.sharding is not None:
            values = [self.sharding.only_chunk(value) for value in values]
        # A call costs more than a small chunk. Frames of a declared size, which is compared, are one stream.
        is_stream = self.is_compressed and all([_content_size(value) == size for value in values])
        pieces = [(b"".join(values), memory)] if is_stream else list(zip(values, memory, strict=True))
        for data, out in pieces:
            if not self.is_compressed:
                found = len(data)
                if found == size:
                    out[:] = np.frombuffer(data, np.uint8)
            else:
                try:
                    found = cramjam.zstd.decompress_into(data, out.reshape(-1).data)
                except cramjam.DecompressionError as error:
                    raise ValueError(f"a chunk cannot be decompressed to {size} bytes: {error}") from None
            if found != out.size:
                raise ValueError(f"chunks have {found} bytes, and must have {out.size}")
        return memory.view(dtype).reshape(len(values), *shape)


def _content_size(frame: bytes) -> int | None:
    """Returns the size that a zstd frame declares, or None."""
    if frame[:4] != _ZSTD_MAGIC or len(frame) < 6 or frame[4] & 0x23 != _ONE_SEGMENT:
        return None
    width = 1 << (frame[4] >> 6)
    return int.from_bytes(frame[5 : 5 + width], "little") + (256 if width == 2 else 0)


def _codecs(metadata: Mapping[str, Any]) -> list[str] | None:
    """Returns the codecs of row-major, little-endian elements."""
    if metadata.get("zarr_format") == 2:
        is_plain = metadata["order"] == "C" and metadata["filters"] is None and isinstance(metadata["dtype"], str)
        compressor = metadata["compressor"]
        return ([] if compressor is None else [compressor["id"]]) if is_plain and metadata["dtype"][0] != ">" else None
    first, *rest = metadata["codecs"]
    is_plain = first["name"] == "bytes" and first.get("configuration", {}).get("endian", "little") == "little"
    return [codec["name"] for codec in rest] if is_plain else None


class SmallArray(NamedTuple):
    """Array with its kind, its chunks and their file.

    Attributes:
      values: the chunks, or their places.
      extent: the bytes of the file that hold the chunks, none if all are in the tree; or None if others are among them.
      open: opens it in TensorStore.
    """

    kind: ArrayKind
    values: tuple[bytes | ValueLocation, ...]
    file: StoredFile
    extent: FileExtent | None
    open: Callable[[], FetchedArray]


class SmallArrays:
    """Finder of the small arrays of a database."""

    def __init__(
        self, values: OcdbtValues, open_array: Callable[[str, str], FetchedArray], metadata: str, limits: Limits
    ):
        """Takes the database, an array opener and the metadata's name."""
        self._values = values
        self._open_array = open_array
        self._metadata = metadata
        self._limits = limits
        self._kinds: dict[bytes, ArrayKind | None] = {}
        self._in_tree = FileExtent(values.manifest, 0, 0)

    def find(self, name: str, leaf: str) -> SmallArray | None:
        """Returns an array, or None if TensorStore shall read it."""
        prefix = f"{name}/" if name else ""
        opened = partial(self._open_array, name, leaf)
        try:
            data = self._values.find(prefix + self._metadata)
            if not isinstance(data, bytes):
                return None
            if data not in self._kinds:
                array = opened()
                self._limits.require_shape(array.layout.shape, array.layout.dtype)
                self._kinds[data] = ArrayKind.of(array)
            kind = self._kinds[data]
            return None if kind is None else self._placed(kind, prefix, opened)
        except (CheckpointError, ValueError, NotImplementedError):
            return None

    def _placed(self, kind: ArrayKind, prefix: str, opened: Callable[[], FetchedArray]) -> SmallArray | None:
        """Returns an array by key prefix, unless chunks lie apart."""
        values: list[bytes | ValueLocation] = []
        beside: list[ValueLocation] = []
        for key in kind.keys:
            value = self._values.find(prefix + key)
            if value is None or (len(value) if isinstance(value, bytes) else value.size) > kind.most:
                return None
            values.append(value)
            if not isinstance(value, bytes):
                beside.append(value)
        if not beside:
            return SmallArray(kind, tuple(values), self._in_tree.file, self._in_tree, opened)
        start = min([one.offset for one in beside])
        stop = max([one.offset + one.size for one in beside])
        if {one.file for one in beside} != {beside[0].file} or stop - start > _SMALL_BYTES:
            return None
        file = self._values.file(beside[0].file)
        is_near = stop - start - sum([one.size for one in beside]) < MAX_GAP_BYTES
        extent = FileExtent(file, start, stop) if is_near else None
        return SmallArray(kind, tuple(values), file, extent, opened)


class SmallArrayLeaf(TensorStoreLeaf, BlockingLeaf):
    """Leaf of a small array of a database."""

    __slots__ = ("_small",)

    def __init__(self, name: str, path: str, small: SmallArray, root: Files, **options: Any):
        super().__init__(name, path, small.kind.layout, small.open, root, **options)
        self._small = small

    @property
    def extent(self) -> FileExtent | None:
        return self._small.extent

    async def read_into(self, requests: Sequence[Request], stats: ReadStats) -> None:
        pool = waiting_pool() if self.is_remote else reader_pool()
        await run_in_pool(pool, self.read_blocking, requests, stats)

    def read_blocking(self, requests: Sequence[Request], stats: ReadStats) -> None:
        self._root.require_open()
        self.raise_error()
        if not self._files.was_checked(stats.execution):
            self._files.check_unchanged(stats.execution, leaf=self.name)
        wanted = [request for request in requests if request.out.size]
        try:
            self._fill_all(wanted)
        except (ValueError, CorruptCheckpointError) as error:
            # In files that changed meanwhile this is no damage.
            self._files.check_unchanged(ReadStats(stats.verify), leaf=self.name)
            if isinstance(error, CheckpointError):
                raise
            raise CorruptCheckpointError(f"reading it: {error}", path=self.path, leaf=self.name) from error
        stats.count(self.bytes_of(tuple([request.box for request in wanted])))
        if isinstance(self._sums, BoxSums) and stats.verify != "off":
            self._add_sums(wanted, self._sums, stats)

    def _fill_all(self, requests: Sequence[Request]) -> None:
        kind, values, *_ = self._small
        if kind.is_rows and len(requests) == 1 and requests[0].out.shape == self.shape:
            requests[0].out[...] = kind.decoded(self._stored_bytes(values)).reshape(self.shape)
            return
        overlap = [any(intersect(box, one.box) is not None for one in requests) for box in kind.boxes]
        numbers = list(itertools.compress(range(len(values)), overlap))
        if not numbers:
            return
        chunks = kind.decoded(self._stored_bytes([values[number] for number in numbers]))
        for box, out in requests:
            for number, chunk in zip(numbers, chunks, strict=True):
                if (common := intersect(box, kind.boxes[number])) is not None:
                    out[slices_within(common, box)] = chunk[slices_within(common, kind.boxes[number])]

    def _stored_bytes(self, values: Sequence[bytes | ValueLocation]) -> list[bytes]:
        read: list[bytes] = []
        for value in values:
            if not isinstance(value, bytes):
                data = np.empty(value.size, np.uint8)
                self._small.file.read_into(value.offset, [data], leaf=self.name)
                value = data.tobytes()
            read.append(value)
        return read
