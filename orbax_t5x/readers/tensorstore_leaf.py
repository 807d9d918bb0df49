"""Leaves that TensorStore reads: chunked zarr arrays, in files of their own or inside an OCDBT database.

The spec is always ours: driver, path and settings are written here, nothing of it comes from a file, and opening is for
reading only. Each box is written by TensorStore straight into the buffer that wants it, boxes that occur twice are read
once, and all boxes of a call that touch a chunk are under way together, so that it is decoded once. Chunks are decoded
as a whole: large ones wait for their share of the memory that an execution has for that. A chunk that is not there is
damage, never zeros. The arrays have no checksum of their own; where the checkpoint keeps some beside them (`BoxSums`),
the elements that were read are compared with those. What TensorStore raises leaves here as a typed error that names the
leaf.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import re
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from orbax_t5x.concurrency import Budget, reader_pool, run_in_pool, wait_all
from orbax_t5x.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointIOError,
    CorruptCheckpointError,
    LimitExceededError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
    error_at,
)
from orbax_t5x.lazy.box import Box, box_shape, box_size, box_slices, full_box, shift
from orbax_t5x.lazy.leaf import Leaf, Request
from orbax_t5x.lazy.read_stats import ChecksummedRange, ReadStats
from orbax_t5x.readers.box_sums import BoxSums, Mismatch, array_crc, compare, row_boxes, sums_of
from orbax_t5x.readers.chunk_grid import chunk_boxes, count_chunks, pieces_by_chunk
from orbax_t5x.readers.tiling import box_text
from orbax_t5x.storage import places
from orbax_t5x.storage.connection import REQUEST_SETTINGS
from orbax_t5x.storage.limits import Limits
from orbax_t5x.storage.memory import naming_memory_errors, require_memory
from orbax_t5x.storage.remote_errors import is_ignored_range, remote_error
from orbax_t5x.storage.store import Answers, Snapshot

# Reads of one file each; more threads than this do not read faster, and each holds a decoded chunk.
_FILE_IO_CONCURRENCY = 16
# B-tree nodes of an OCDBT database, read once instead of once per leaf.
_OCDBT_CACHE_BYTES = 100_000_000
# What decoding a chunk takes, measured with gzip: the chunk and what is decompressed ahead of it.
_DECODING_COPIES = 1.25
# A shard of zarr v3 begins or ends with two numbers of eight bytes for each of its chunks, which are read whole.
_SHARD_INDEX_BYTES = 16
# Where TensorStore's message goes on with the whole spec and other payloads, which say nothing that the error does not.
_PAYLOADS = re.compile(r" \[(tensorstore_spec|source locations|os_error_code)=.*", re.DOTALL)
# What `verify="full"` reads at a time for checksums alone, where a row of chunks is not larger.
_VERIFY_BYTES = 32 << 20
# Codecs that end what they wrote with a checksum, which TensorStore compares. Of zstd that is an option.
_CHECKING_CODECS = ("gzip", "zlib", "crc32c")
_STATUS = re.compile(r"(?P<status>[A-Z_]+): ")
_OS_ERROR = re.compile(r"os_error_code='(?P<errno>\d+)'")
# What the operating system says where the files are not as they should be; whatever else it says is its own failure.
_DAMAGE_ERRNOS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG})
# Statuses of absl that tell of a store that failed, not of bytes that are wrong.
_IO_STATUSES = frozenset(
    {"PERMISSION_DENIED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED", "UNAUTHENTICATED"}
)


def make_context() -> ts.Context:
    """The settings with which one checkpoint is read: no cache of chunks, a small one of OCDBT nodes, few threads."""
    return ts.Context(
        {
            "file_io_concurrency": {"limit": _FILE_IO_CONCURRENCY},
            "cache_pool": {"total_bytes_limit": 0},
            "cache_pool#ocdbt": {"total_bytes_limit": _OCDBT_CACHE_BYTES},
            **REQUEST_SETTINGS,
        }
    )


def array_spec(
    directory: Mapping[str, Any], name: str, *, ocdbt: bool, zarr3: bool, absent_is_fill: bool = False
) -> dict[str, Any]:
    """Our own spec of one array of a checkpoint.

    Args:
      directory: the spec of the OCDBT database's directory, or of the one that holds the array's; see `Store.kvstore`.
      name: the array's key prefix in the database, or the path of its directory relative to `directory`.
      ocdbt: whether it is a database.
      zarr3: whether the array is zarr v3, or v2.
      absent_is_fill: whether a chunk that is not there stands for the fill value.
    """
    inner = f"{name}/" if name else ""
    if ocdbt:
        kvstore = {**_database(directory), "path": inner}
    else:
        kvstore = _below(directory, inner)
    return {
        "driver": "zarr3" if zarr3 else "zarr",
        "kvstore": kvstore,
        "recheck_cached_metadata": False,
        "recheck_cached_data": False,
        "fill_missing_data_reads": absent_is_fill,
    }


def _below(directory: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The spec of a name below a directory; the root of a bucket has no slash at its front."""
    path = directory["path"]
    slash = "" if not path or path.endswith("/") else "/"
    return {**directory, "path": f"{path}{slash}{name}"}


def _database(directory: Mapping[str, Any]) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": _below(directory, ""), "cache_pool": "cache_pool#ocdbt"}


def check_database(directory: Mapping[str, Any], path: str, context: ts.Context) -> None:
    """Reads the manifest and the root node of an OCDBT database, which every array of it needs.

    Args:
      directory: its spec; see `Store.kvstore`.
      path: the same, for errors.
      context: of the checkpoint.

    Raises:
      CorruptCheckpointError, UnsafeCheckpointError, CheckpointIOError: naming the directory.
    """
    spec = {**_database(directory), "path": ""}
    try:
        ts.KvStore.open(spec, context=context).result().read("/").result()
    except (ValueError, NotImplementedError) as error:
        raise typed_error(error, path=path, leaf=None, doing="opening its OCDBT database") from error


def typed_error(error: BaseException, *, path: str, leaf: str | None, doing: str) -> CheckpointError:
    """What a failure inside TensorStore means for a checkpoint.

    Args:
      error: what TensorStore raised.
      path: the directory that holds the array.
      leaf: the leaf concerned.
      doing: what was being done, for the text.
    """
    text = _PAYLOADS.sub("", str(error))
    match = _STATUS.match(text)
    status = match["status"] if match else ""
    message = f"{doing}: {text[match.end() if match else 0 :]}"
    if places.is_url(path):
        return _typed_remote(error, status, message, path, leaf)
    if not os.path.isdir(path):
        return CheckpointGoneError(f"the directory vanished ({message})", path=path, leaf=leaf)
    if found := _OS_ERROR.search(str(error)):
        number = int(found["errno"])
        if number not in _DAMAGE_ERRNOS:
            return CheckpointIOError(message, path=path, leaf=leaf, errno=number)
    elif status in _IO_STATUSES:
        return CheckpointIOError(message, path=path, leaf=leaf)
    if "Invalid key: " in text or "Invalid file path: " in text:
        return UnsafeCheckpointError(message, path=path, leaf=leaf)
    if isinstance(error, NotImplementedError) or status == "UNIMPLEMENTED":
        return UnsupportedCheckpointError(message, path=path, leaf=leaf)
    return CorruptCheckpointError(message, path=path, leaf=leaf)


def _chunk_shape(grid: ts.ChunkLayout.Grid, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a grid's cells; a dimension without a size of its own is not cut."""
    return tuple(max(1, size or whole) for size, whole in zip(grid.shape or shape, shape, strict=True))


def _typed_remote(error: BaseException, status: str, message: str, path: str, leaf: str | None) -> CheckpointError:
    """As `typed_error`; a chunk or a table that is not there is damage, in every store."""
    if isinstance(error, NotImplementedError) or status == "UNIMPLEMENTED":
        return UnsupportedCheckpointError(message, path=path, leaf=leaf)
    if status in _IO_STATUSES or "HTTP code" in message or is_ignored_range(error):
        doing = message.partition(": ")[0]
        return remote_error(error, doing, path=path, leaf=leaf)
    return CorruptCheckpointError(message, path=path, leaf=leaf)


class OpenFlag:
    """Whether a checkpoint is still open; shared by its leaves, so that closing reaches them all."""

    __slots__ = ("closed",)

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        """Makes every later read a ValueError."""
        self.closed: bool = True

    def check(self, path: str, leaf: str) -> None:
        """Raises ValueError after `close`."""
        if self.closed:
            raise ValueError(f"{path}: leaf {leaf!r}: the checkpoint is closed")


class TensorStoreLeaf(Leaf):
    """One zarr array; implements `lazy.Leaf`.

    Attributes:
      chunks: the unit in which the array is read, or None for a rank-0 array.
      error: that a chunk takes more memory than the limits allow, or None.
      prng_impl: the implementation of a typed PRNG key whose uint32 data this is ("threefry2x32", …), or None.
      sums: the checksums that the checkpoint keeps of the array, why they cannot be used, or None.
    """

    __slots__ = (
        "_array",
        "_chunk_bytes",
        "_files",
        "_open",
        "chunks",
        "dtype",
        "error",
        "name",
        "path",
        "prng_impl",
        "shape",
        "sums",
    )

    def __init__(
        self,
        name: str,
        path: str,
        array: ts.TensorStore,
        flag: OpenFlag,
        *,
        prng_impl: str | None = None,
        sums: BoxSums | CheckpointError | None = None,
        files: Snapshot,
        limits: Limits,
    ):
        """Made by readers.

        Args:
          name: of the leaf.
          path: the directory that holds the array.
          array: opened for reading.
          flag: of the checkpoint.
          prng_impl, sums: see above; checksums of another shape or dtype cannot be used.
          files: those that hold the array, as they were before it was opened.
          limits: on its chunks.
        """
        self.name: str = name
        self.path: str = path
        self.shape: tuple[int, ...] = tuple(array.shape)
        self.dtype: np.dtype = np.dtype(array.dtype.numpy_dtype)
        chunk = _chunk_shape(array.chunk_layout.read_chunk, self.shape)
        self.chunks: tuple[int, ...] | None = chunk or None
        self.error: CheckpointError | None = None
        self._chunk_bytes: int = math.prod(chunk) * self.dtype.itemsize
        try:
            # TensorStore decodes a chunk as a whole, and ends the process where the memory for it cannot be had.
            limits.require_chunk(self._chunk_bytes, f"a chunk of shape {chunk}")
            shard = _chunk_shape(array.chunk_layout.write_chunk, self.shape)
            if shard != chunk:
                chunks_per_shard = math.prod(shard) // math.prod(chunk)
                limits.require_chunk(chunks_per_shard * _SHARD_INDEX_BYTES, f"the index of a shard of shape {shard}")
        except LimitExceededError as error:
            self.error = LimitExceededError(error.message, path=path, leaf=name)
        self.prng_impl: str | None = prng_impl
        self.sums: BoxSums | CheckpointError | None = self._usable(sums)
        self._array = array
        self._open = flag
        self._files = files

    @property
    def has_checksum(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the checkpoint keeps checksums of the array."""
        return self.sums is not None

    @property
    def chunk_checksum(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The codec of the chunks that has a checksum of its own, or None."""
        spec = self._array.spec().to_json()
        return _checking_codec(spec.get("metadata", {}))

    def _usable(self, sums: BoxSums | CheckpointError | None) -> BoxSums | CheckpointError | None:
        if not isinstance(sums, BoxSums) or (sums.shape, sums.dtype) == (self.shape, self.dtype.name):
            return sums
        return CorruptCheckpointError(
            f"its checksums are of another array: {sums.dtype}{list(sums.shape)}, and this one is "
            f"{self.dtype.name}{list(self.shape)}",
            path=self.path,
            leaf=self.name,
        )

    async def read_into(self, requests: Sequence[Request], stats: ReadStats) -> None:
        """Fills the buffers; see `Leaf`."""
        self._open.check(self.path, self.name)
        self.raise_error()
        if self._files.was_checked(stats):
            await self._read(requests, stats)
            return
        check = run_in_pool(reader_pool(), self._files.check_unchanged, stats, leaf=self.name)
        if self._files.answers is None:
            await check
            await self._read(requests, stats)
            return
        # A look at a remote file is a round trip of its own, beside those of the reads. That it changed is why a read
        # failed, where both do.
        looking = asyncio.ensure_future(check)
        try:
            await self._read(requests, stats)
        except asyncio.CancelledError:
            looking.cancel()
            raise
        except Exception:
            await looking
            raise
        await looking

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
                buffer = np.empty(out.shape, out.dtype)
                copies.append((out, buffer))
            first[box] = buffer
        try:
            if first:
                await self._read_boxes(first, stats.decoding)
        except CheckpointError:
            raise
        except Exception as error:
            if self._files.answers is None:
                # What was removed after the look before reading is gone, not damaged: as an execution of its own this
                # looks again.
                again = ReadStats(stats.verify)
                await run_in_pool(reader_pool(), self._files.check_unchanged, again, leaf=self.name)
            raise typed_error(error, path=self.path, leaf=self.name, doing="reading it") from error
        for out, buffer in copies:
            out[...] = buffer
        stats.count(self.bytes_of(tuple(first)))
        if isinstance(self.sums, BoxSums) and stats.verify != "off":
            reads = [Request(box, buffer) for box, buffer in first.items()]
            await run_in_pool(reader_pool(), self._add_sums, reads, self.sums, stats)

    def _add_sums(self, reads: Sequence[Request], sums: BoxSums, stats: ReadStats) -> None:
        for part in sums_of(reads, sums):
            stats.add_range(self, part)

    async def verify_checksum(self, stats: ReadStats, parts: Sequence[ChecksummedRange]) -> bool | None:
        """See `Leaf.verify_checksum`."""
        if self.sums is None or stats.verify == "off":
            return None
        if not isinstance(self.sums, BoxSums):
            raise error_at(self.sums, path=self.sums.path, leaf=self.name)
        sums = self.sums
        found = compare(parts, sums)
        if found.mismatch is not None:
            raise await run_in_pool(reader_pool(), self._damage, sums, found.mismatch)
        if found.uncovered and stats.verify == "full":
            for number in found.uncovered:
                crc = await self._read_crc(sums.boxes[number], stats)
                if crc != sums.crcs[number]:
                    raise await run_in_pool(reader_pool(), self._damage, sums, Mismatch(number, crc))
            return True
        return not found.uncovered

    async def _read_crc(self, box: Box, stats: ReadStats) -> int:
        """Reads a box for its checksum alone, some rows of chunks at a time."""
        crc = 0
        rows = self.chunks[0] if self.chunks else 1
        reading = ReadStats("off")
        reading.decoding = stats.decoding
        for part in row_boxes(box, self.dtype.itemsize, _VERIFY_BYTES, rows):
            out = np.empty(box_shape(part), self.dtype)
            await self.read_into([Request(part, out)], reading)
            crc = await run_in_pool(reader_pool(), array_crc, out, crc)
        stats.count(reading.bytes_read)
        return crc

    def _damage(self, sums: BoxSums, mismatch: Mismatch) -> CheckpointError:
        """What a wrong checksum means: the files changed while they were read, or the data are damaged."""
        try:
            self._files.check_unchanged(ReadStats(), leaf=self.name)
        except CheckpointError as error:
            return error
        box = box_text(sums.boxes[mismatch.number]) if self.shape else "its value"
        stored = sums.crcs[mismatch.number]
        if mismatch.crc is None:
            message = f"{box} gave different values when read twice; the files are changing"
        else:
            message = f"{box} has the crc32c {mismatch.crc:#010x}, stored is {stored:#010x}; the data are damaged"
        return CorruptCheckpointError(message, path=self.path, leaf=self.name)

    async def _read_boxes(self, wanted: Mapping[Box, np.ndarray], decoding: Budget) -> None:
        """Reads all boxes at once where the memory for their chunks allows that, else chunk by chunk."""
        chunks = self.chunks or ()
        with naming_memory_errors(self.path, self.name):
            # Other memory was taken since the leaf was opened.
            require_memory(int(_DECODING_COPIES * self._chunk_bytes), f"decoding a chunk of shape {chunks}")
        at_once = self._chunk_bytes * min(count_chunks(wanted, chunks), _FILE_IO_CONCURRENCY)
        if at_once <= max(decoding.limit, self._chunk_bytes):
            await decoding.take(at_once)
            await self._read_pieces(wanted.items(), decoding, at_once)
            return

        async def by_chunk() -> AsyncIterator[Coroutine[Any, Any, None]]:
            for pieces in pieces_by_chunk(wanted, chunks):
                outs = [(piece, wanted[box][box_slices(shift(piece, box))]) for piece, box in pieces]
                await decoding.take(self._chunk_bytes)
                yield self._read_pieces(outs, decoding, self._chunk_bytes)

        await wait_all(by_chunk())

    async def _read_pieces(self, pieces: Iterable[tuple[Box, np.ndarray]], decoding: Budget, taken: int) -> None:
        """Reads boxes into their buffers together, and gives back what was taken for their chunks."""
        writes: list[ts.WriteFutures] = []
        try:
            for box, buffer in pieces:
                writes += self._begin_writes(box, buffer)
            await self._end_writes(writes)
        except BaseException:
            for write in writes:
                write.copy.cancel()
                write.commit.cancel()
            raise
        finally:
            decoding.give(taken)

    def _begin_writes(self, box: Box, buffer: np.ndarray) -> Iterator[ts.WriteFutures]:
        """Begins to read a box into a buffer: at once, or remotely by pieces of whole chunks, each an answer."""
        if self._files.answers is None:
            source = self._array if box == full_box(self.shape) else self._array[box_slices(box)]
            yield ts.array(buffer, write=True, copy=False).write(source)
            return
        out = ts.array(buffer, write=True, copy=False)
        for piece in chunk_boxes(box, self.chunks or ()):
            yield out[box_slices(shift(piece, box))].write(self._array[box_slices(piece)])

    async def _end_writes(self, writes: Sequence[ts.WriteFutures]) -> None:
        if self._files.answers is not None:
            await self._end_remote_writes(writes, self._files.answers)
            return
        # Waking the loop costs more than a small read: the last one is waited for first, then most others are done.
        for write in reversed(writes):
            if not write.commit.done():
                await write.commit
            write.commit.result()

    async def _end_remote_writes(self, writes: Sequence[ts.WriteFutures], answers: Answers) -> None:
        """Waits while answers come.

        A write that is given up keeps its part of the buffer alive until its request has ended.

        Raises:
          CheckpointIOError: the store was silent for too long.
        """
        begun = time.monotonic()
        waiting = {asyncio.ensure_future(_ended(write)) for write in writes}
        try:
            while waiting:
                left = answers.seconds_left(begun)
                if left <= 0:
                    raise CheckpointIOError(f"reading it: {answers.silence()}", path=self.path, leaf=self.name)
                done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                    answers.note()
        finally:
            for task in waiting:
                task.cancel()

    def __repr__(self) -> str:
        return f"<TensorStoreLeaf {self.name!r}: {self.dtype}{list(self.shape)}>"


async def _ended(write: ts.WriteFutures) -> None:
    await write.commit


def _checking_codec(metadata: Mapping[str, Any]) -> str | None:
    """The codec in the metadata of a zarr array that has a checksum of its own."""
    pending = [*metadata.get("codecs", ()), metadata.get("compressor")]
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
