"""Reads of a chunked array on a web server.

Threads each take a chunk after the other.

A task of the event loop for each of thousands of small chunks would cost more than fetching it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

from orbax_t5x.concurrency import Budget, run_in_pool, wait_all, waiting_pool
from orbax_t5x.files.request_settings import REQUESTS_AT_ONCE
from orbax_t5x.files.values import ReadContext, RequestGroup
from orbax_t5x.lazy.leaf import Request
from orbax_t5x.readers.chunk_grid import requests_by_chunk
from orbax_t5x.readers.fetched_array import ChunkRead, FetchedArray

# Threads for one array where responses come at once: more would only compete for the interpreter.
_THREADS_WHEN_NEAR = 4
# Small chunks that a thread has decoded while it fetches others, beyond the memory that was taken.
_PENDING_BYTES = 1 << 16


async def read_fetched(
    array: FetchedArray, requests: Sequence[Request], leaf: str, decoding: Budget, *, is_near: bool
) -> None:
    """Reads boxes of an array, a chunk at a time per thread."""
    chunks = _Chunks(array, requests, leaf)

    async def threads() -> AsyncIterator[Coroutine[Any, Any, None]]:
        for _ in range(min(chunks.count, _THREADS_WHEN_NEAR if is_near else REQUESTS_AT_ONCE)):
            await decoding.take(array.chunk_bytes)
            yield _read_chunks(chunks, decoding, array.chunk_bytes)

    await wait_all(threads())


async def _read_chunks(chunks: _Chunks, decoding: Budget, taken: int) -> None:
    """Reads chunks in a thread, and gives back a chunk's memory."""
    try:
        await run_in_pool(waiting_pool(), chunks.read_all)
    except BaseException:
        chunks.stop()
        raise
    finally:
        decoding.give(taken)


class _Chunks:
    """The chunks of a read that no thread has taken yet."""

    def __init__(self, array: FetchedArray, requests: Sequence[Request], leaf: str):
        self._array = array
        self._left = list(requests_by_chunk(requests, array.layout.chunk))[::-1]
        self._most_pending = _PENDING_BYTES // max(1, array.chunk_bytes)
        self._under_way = RequestGroup()
        self._context = ReadContext(leaf, self._under_way)

    @property
    def count(self) -> int:
        """The number of chunks that are left."""
        return len(self._left)

    def read_all(self) -> None:
        """Takes and reads chunks until all are taken."""
        pending: deque[ChunkRead] = deque()
        try:
            while self._left:
                try:
                    requests = self._left.pop()
                except IndexError:  # another thread took the last one
                    break
                pending.append(self._array.begin_chunk(requests, self._context))
                # Those that wait were decoded meanwhile: waiting for one at once would change threads for each.
                if len(pending) > self._most_pending:
                    pending.popleft().end()
            while pending:
                pending.popleft().end()
        finally:
            for chunk in pending:
                with contextlib.suppress(Exception):
                    chunk.end()

    def stop(self) -> None:
        """Gives up the requests under way; nothing more is taken."""
        self._left.clear()
        self._under_way.cancel()
