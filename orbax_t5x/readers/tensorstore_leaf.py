"""Leaves that TensorStore reads: chunked zarr arrays.

They are in files of their own or inside an OCDBT database. Each box is written by TensorStore straight into the buffer
that wants it, boxes that occur twice are read once, and all boxes of a call that touch a chunk are under way together,
so that it is decoded once. Chunks are decoded as a whole: large ones wait for their share of the memory that an
execution has for that. A chunk that is absent is damage, or holds the fill value where the format says so, and is
counted (`StoredChunks`). The arrays have no checksum of their own; where the checkpoint keeps some beside them
(`BoxSums`), the elements that were read are compared with those. What TensorStore raises leaves here as a typed error
that names the leaf.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorstore as ts

from orbax_t5x import on_demand
from orbax_t5x.concurrency import Budget, reader_pool, run_in_pool, wait_all, waiting_pool
from orbax_t5x.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LimitExceededError,
)
from orbax_t5x.files.interface import Files, Snapshot
from orbax_t5x.files.memory import empty_array, naming_memory_errors
from orbax_t5x.lazy.box import Box, box_size, box_slices
from orbax_t5x.lazy.leaf import Checksums, Leaf, Request, UnusableChecksums
from orbax_t5x.lazy.read_stats import ChecksummedRange, ReadStats
from orbax_t5x.readers.array_kind import ArrayKind, StoredChunks, count_chunks, requests_by_chunk
from orbax_t5x.readers.tensorstore_specs import FILE_IO_CONCURRENCY, typed_error

if TYPE_CHECKING:
    from orbax_t5x.readers.box_sums import BoxSums

# Of checkpoints with checksums only.
_box_checksums: Callable[..., Checksums] = on_demand.function("orbax_t5x.readers.box_sums", "BoxChecksums")
_sums_of: Callable[..., Iterator[ChecksummedRange]] = on_demand.function("orbax_t5x.readers.box_sums", "sums_of")
# TensorStore decodes a chunk as a whole, and ends the process where the memory for it cannot be had.
_MOST_CHUNK_BYTES = 2 << 30
# Of more, the memory is tried first: the chunk, and what gzip decompresses ahead of it.
_TRIED_BYTES, _DECODING_COPIES = 256 << 20, 1.25
# A shard of zarr v3 begins or ends with two numbers of eight bytes for each of its chunks, which are read whole.
_SHARD_INDEX_BYTES = 16


class TensorStoreLeaf(Leaf):
    """Zarr array, broken if a chunk takes too much memory."""

    __slots__ = (
        "_chunk_bytes",
        "_files",
        "_kind",
        "_open",
        "_opened",
        "_root",
        "_stored",
        "_sums",
        "chunks",
        "dtype",
        "error",
        "is_remote",
        "name",
        "path",
        "prng_impl",
        "shape",
    )

    def __init__(
        self,
        name: str,
        path: str,
        kind: ArrayKind,
        open: Callable[[], ts.TensorStore],
        *,
        root: Files,
        prng_impl: str | None = None,
        sums: BoxSums | CheckpointError | None = None,
        files: Snapshot,
        can_list: bool = True,
    ):
        """Makes a leaf; `open` opens the array at its first read, and may block."""
        self.name: str = name
        self.path: str = path
        chunk, shard = kind.chunk, kind.shard
        self.shape: tuple[int, ...] = kind.shape
        self.dtype: np.dtype = kind.dtype
        self.chunks: tuple[int, ...] | None = chunk or None
        self.error: CheckpointError | None = None
        self._chunk_bytes: int = math.prod(chunk) * self.dtype.itemsize
        index_bytes = 0 if shard == chunk else math.prod(shard) // math.prod(chunk) * _SHARD_INDEX_BYTES
        if max(self._chunk_bytes, index_bytes) > _MOST_CHUNK_BYTES:
            message = f"a chunk of shape {chunk} in a shard of {shard} takes more than {_MOST_CHUNK_BYTES} bytes"
            self.error = LimitExceededError(message, path=path, leaf=name)
        self.prng_impl: str | None = prng_impl
        self._sums: BoxSums | CheckpointError | None = None if sums is None else self._usable(sums)
        self._kind = kind
        self._open = open
        self._opened: ts.TensorStore | None = None
        self._root = root
        self._files = files
        self._stored: StoredChunks | None = None
        if kind.fill_value is not None and can_list:
            grid = tuple([-(-size // cell) for size, cell in zip(self.shape, shard, strict=True)])
            self._stored = StoredChunks(shard, grid)
        self.is_remote: bool = root.is_remote

    @property
    def checksums(self) -> Checksums | None:
        if isinstance(self._sums, CheckpointError):
            return UnusableChecksums(self.name, self._sums)
        return None if self._sums is None else _box_checksums(self, self._sums, self._files)

    @property
    def chunk_checksum(self) -> str | None:
        return self._kind.checking_codec

    def opened(self) -> ts.TensorStore:
        """Returns the array, opened at the first call; may block."""
        if self._opened is None:
            try:
                self._opened = self._open()
            except CheckpointNotFoundError as error:
                message = "vanished after the checkpoint was opened"
                raise CheckpointGoneError(message, path=error.path, leaf=self.name) from None
        return self._opened

    def _usable(self, sums: BoxSums | CheckpointError) -> BoxSums | CheckpointError:
        if isinstance(sums, CheckpointError) or (sums.shape, sums.dtype) == (self.shape, self.dtype.name):
            return sums
        return CorruptCheckpointError(
            f"its checksums are of another array: {sums.dtype}{list(sums.shape)}, and this one is "
            f"{self.dtype.name}{list(self.shape)}",
            path=self.path,
            leaf=self.name,
        )

    async def read_into(self, requests: Sequence[Request], stats: ReadStats) -> None:
        self._root.require_open()
        self.raise_error()
        if self.is_remote:
            stats.watch(self._files)
        elif not self._files.was_checked(stats):
            await run_in_pool(reader_pool(), self._files.check_once, stats, leaf=self.name)
        await self._read(requests, stats)

    async def _read(self, requests: Sequence[Request], stats: ReadStats) -> None:
        copies: list[tuple[np.ndarray, np.ndarray]] = []
        first: dict[Box, np.ndarray] = {}
        for box, out in requests:
            if box in first:
                copies.append((out, first[box]))
                continue
            if not box_size(box):
                continue
            buffer = out
            if not out.flags.aligned:
                buffer = empty_array(out.shape, out.dtype)
                copies.append((out, buffer))
            first[box] = buffer
        try:
            requests = [Request(box, buffer) for box, buffer in first.items()]
            left = requests if self._stored is None else await self._fill(requests, self._stored, stats)
            if left:
                await self._read_requests(left, stats)
        except CheckpointError:
            raise
        except Exception as error:
            # What was removed after the opening is gone, not damaged: so this looks again.
            await run_in_pool(waiting_pool(), self._files.check_unchanged, leaf=self.name)
            raise self._typed(error) from error
        for out, buffer in copies:
            out[...] = buffer
        stats.count(self.bytes_of(tuple(first)))
        if self._sums is not None and stats.verify != "off":
            await run_in_pool(reader_pool(), self._add_sums, requests, stats)

    def _typed(self, error: Exception) -> CheckpointError:
        return typed_error(error, path=self.path, leaf=self.name, doing="reading it", is_remote=self.is_remote)

    def _add_sums(self, reads: Sequence[Request], stats: ReadStats) -> None:
        if self._sums is not None and not isinstance(self._sums, CheckpointError) and stats.verify != "off":
            for one in _sums_of([read for read in reads if read.out.size], self._sums):
                stats.add_range(self, one)

    async def _fill(self, requests: Sequence[Request], chunks: StoredChunks, stats: ReadStats) -> Sequence[Request]:
        """Fills boxes of mostly absent chunks; returns the rest."""
        array = await self._opened_in_pool()
        await chunks.find(self._kind.keys, lambda: _names_of(array))
        assert self._kind.fill_value is not None
        left, absent = await run_in_pool(reader_pool(), chunks.fill, requests, self._kind.fill_value)
        stats.count(0, fill_chunks=absent)
        return left

    async def _opened_in_pool(self) -> ts.TensorStore:
        if self._opened is None and self.is_remote:  # the first of a checkpoint asks where its server has moved it
            return await run_in_pool(waiting_pool(), self.opened)
        return self.opened()

    async def _read_requests(self, requests: Sequence[Request], stats: ReadStats) -> None:
        """Reads all boxes at once if memory allows, else by chunk."""
        chunks, decoding = self.chunks or (), stats.decoding
        if self._chunk_bytes > _TRIED_BYTES:
            with naming_memory_errors(self.path, self.name):
                np.empty(int(_DECODING_COPIES * self._chunk_bytes), np.uint8)
        array = await self._opened_in_pool()
        count = 1 if chunks == self.shape else count_chunks([box for box, _ in requests], chunks)
        at_once = self._chunk_bytes * min(count, FILE_IO_CONCURRENCY)
        if at_once <= max(decoding.limit, self._chunk_bytes):
            await decoding.take(at_once)
            await self._read_together(array, requests, decoding, at_once)
            return

        async def by_chunk() -> AsyncIterator[Coroutine[Any, Any, None]]:
            for some in requests_by_chunk(requests, chunks):
                await decoding.take(self._chunk_bytes)
                yield self._read_together(array, some, decoding, self._chunk_bytes)

        await wait_all(by_chunk())

    async def _read_together(
        self, array: ts.TensorStore, requests: Sequence[Request], decoding: Budget, taken: int
    ) -> None:
        """Reads boxes together, then gives back their chunks' memory."""
        writes: list[ts.WriteFutures] = []
        try:
            for box, buffer in requests:
                out = ts.array(buffer, write=True, copy=False)
                writes.append(out.write(array if buffer.shape == self.shape else array[box_slices(box)]))
            # Waking the loop costs more than a small read: other leaves begin theirs first, and the last read is waited
            # for first; then most are done.
            if not all([write.commit.done() for write in writes]):
                await asyncio.sleep(0)
            for write in reversed(writes):
                if not write.commit.done():
                    await write.commit
                write.commit.result()
        except BaseException:
            for write in writes:
                write.copy.cancel()
                write.commit.cancel()
            raise
        finally:
            decoding.give(taken)

    def __repr__(self) -> str:
        return f"<TensorStoreLeaf {self.name!r}: {self.dtype}{list(self.shape)}>"


async def _names_of(array: ts.TensorStore) -> list[str]:
    assert array.kvstore is not None
    return [name.decode("utf-8", "replace") for name in await array.kvstore.list()]
