"""A chunked array whose chunks are fetched by us, with a bound.

Of a sharded array the chunks inside the shards are fetched singly. Threads each take a chunk after the other: a task of
the event loop for each of thousands of small chunks would cost more than fetching it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from orbax_t5x.concurrency import Budget, OnceEach, run_in_pool, wait_all, waiting_pool
from orbax_t5x.errors import CorruptCheckpointError, LimitExceededError
from orbax_t5x.files.interface import Named
from orbax_t5x.files.local import LocalFiles
from orbax_t5x.files.ranges import REQUESTS_AT_ONCE, BoundedRange, ReadContext, RequestGroup
from orbax_t5x.lazy.leaf import Request
from orbax_t5x.readers.array_kind import ArrayKind, Sharding, requests_by_chunk
from orbax_t5x.readers.ocdbt_values import OcdbtValues

_ABSENT = (1 << 64) - 1
# Threads for one array where responses come at once: more would only compete for the interpreter.
_THREADS_WHEN_NEAR = 4
# Small chunks that a thread has decoded while it fetches others, beyond the memory that was taken.
_PENDING_BYTES = 1 << 16


class FetchedArray:
    """A chunked array, fetched chunk by chunk."""

    def __init__(self, kind: ArrayKind, values: Named, name: str):
        self.kind = kind
        self.values = values
        self.name = name
        self._prefix = f"{name}/" if name else ""
        self._indexes: OnceEach[str, np.ndarray | None] | None = None if kind.sharding is None else OnceEach()

    @property
    def names(self) -> Callable[[], Awaitable[list[str]]] | None:
        """The lister of all names stored with the array, or None."""
        values = self.values
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
        left = list(requests_by_chunk(requests, self.kind.fetched))[::-1]
        under_way = RequestGroup()
        absent: list[int] = []

        async def read_chunks() -> None:
            try:
                absent.append(await run_in_pool(waiting_pool(), self.read_chunks, left, ReadContext(leaf, under_way)))
            except BaseException:
                left.clear()
                under_way.cancel()
                raise
            finally:
                decoding.give(self.kind.chunk_bytes)

        async def threads() -> AsyncIterator[Coroutine[Any, Any, None]]:
            for _ in range(min(len(left), _THREADS_WHEN_NEAR if is_near else REQUESTS_AT_ONCE)):
                await decoding.take(self.kind.chunk_bytes)
                yield read_chunks()

        await wait_all(threads())
        return sum(absent)

    def read_chunks(self, left: list[list[Request]], context: ReadContext) -> int:
        """Takes and reads chunks until all are taken; counts absent chunks."""
        decoder = self.kind.decoder
        most_pending = _PENDING_BYTES // max(1, self.kind.chunk_bytes)
        absent = 0
        pending: deque[tuple[str, list[ts.WriteFutures]]] = deque()
        try:
            while left:
                try:
                    requests = left.pop()
                except IndexError:  # another thread took the last one
                    break
                box = requests[0].box
                index = tuple([low // size for (low, _), size in zip(box, self.kind.fetched, strict=True)])
                data = self._fetch(index, context)
                if data is None:
                    fill_value = self.require_fill_value(self.kind.keys.key(index), context.leaf)
                    for _, out in requests:
                        out[...] = fill_value
                    absent += 1
                    continue
                pending.append(decoder.begin(data, requests))
                # Those that wait were decoded meanwhile: waiting for one at once would change threads for each.
                if len(pending) > most_pending:
                    decoder.end(*pending.popleft())
            while pending:
                decoder.end(*pending.popleft())
            return absent
        finally:
            for chunk in pending:
                with contextlib.suppress(Exception):
                    decoder.end(*chunk)

    def read_stored(self, key: str, context: ReadContext) -> bytes | None:
        """Reads a chunk or shard as it is stored, or returns None."""
        wanted = BoundedRange.whole(self.kind.most_encoded)
        try:
            return self.values.read_range(self._prefix + key, wanted, context)
        except LimitExceededError as error:
            if not isinstance(self.values, LocalFiles):
                raise  # a server has sent more than it may, which may be an answer of another kind
            # No codec makes so much of a chunk.
            raise CorruptCheckpointError(error.message, path=error.path, leaf=error.leaf) from None

    def require_fill_value(self, key: str, leaf: str | None) -> np.ndarray:
        """Returns the value of an absent chunk, unless it is damage."""
        if self.kind.fill_value is None:
            message = f"reading it: the chunk {self._prefix}{key} is missing"
            raise CorruptCheckpointError(message, path=self.values.path, leaf=leaf)
        return self.kind.fill_value

    def _fetch(self, index: tuple[int, ...], context: ReadContext) -> bytes | None:
        kind, sharding, indexes = self.kind, self.kind.sharding, self._indexes
        if sharding is None or indexes is None:
            return self.read_stored(kind.keys.key(index), context)
        sides = [shard // chunk for shard, chunk in zip(kind.shard, kind.chunk, strict=True)]
        shard, number = [], 0
        for at, side in zip(index, sides, strict=True):
            shard.append(at // side)
            number = number * side + at % side
        key = self._prefix + kind.keys.key(shard)
        entries = indexes.get(key, lambda: self._read_index(key, sharding, context))
        if entries is None:
            return None
        offset, size = entries[number].tolist()
        if offset == size == _ABSENT:
            return None
        if size > kind.most_encoded or offset >= 1 << 62:
            message = f"the shard {key} has a chunk of {size} bytes at byte {offset}"
            raise CorruptCheckpointError(message, path=self.values.path, leaf=context.leaf)
        return self.values.read_range(key, BoundedRange.between(offset, offset + size), context) if size else b""

    def _read_index(self, key: str, sharding: Sharding, context: ReadContext) -> np.ndarray | None:
        data = self.values.read_range(key, sharding.index_range, context)
        try:
            return None if data is None else sharding.entries(data)
        except ValueError:
            message = f"the index of the shard {key} is damaged"
            raise CorruptCheckpointError(message, path=self.values.path, leaf=context.leaf) from None
