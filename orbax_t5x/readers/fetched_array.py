"""A chunked array on a web server.

Its chunks are fetched by us, with a bound, and decoded by TensorStore from memory.

TensorStore never sees the server. It opens the array over a store in memory, into which each chunk is put before it is
read. Of a sharded array it opens one whose chunks are those inside the shards, which are fetched singly.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from orbax_t5x.concurrency import OnceEach, run_in_pool, waiting_pool
from orbax_t5x.errors import CorruptCheckpointError, UnsupportedCheckpointError
from orbax_t5x.files.crc import CRC32C
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.values import BoundedRange, ReadContext, Values
from orbax_t5x.lazy.box import box_slices
from orbax_t5x.lazy.leaf import Request
from orbax_t5x.readers.array_layout import ArrayLayout
from orbax_t5x.readers.ocdbt_values import OcdbtValues
from orbax_t5x.readers.stored_chunks import ChunkKeys
from orbax_t5x.readers.tensorstore_specs import array_spec

_NUMBERS = itertools.count()
_SHARDING = "sharding_indexed"
_ABSENT = (1 << 64) - 1
_CRC_BYTES = 4
# In the index of a shard: offset and size of a chunk.
SHARD_ENTRY_BYTES = 16


def most_encoded(nbytes: int) -> int:
    """Returns the most bytes that a codec makes of a chunk."""
    return nbytes + nbytes // 32 + (1 << 16)


def only_chunk(shard: bytes, sharding: Mapping[str, Any]) -> bytes:
    """Returns the only chunk of a shard."""
    size = _index_bytes(1, sharding)
    offset, length = _parse_index(shard[-size:] if _is_last(sharding) else shard[:size], 1, sharding)[0].tolist()
    if offset + length > len(shard):
        raise ValueError(f"a shard of {len(shard)} bytes has a chunk of {length} bytes at byte {offset}")
    return shard[offset : offset + length]


def _is_last(sharding: Mapping[str, Any]) -> bool:
    return sharding.get("index_location", "end") == "end"


def _index_bytes(chunks: int, sharding: Mapping[str, Any]) -> int:
    return SHARD_ENTRY_BYTES * chunks + (_CRC_BYTES if len(sharding["index_codecs"]) > 1 else 0)


def _parse_index(data: bytes, chunks: int, sharding: Mapping[str, Any]) -> np.ndarray:
    """Parses offset and size of each chunk of a shard."""
    nbytes = SHARD_ENTRY_BYTES * chunks
    numbers, crc = data[:nbytes], data[nbytes:]
    if len(data) != _index_bytes(chunks, sharding) or (
        crc and CRC32C.extend(0, numbers) != int.from_bytes(crc, "little")
    ):
        raise ValueError("the index of a shard is damaged")
    return np.frombuffer(numbers, "<u8").reshape(chunks, 2)


class FetchedArray:
    """A chunked array of a web server.

    Attributes:
      layout: of the array as it is stored.
      chunk_bytes: of a chunk, decoded.
      keys: of its chunks, or of its shards.
      metadata: as TensorStore writes them.
      sharding: the settings of the codec that makes shards of chunks, or None.
      array: over the chunks that were fetched.
    """

    def __init__(
        self,
        values: Values,
        name: str,
        *,
        context: ts.Context,
        zarr3: bool,
        absent_is_fill: bool = False,
        metadata: Mapping[str, Any] | None = None,
        leaf: str,
        limits: Limits,
    ):
        """Opens the array, reading its metadata if they are not given."""
        self._values = values
        self._prefix = f"{name}/" if name else ""
        self._users: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._indexes: OnceEach[tuple[int, ...], np.ndarray | None] = OnceEach()
        kvstore = {"driver": "memory", "path": f"{next(_NUMBERS)}/"}
        spec = array_spec(kvstore, "", ocdbt=False, zarr3=zarr3, absent_is_fill=absent_is_fill)
        self._memory = ts.KvStore.open(kvstore, context=context).result()
        if metadata is None:
            file = "zarr.json" if zarr3 else ".zarray"
            data = values.read(self._prefix + file, BoundedRange.whole(limits.json_bytes), ReadContext(leaf))
            if data is None:
                raise CorruptCheckpointError(f"opening it: {name}/{file} is missing", path=values.path, leaf=leaf)
            self._memory.write(file, data).result()
            array = ts.open(spec, open=True, read=True, context=context).result()
            self._memory.write(file, None).result()
        else:
            spec["metadata"] = metadata
            array = ts.open(spec, open=True, assume_metadata=True, read=True, context=context).result()
        self.layout = ArrayLayout.of(array)
        self.chunk_bytes: int = math.prod(self.layout.chunk) * self.layout.dtype.itemsize
        self.keys = ChunkKeys.of(array)
        self.metadata: dict[str, Any] = array.spec().to_json()["metadata"]
        self.sharding: dict[str, Any] | None = None
        if any(codec["name"] == _SHARDING for codec in self.metadata.get("codecs", ())):
            self.sharding = self._only_sharding(leaf)
            spec["metadata"] = self._unsharded(self.sharding)
            array = ts.open(spec, open=True, assume_metadata=True, read=True, context=context).result()
        self.array: ts.TensorStore = array

    def begin_chunk(self, requests: Sequence[Request], context: ReadContext) -> ChunkRead:
        """Fetches a chunk and begins to read boxes inside it."""
        index = tuple([low // size for (low, _), size in zip(requests[0].box, self.layout.chunk, strict=True)])
        most = most_encoded(self.chunk_bytes)
        key = self.keys.key(index)
        if self.sharding is None:
            data = self._values.read(self._prefix + key, BoundedRange.whole(most), context)
        else:
            data = self._read_inside(index, self.sharding, most, context)
        self.hold(key, data)
        try:
            writes = [ts.array(out, write=True, copy=False).write(self.array[box_slices(box)]) for box, out in requests]
        except BaseException:
            self.drop(key)
            raise
        return ChunkRead(self, key, writes)

    def hold(self, key: str, data: bytes | None) -> None:
        """Holds a chunk in memory for reads of `array`."""
        with self._lock:
            self._users[key] += 1
            if data is not None:
                self._memory[key] = data

    def drop(self, key: str) -> None:
        """Removes a chunk that was held, unless another read still holds it."""
        with self._lock:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                del self._memory[key]

    @property
    def names(self) -> Callable[[], Awaitable[list[str]]] | None:
        """The lister of all names stored with the array, or None."""
        values = self._values
        if not isinstance(values, OcdbtValues):
            return None
        return lambda: run_in_pool(waiting_pool(), values.names, self._prefix)

    # -- shards

    def _only_sharding(self, leaf: str) -> dict[str, Any]:
        """Returns the settings of Orbax's kind of sharding codec."""
        codecs = self.metadata["codecs"]
        settings = codecs[0].get("configuration", {})
        index_codecs = settings.get("index_codecs", ())
        plain = [codec["name"] for codec in index_codecs] in (["bytes"], ["bytes", "crc32c"])
        little = plain and index_codecs[0].get("configuration", {}).get("endian") == "little"
        nested = any(codec["name"] == _SHARDING for codec in settings.get("codecs", ()))
        if len(codecs) != 1 or not little or nested:
            raise UnsupportedCheckpointError(
                "opening it: shards inside others, or with codecs around them, are not read from a web server",
                path=self._values.path,
                leaf=leaf,
            )
        return settings

    def _unsharded(self, sharding: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the metadata of an array of the shards' inner chunks."""
        grid = {"name": "regular", "configuration": {"chunk_shape": list(self.layout.chunk)}}
        return {**self.metadata, "chunk_grid": grid, "codecs": sharding["codecs"]}

    def _read_inside(
        self, index: tuple[int, ...], sharding: Mapping[str, Any], most: int, context: ReadContext
    ) -> bytes | None:
        """Reads a chunk inside a shard."""
        sides = [shard // chunk for shard, chunk in zip(self.layout.shard, self.layout.chunk, strict=True)]
        shard = tuple([number // side for number, side in zip(index, sides, strict=True)])
        inside = tuple([number % side for number, side in zip(index, sides, strict=True)])
        key = self._prefix + self.keys.key(shard)
        entries = self._indexes.get(shard, lambda: self._read_index(key, sides, sharding, context))
        if entries is None:
            return None
        offset, size = map(int, entries[inside])
        if offset == size == _ABSENT:
            return None
        if size > most or offset >= 1 << 62:
            raise CorruptCheckpointError(
                f"the shard {key} has a chunk of {size} bytes at byte {offset}",
                path=self._values.path,
                leaf=context.leaf,
            )
        return self._values.read(key, BoundedRange.between(offset, offset + size), context) if size else b""

    def _read_index(
        self, key: str, sides: Sequence[int], sharding: Mapping[str, Any], context: ReadContext
    ) -> np.ndarray | None:
        """Reads the offset and size of each of a shard's chunks."""
        size, is_last = _index_bytes(math.prod(sides), sharding), _is_last(sharding)
        data = self._values.read(key, BoundedRange.last(size) if is_last else BoundedRange.between(0, size), context)
        if data is None:
            return None
        try:
            return _parse_index(data, math.prod(sides), sharding).reshape(*sides, 2)
        except ValueError:
            raise CorruptCheckpointError(
                f"the index of the shard {key} is damaged", path=self._values.path, leaf=context.leaf
            ) from None


class ChunkRead(NamedTuple):
    """A chunk that was fetched, and is being decoded into buffers."""

    array: FetchedArray
    key: str
    writes: list[ts.WriteFutures]

    def end(self) -> None:
        """Waits for the buffers; raises TensorStore's errors."""
        try:
            for write in self.writes:
                write.result()
        finally:
            self.array.drop(self.key)


class UnopenedArray(NamedTuple):
    """An array that TensorStore opens when it is first read.

    Attributes:
      layout: as opening it would show.
      open: opens it, without reading anything; blocks, and may be called from any thread.
    """

    layout: ArrayLayout
    open: Callable[[], ts.TensorStore | FetchedArray]
