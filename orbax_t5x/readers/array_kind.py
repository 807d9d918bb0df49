"""Kinds of chunked arrays, and the decoding of their chunks.

Arrays are alike: a checkpoint of thousands has a few metadata. Of each kind TensorStore opens an array in memory, and
so decides on the metadata of all. Chunks of plain elements, compressed or not, are decoded here, those of many arrays
in a call. TensorStore decodes all others, from memory: each has a place of its own in an array that is long enough.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import cramjam
import numpy as np
import tensorstore as ts

from orbax_t5x.files.crc import CRC32C
from orbax_t5x.files.ranges import BoundedRange
from orbax_t5x.lazy.box import Box, box_slices
from orbax_t5x.lazy.leaf import Request
from orbax_t5x.readers.chunk_grid import ChunkKeys
from orbax_t5x.readers.ranges.elements import as_stored
from orbax_t5x.readers.tensorstore_specs import array_spec, open_known

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
# More chunks than are decoded at a time.
_PLACES = 1 << 24
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

        None also for shards of another kind than Orbax's, which are fetched whole.
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
    def index_range(self) -> BoundedRange:
        """The bytes of the index in a shard."""
        size = SHARD_ENTRY_BYTES * self.chunks + (_CRC_BYTES if self.has_crc else 0)
        return BoundedRange.last(size) if self.is_last else BoundedRange.between(0, size)

    def entries(self, index: bytes) -> np.ndarray:
        """Parses offset and size of each chunk.

        Raises:
          ValueError: the index is damaged.
        """
        numbers, crc = index[: SHARD_ENTRY_BYTES * self.chunks], index[SHARD_ENTRY_BYTES * self.chunks :]
        if len(index) != self.index_range.size or (crc and CRC32C.extend(0, numbers) != int.from_bytes(crc, "little")):
            raise ValueError("the index of a shard is damaged")
        return np.frombuffer(numbers, "<u8").reshape(self.chunks, 2)

    def only_chunk(self, shard: bytes) -> bytes:
        """Returns the only chunk of a shard.

        Raises:
          ValueError: the shard is damaged, or has no chunk.
        """
        offset, size = self.entries(shard[self.index_range.start : self.index_range.stop])[0].tolist()
        if offset + size > len(shard):
            raise ValueError(f"a shard of {len(shard)} bytes has a chunk of {size} bytes at byte {offset}")
        return shard[offset : offset + size]


class ChunkDecoder:
    """TensorStore's decoder of chunks in memory; safe in threads."""

    def __init__(self, kvstore: Mapping[str, Any], spec: Mapping[str, Any], chunk: Sequence[int], context: ts.Context):
        """Opens an array with a place for each chunk."""
        self._chunk = chunk or (1,)
        self._memory = ts.KvStore.open(dict(kvstore), context=context).result()
        metadata = {key: value for key, value in spec["metadata"].items() if key != "dimension_names"}
        metadata["shape"] = [_PLACES * self._chunk[0], *self._chunk[1:]]
        if "chunks" in metadata:
            metadata["chunks"] = list(self._chunk)
        else:
            metadata["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": list(self._chunk)}}
            if not chunk:
                metadata["codecs"] = [codec for codec in metadata["codecs"] if codec["name"] != "transpose"]
        self._array = open_known({**spec, "metadata": metadata}, context)
        self._keys = ChunkKeys.of(metadata)
        self._places = itertools.count()

    def begin(self, data: bytes, requests: Sequence[Request]) -> tuple[str, list[ts.WriteFutures]]:
        """Begins to decode boxes of a chunk."""
        place = next(self._places) % _PLACES
        key = self._keys.key([place, *[0] * (len(self._chunk) - 1)])
        self._memory[key] = data
        try:
            writes: list[ts.WriteFutures] = []
            for box, out in requests:
                # From the grid of the array to the place of the chunk.
                sides = zip(box, self._chunk, strict=False)
                within = [slice(low % size, (high - 1) % size + 1) for (low, high), size in sides]
                first = self._chunk[0] * place
                index = (slice(first + within[0].start, first + within[0].stop), *within[1:]) if within else (first,)
                writes.append(ts.array(out, write=True, copy=False).write(self._array[index]))
            return key, writes
        except BaseException:
            del self._memory[key]
            raise

    def end(self, key: str, writes: Sequence[ts.WriteFutures]) -> None:
        """Awaits what `begin` began; drops the chunk."""
        try:
            for write in writes:
                write.result()
        finally:
            del self._memory[key]


class ArrayKind:
    """Arrays of the same metadata.

    Attributes:
      shape, dtype: of each.
      chunk: the shape that is decoded at a time; () for a rank-0 array.
      shard: the shape that is stored under a key; a chunk, or several with an index.
      keys: of its chunks, or of its shards.
      sharding: its shards, or None if what is stored under a key is fetched whole.
      fetched: the shape that is fetched at a time; `grid` is how many there are, along each dimension.
      chunk_bytes, most_encoded: of that, decoded, and at most as it is stored.
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
        self.fetched: tuple[int, ...] = self.shard if self.sharding is None else self.chunk
        spec["metadata"] = self.metadata if self.sharding is None else {**self.metadata, "codecs": self.sharding.codecs}
        self._decoder = functools.partial(ChunkDecoder, kvstore, spec, self.fetched, context)
        self.chunk_bytes: int = math.prod(self.fetched) * self.dtype.itemsize
        self.most_encoded: int = self.chunk_bytes + self.chunk_bytes // 32 + (1 << 16)
        sides = list(zip(self.shape, self.fetched, strict=True))
        self.grid: tuple[int, ...] = tuple([-(-size // side) for size, side in sides])
        count = math.prod(self.grid)
        is_small = count <= _MOST_CHUNKS and count * self.chunk_bytes <= SMALL_BYTES and self.fetched == self.shard
        self._codec = self._plain_codec() if is_small else None
        self.is_small: bool = self._codec is not None and as_stored(self.dtype)
        self.boxes: tuple[Box, ...] = ()
        self.stored_keys: tuple[str, ...] = ()
        if self.is_small:
            cuts = [[(low, min(low + side, size)) for low in range(0, size, side)] for size, side in sides]
            self.boxes = tuple(itertools.product(*cuts))
            self.stored_keys = tuple(map(self.keys.key, itertools.product(*map(range, self.grid))))

    @functools.cached_property
    def decoder(self) -> ChunkDecoder:
        """The decoder of any chunks, made at its first use."""
        return self._decoder()

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
        return memory.view(self.dtype).reshape(len(values), *self.fetched)


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
