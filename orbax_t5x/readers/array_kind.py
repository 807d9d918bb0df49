"""Kinds of chunked arrays: boxes, keys and decoding of their chunks.

A few bytes of metadata may describe billions of chunks of which none is stored; an absent chunk stands for the fill
value. So the work of a read follows the box that is wanted and the chunks that are stored: what else the box covers is
filled at once. Grids are regular and begin at the origin.

Arrays are alike: a checkpoint of thousands has a few metadata. Of each kind TensorStore opens an array in memory, and
so decides on the metadata of all. Small arrays of plain elements, compressed or not, are decoded here, those of many
arrays in a call. TensorStore reads and decodes all others.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import cramjam
import numpy as np
import tensorstore as ts

from orbax_t5x.files.crc import CRC32C
from orbax_t5x.lazy.box import Box, box_slices, intersect, shift, union_size
from orbax_t5x.lazy.leaf import Request
from orbax_t5x.readers.ranges.elements import as_stored
from orbax_t5x.readers.tensorstore_specs import array_spec


def count_chunks(boxes: Iterable[Box], chunks: Sequence[int]) -> int:
    """Counts the chunks that boxes overlap together."""
    return union_size(tuple([chunk_indices(box, chunks) for box in boxes]))


def requests_by_chunk(requests: Iterable[Request], chunks: Sequence[int]) -> Iterator[list[Request]]:
    """Yields, for each chunk that requests overlap, their boxes in it."""
    found: dict[tuple[int, ...], list[Request]] = {}
    for box, out in requests:
        for inner in itertools.product(*map(_cuts, box, chunks)):
            chunk = tuple([low // size for (low, _), size in zip(inner, chunks, strict=True)])
            found.setdefault(chunk, []).append(Request(inner, out[(*box_slices(shift(inner, box)), ...)]))
    yield from found.values()


def chunk_indices(box: Box, chunks: Sequence[int]) -> Box:
    """Returns the index box of the chunks that a box overlaps."""
    return tuple([(low // size, -(-high // size)) for (low, high), size in zip(box, chunks, strict=True)])


def _cuts(side: tuple[int, int], size: int) -> list[tuple[int, int]]:
    """Cuts a dimension of a box at the borders of chunks."""
    low, high = side
    return list(itertools.pairwise([low, *range((low // size + 1) * size, high, size), high]))


class ChunkKeys(NamedTuple):
    """Keys of an array's stored chunks.

    A key is `prefix`, then the indices joined by `separator`.
    """

    prefix: str
    separator: str

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> ChunkKeys:
        """Returns the keys of an array with these metadata."""
        if metadata.get("zarr_format") != 3:
            return cls("", metadata.get("dimension_separator", "."))
        encoding = metadata["chunk_key_encoding"]
        is_default = encoding["name"] == "default"
        separator = encoding.get("configuration", {}).get("separator", "/" if is_default else ".")
        return cls("c" if is_default else "", separator)

    def key(self, index: Sequence[int]) -> str:
        """Returns the key of a chunk."""
        numbers = [str(number) for number in index]
        return self.separator.join([self.prefix, *numbers] if self.prefix else numbers or ["0"])

    def indices(self, keys: Sequence[str], grid: Sequence[int]) -> np.ndarray:
        """Returns the indices of chunk keys, sorted."""
        found = {index for key in keys if (index := self._index(key, grid)) is not None}
        return np.array(sorted(found), np.int64).reshape(len(found), len(grid))

    def _index(self, key: str, grid: Sequence[int]) -> tuple[int, ...] | None:
        numbers = key.split(self.separator)
        if self.prefix or not grid:
            numbers = numbers[1:]
        if len(numbers) != len(grid) or not all(number.isdecimal() and len(number) < 20 for number in numbers):
            return None
        index = tuple(map(int, numbers))
        is_inside = all(number < count for number, count in zip(index, grid, strict=True))
        return index if is_inside and self.key(index) == key else None


class StoredChunks:
    """The stored chunks of an array, listed at its first read.

    `Snapshot` notices chunks that are added later.
    """

    def __init__(self, cell: tuple[int, ...], grid: tuple[int, ...]):
        self._cell = cell
        self._grid = grid
        self._listed: np.ndarray | None = None

    async def find(self, keys: ChunkKeys, names: Callable[[], Awaitable[list[str]]]) -> None:
        """Lists the chunks once."""
        if self._listed is None:
            self._listed = keys.indices(await names(), self._grid)

    def fill(self, requests: Sequence[Request], value: np.ndarray) -> tuple[list[Request], int]:
        """Fills the uncovered rest of a mostly empty box."""
        stored = self._listed
        assert stored is not None
        left: list[Request] = []
        used = np.zeros(len(stored), np.bool_)
        for request in requests:
            inside = self._inside(request.box, stored)
            used |= inside
            indices = stored[inside]
            if 2 * len(indices) >= count_chunks([request.box], self._cell):
                left.append(request)
                continue
            request.out[...] = value
            left += [self._piece(request, index) for index in indices.tolist()]
        absent = count_chunks([request.box for request in requests], self._cell) - int(np.count_nonzero(used))
        return left, absent

    def _inside(self, box: Box, stored: np.ndarray) -> np.ndarray:
        """Returns a mask of the stored chunks that a box overlaps."""
        inside = np.ones(len(stored), np.bool_)
        for axis, (low, high) in enumerate(chunk_indices(box, self._cell)):
            inside &= (low <= stored[:, axis]) & (stored[:, axis] < high)
        return inside

    def _piece(self, request: Request, index: Sequence[int]) -> Request:
        """Returns the part of a request in a chunk."""
        chunk = tuple([(number * size, (number + 1) * size) for number, size in zip(index, self._cell, strict=True)])
        box = intersect(chunk, request.box)
        assert box is not None
        return Request(box, request.out[box_slices(shift(box, request.box))])


_NUMBERS = itertools.count()
_SHARDING = "sharding_indexed"
_CRC_BYTES = 4
# In the index of a shard: offset and size of a chunk.
SHARD_ENTRY_BYTES = 16
# Of all chunks of an array, decoded: larger ones gain nothing from being decoded here.
SMALL_BYTES = 1 << 18
_MOST_CHUNKS = 64
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# The bit of a frame's descriptor after which its content's size follows, and those of a dictionary that must be unset.
_ONE_SEGMENT = 0x20
# Codecs that end what they wrote with a checksum, which TensorStore compares. Of zstd that is an option.
_CHECKING_CODECS = ("gzip", "zlib", "crc32c")


class Sharding(NamedTuple):
    """Shards of chunks, with an index of offsets and sizes.

    Attributes:
      chunks: in each shard.
      is_last: whether the index ends the shard, and does not begin it.
      has_crc: whether a checksum follows the index.
      codecs: of a chunk.
    """

    chunks: int
    is_last: bool
    has_crc: bool
    codecs: list[dict[str, Any]]

    @classmethod
    def of(cls, metadata: Mapping[str, Any], chunks: int) -> Sharding | None:
        """Returns the shards of so many chunks, or None.

        None also for shards of another kind than Orbax's.
        """
        codecs = metadata.get("codecs", ())
        if [codec["name"] for codec in codecs] != [_SHARDING]:
            return None
        settings = codecs[0].get("configuration", {})
        index, inner = settings.get("index_codecs", ()), settings.get("codecs", ())
        plain = [codec["name"] for codec in index] in (["bytes"], ["bytes", "crc32c"])
        little = plain and index[0].get("configuration", {}).get("endian") == "little"
        if not little or any(codec["name"] == _SHARDING for codec in inner):
            return None
        return cls(chunks, settings.get("index_location", "end") == "end", len(index) > 1, inner)

    @property
    def index_slice(self) -> slice:
        """The bytes of the index in a shard."""
        size = SHARD_ENTRY_BYTES * self.chunks + (_CRC_BYTES if self.has_crc else 0)
        return slice(-size, None) if self.is_last else slice(0, size)

    def entries(self, index: bytes) -> np.ndarray:
        """Parses offset and size of each chunk.

        Raises:
          ValueError: the index is damaged.
        """
        numbers, crc = index[: SHARD_ENTRY_BYTES * self.chunks], index[SHARD_ENTRY_BYTES * self.chunks :]
        if len(crc) != (_CRC_BYTES if self.has_crc else 0) or (
            crc and CRC32C.extend(0, numbers) != int.from_bytes(crc, "little")
        ):
            raise ValueError("the index of a shard is damaged")
        return np.frombuffer(numbers, "<u8").reshape(self.chunks, 2)

    def only_chunk(self, shard: bytes) -> bytes:
        """Returns the only chunk of a shard.

        Raises:
          ValueError: the shard is damaged, or has no chunk.
        """
        offset, size = self.entries(shard[self.index_slice])[0].tolist()
        if offset + size > len(shard):
            raise ValueError(f"a shard of {len(shard)} bytes has a chunk of {size} bytes at byte {offset}")
        return shard[offset : offset + size]


class ArrayKind:
    """Arrays of the same metadata.

    Attributes:
      shape, dtype: of each.
      chunk: the shape that is decoded at a time; () for a rank-0 array.
      shard: the shape that is stored under a key; a chunk, or several with an index.
      keys: of its chunks, or of its shards.
      sharding: its shards, or None without an index.
      grid: how many chunks there are along each dimension.
      chunk_bytes, most_encoded: of a chunk, decoded, and at most as it is stored.
      is_small: whether `arrays` decodes arrays of the kind.
      boxes, stored_keys: of all their chunks; of other kinds none.
      metadata: as TensorStore writes them.
      fill_value: of absent chunks, or None if all must be stored.
    """

    def __init__(self, data: bytes, *, zarr3: bool, absent_is_fill: bool, context: ts.Context):
        """Opens an array with these metadata; raises as TensorStore does."""
        kvstore = {"driver": "memory", "path": f"{next(_NUMBERS)}/"}
        file = "zarr.json" if zarr3 else ".zarray"
        memory = ts.KvStore.open(kvstore, context=context).result()
        memory[file] = data
        spec = array_spec(kvstore, "", ocdbt=False, zarr3=zarr3)
        array = ts.open(spec, open=True, read=True, context=context).result()
        del memory[file]
        layout = array.chunk_layout
        self.context = context
        self.shape: tuple[int, ...] = tuple(array.shape)
        self.dtype: np.dtype = np.dtype(array.dtype.numpy_dtype)
        self.chunk, self.shard = [
            tuple([max(1, size or whole) for size, whole in zip(cell.shape or self.shape, self.shape, strict=True)])
            for cell in (layout.read_chunk, layout.write_chunk)
        ]
        self.metadata: dict[str, Any] = array.spec().to_json()["metadata"]
        self.keys: ChunkKeys = ChunkKeys.of(self.metadata)
        self.sharding: Sharding | None = Sharding.of(self.metadata, math.prod(self.shard) // math.prod(self.chunk))
        self.fill_value: np.ndarray | None = np.asarray(array.fill_value) if absent_is_fill else None
        self.chunk_bytes: int = math.prod(self.chunk) * self.dtype.itemsize
        self.most_encoded: int = self.chunk_bytes + self.chunk_bytes // 32 + (1 << 16)
        sides = list(zip(self.shape, self.chunk, strict=True))
        self.grid: tuple[int, ...] = tuple([-(-size // side) for size, side in sides])
        count = math.prod(self.grid)
        is_small = count <= _MOST_CHUNKS and count * self.chunk_bytes <= SMALL_BYTES and self.chunk == self.shard
        self._codec = self._plain_codec() if is_small else None
        self.is_small: bool = self._codec is not None and as_stored(self.dtype)
        self.boxes: tuple[Box, ...] = ()
        self.stored_keys: tuple[str, ...] = ()
        if self.is_small:
            cuts = [[(low, min(low + side, size)) for low in range(0, size, side)] for size, side in sides]
            self.boxes = tuple(itertools.product(*cuts))
            self.stored_keys = tuple(map(self.keys.key, itertools.product(*map(range, self.grid))))

    def all_keys(self) -> list[str]:
        """Lists the keys of all chunks, or shards, of an array."""
        grid = [-(-size // side) for size, side in zip(self.shape, self.shard, strict=True)]
        return list(map(self.keys.key, itertools.product(*map(range, grid))))

    def _plain_codec(self) -> str | None:
        """Returns the codec of row-major, little-endian elements; "" for none."""
        metadata = self.metadata
        if metadata.get("zarr_format") == 2:
            is_plain = metadata["order"] == "C" and metadata["filters"] is None and isinstance(metadata["dtype"], str)
            if not is_plain or metadata["dtype"][0] == ">":
                return None
            codecs = [] if metadata["compressor"] is None else [metadata["compressor"]["id"]]
        else:
            first, *rest = metadata["codecs"] if self.sharding is None else self.sharding.codecs
            if first["name"] != "bytes" or first.get("configuration", {}).get("endian", "little") != "little":
                return None
            codecs = [codec["name"] for codec in rest]
        codec = "".join(codecs[:1])
        return codec if len(codecs) < 2 and codec in ("", "gzip", "zstd") else None

    @functools.cached_property
    def checking_codec(self) -> str | None:
        """The codec that checks each chunk at reading, or None."""
        pending: list[Any] = [*self.metadata.get("codecs", ()), self.metadata.get("compressor")]
        while pending:
            codec = pending.pop(0)
            if not isinstance(codec, Mapping):
                continue
            name = codec.get("name", codec.get("id"))
            settings = codec.get("configuration", codec)
            if name in _CHECKING_CODECS or (name == "zstd" and settings.get("checksum")):
                return name
            pending += settings.get("codecs", ())
        return None

    def arrays(self, stored: Sequence[Sequence[bytes | None]]) -> list[np.ndarray]:
        """Decodes small arrays of the kind from their chunks.

        Elements of a chunk that is None are undefined.

        Raises:
          ValueError: a chunk is damaged, or encoded in an unusual way.
        """
        chunks = self._decoded([value for values in stored for value in values if value is not None])
        if len(self.boxes) == 1 and len(chunks) == len(stored):
            inside = (*box_slices(self.boxes[0]), ...)
            return [chunks[(number, *inside)] for number in range(len(chunks))]
        found: list[np.ndarray] = []
        following = iter(chunks)
        for values in stored:
            array = np.empty(self.shape, self.dtype)
            for value, box in zip(values, self.boxes, strict=True):
                if value is not None:
                    array[box_slices(box)] = next(following)[tuple([slice(high - low) for low, high in box])]
            found.append(array)
        return found

    def _decoded(self, values: Sequence[bytes]) -> np.ndarray:
        """Decodes chunks, stacked."""
        size = self.chunk_bytes
        if self.sharding is not None:
            values = [self.sharding.only_chunk(value) for value in values]
        if self._codec == "gzip":
            values = [_inflated(value, size) for value in values]
        memory = np.empty((len(values), size), np.uint8)
        if self._codec == "zstd":
            # A call costs more than a small chunk. Frames of a declared size, which is compared, are one stream.
            is_stream = all([_content_size(value) == size for value in values])
            pieces = [(b"".join(values), memory)] if is_stream else list(zip(values, memory, strict=True))
            for data, out in pieces:
                try:
                    found = cramjam.zstd.decompress_into(data, out.reshape(-1).data)
                except cramjam.DecompressionError as error:
                    raise ValueError(f"a chunk cannot be decompressed to {size} bytes: {error}") from None
                if found != out.size:
                    raise ValueError(f"chunks have {found} bytes, and must have {out.size}")
        else:
            if wrong := [len(value) for value in values if len(value) != size]:
                raise ValueError(f"a chunk has {wrong[0]} bytes, and must have {size}")
            memory.reshape(-1)[:] = np.frombuffer(b"".join(values), np.uint8)
        return memory.view(self.dtype).reshape(len(values), *self.chunk)


def _inflated(data: bytes, size: int) -> bytes:
    """Decompresses a gzip member of a known size."""
    inflater = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        found = inflater.decompress(data, size + 1)
    except zlib.error as error:
        raise ValueError(f"a chunk cannot be decompressed: {error}") from None
    if len(found) != size or not inflater.eof or inflater.unused_data:
        raise ValueError(f"a chunk cannot be decompressed to {size} bytes")
    return found


def _content_size(frame: bytes) -> int | None:
    """Returns the size that a zstd frame declares, or None."""
    if frame[:4] != _ZSTD_MAGIC or len(frame) < 6 or frame[4] & 0x23 != _ONE_SEGMENT:
        return None
    width = 1 << (frame[4] >> 6)
    return int.from_bytes(frame[5 : 5 + width], "little") + (256 if width == 2 else 0)
