"""A chunked array whose chunks are fetched by us, with a bound.

TensorStore decodes them from memory, and never sees the server. It opens the array over a store in memory, into which
each chunk is put before it is read. Of a sharded array it opens an array of the chunks inside the shards, which are
fetched singly. Threads each take a chunk after the other: a task of the event loop for each of thousands of small
chunks would cost more than fetching it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from orbax_t5x.concurrency import Budget, OnceEach, run_in_pool, wait_all, waiting_pool
from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.files.crc import CRC32C
from orbax_t5x.files.interface import Named
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.ranges import REQUESTS_AT_ONCE, BoundedRange, ReadContext, RequestGroup
from orbax_t5x.lazy.box import Box, box_slices
from orbax_t5x.lazy.leaf import Request
from orbax_t5x.readers.chunk_grid import ArrayLayout, ChunkKeys, requests_by_chunk
from orbax_t5x.readers.ocdbt_values import OcdbtValues
from orbax_t5x.readers.tensorstore_specs import array_spec

_NUMBERS = itertools.count()
_SHARDING = "sharding_indexed"
_ABSENT = (1 << 64) - 1
_CRC_BYTES = 4
# In the index of a shard: offset and size of a chunk.
SHARD_ENTRY_BYTES = 16
# Threads for one array where responses come at once: more would only compete for the interpreter.
_THREADS_WHEN_NEAR = 4
# Small chunks that a thread has decoded while it fetches others, beyond the memory that was taken.
_PENDING_BYTES = 1 << 16


def most_encoded(nbytes: int) -> int:
    """Returns the most bytes that a codec makes of a chunk."""
    return nbytes + nbytes // 32 + (1 << 16)


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
    def of(cls, metadata: Mapping[str, Any], layout: ArrayLayout) -> Sharding | None:
        """Returns the shards of an array, or None.

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
        chunks = math.prod(layout.shard) // math.prod(layout.chunk)
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


class FetchedArray:
    """A chunked array, fetched chunk by chunk.

    Attributes:
      layout: of the array as it is stored.
      chunk_bytes: of a chunk, decoded.
      keys: of its chunks, or of its shards.
      metadata: as TensorStore writes them.
      sharding: its shards, or None.
      array: over the chunks that were fetched.
    """

    def __init__(
        self,
        values: Named,
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
        self._indexes: OnceEach[str, np.ndarray | None] = OnceEach()
        kvstore = {"driver": "memory", "path": f"{next(_NUMBERS)}/"}
        spec = array_spec(kvstore, "", ocdbt=False, zarr3=zarr3, absent_is_fill=absent_is_fill)
        self._memory = ts.KvStore.open(kvstore, context=context).result()
        if metadata is None:
            file = "zarr.json" if zarr3 else ".zarray"
            data = values.read_range(self._prefix + file, BoundedRange.whole(limits.json_bytes), ReadContext(leaf))
            if data is None:
                raise CorruptCheckpointError(f"opening it: {name}/{file} is missing", path=values.path, leaf=leaf)
            self._memory.write(file, data).result()
            array = ts.open(spec, open=True, read=True, context=context).result()
            self._memory.write(file, None).result()
        else:
            spec["metadata"] = metadata
            array = ts.open(spec, open=True, assume_metadata=True, read=True, context=context).result()
        self.layout = ArrayLayout.of(array)
        self.keys = ChunkKeys.of(array)
        self.metadata: dict[str, Any] = array.spec().to_json()["metadata"]
        self.sharding = Sharding.of(self.metadata, self.layout)
        if self.sharding is None:
            self.layout = self.layout._replace(chunk=self.layout.shard)
        else:
            grid = {"name": "regular", "configuration": {"chunk_shape": list(self.layout.chunk)}}
            spec["metadata"] = {**self.metadata, "chunk_grid": grid, "codecs": self.sharding.codecs}
            array = ts.open(spec, open=True, assume_metadata=True, read=True, context=context).result()
        self.array: ts.TensorStore = array
        self.chunk_bytes: int = math.prod(self.layout.chunk) * self.layout.dtype.itemsize

    @property
    def names(self) -> Callable[[], Awaitable[list[str]]] | None:
        """The lister of all names stored with the array, or None."""
        values = self._values
        if not isinstance(values, OcdbtValues):
            return None
        return lambda: run_in_pool(waiting_pool(), values.names, self._prefix)

    async def read(self, requests: Sequence[Request], leaf: str, decoding: Budget, *, is_near: bool) -> int:
        """Reads boxes, a chunk at a time per thread.

        Args:
          requests: the boxes, and the buffers that get them.
          leaf: for errors.
          decoding: memory for chunks.
          is_near: whether the server answers at once.

        Returns:
          How many absent chunks were read as the fill value.

        Raises:
          CheckpointError: a chunk cannot be fetched.
          Exception: what TensorStore raised.
        """
        left = list(requests_by_chunk(requests, self.layout.chunk))[::-1]
        under_way = RequestGroup()
        absent: list[int] = []

        async def read_chunks() -> None:
            try:
                absent.append(await run_in_pool(waiting_pool(), self._read_chunks, left, ReadContext(leaf, under_way)))
            except BaseException:
                left.clear()
                under_way.cancel()
                raise
            finally:
                decoding.give(self.chunk_bytes)

        async def threads() -> AsyncIterator[Coroutine[Any, Any, None]]:
            for _ in range(min(len(left), _THREADS_WHEN_NEAR if is_near else REQUESTS_AT_ONCE)):
                await decoding.take(self.chunk_bytes)
                yield read_chunks()

        await wait_all(threads())
        return sum(absent)

    def _read_chunks(self, left: list[list[Request]], context: ReadContext) -> int:
        """Takes and reads chunks until all are taken; counts absent chunks."""
        most_pending = _PENDING_BYTES // max(1, self.chunk_bytes)
        absent = 0
        pending: deque[tuple[str, list[ts.WriteFutures]]] = deque()
        try:
            while left:
                try:
                    requests = left.pop()
                except IndexError:  # another thread took the last one
                    break
                key, data = self._fetch(requests[0].box, context)
                absent += data is None
                pending.append((key, self._begin_chunk(key, data, requests)))
                # Those that wait were decoded meanwhile: waiting for one at once would change threads for each.
                if len(pending) > most_pending:
                    self._end_chunk(*pending.popleft())
            while pending:
                self._end_chunk(*pending.popleft())
            return absent
        finally:
            for chunk in pending:
                with contextlib.suppress(Exception):
                    self._end_chunk(*chunk)

    def _fetch(self, box: Box, context: ReadContext) -> tuple[str, bytes | None]:
        """Fetches the chunk of a box; None if it is absent."""
        index = tuple([low // size for (low, _), size in zip(box, self.layout.chunk, strict=True)])
        key, most = self.keys.key(index), most_encoded(self.chunk_bytes)
        if self.sharding is not None:
            return key, self._read_inside(index, self.sharding, most, context)
        return key, self._values.read_range(self._prefix + key, BoundedRange.whole(most), context)

    def _begin_chunk(self, key: str, data: bytes | None, requests: Sequence[Request]) -> list[ts.WriteFutures]:
        """Begins to read boxes of a chunk that was fetched."""
        self.hold(key, data)
        try:
            return [ts.array(out, write=True, copy=False).write(self.array[box_slices(box)]) for box, out in requests]
        except BaseException:
            self.drop(key)
            raise

    def _end_chunk(self, key: str, writes: Sequence[ts.WriteFutures]) -> None:
        try:
            for write in writes:
                write.result()
        finally:
            self.drop(key)

    def hold(self, key: str, data: bytes | None) -> None:
        """Holds a chunk in memory for reads of `array`, until `drop`."""
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

    def _read_inside(self, index: tuple[int, ...], sharding: Sharding, most: int, context: ReadContext) -> bytes | None:
        sides = [shard // chunk for shard, chunk in zip(self.layout.shard, self.layout.chunk, strict=True)]
        shard, number = [], 0
        for at, side in zip(index, sides, strict=True):
            shard.append(at // side)
            number = number * side + at % side
        key = self._prefix + self.keys.key(shard)
        entries = self._indexes.get(key, lambda: self._read_index(key, sharding, context))
        if entries is None:
            return None
        offset, size = entries[number].tolist()
        if offset == size == _ABSENT:
            return None
        if size > most or offset >= 1 << 62:
            message = f"the shard {key} has a chunk of {size} bytes at byte {offset}"
            raise CorruptCheckpointError(message, path=self._values.path, leaf=context.leaf)
        return self._values.read_range(key, BoundedRange.between(offset, offset + size), context) if size else b""

    def _read_index(self, key: str, sharding: Sharding, context: ReadContext) -> np.ndarray | None:
        data = self._values.read_range(key, sharding.index_range, context)
        try:
            return None if data is None else sharding.entries(data)
        except ValueError:
            message = f"the index of the shard {key} is damaged"
            raise CorruptCheckpointError(message, path=self._values.path, leaf=context.leaf) from None
