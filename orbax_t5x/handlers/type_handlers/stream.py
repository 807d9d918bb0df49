"""Streams lazy arrays into a checkpoint, chunk by chunk.

They are never whole in memory.

A view is cut into the chunks of the stored array, and each block is read into a buffer and handed to TensorStore. One
byte budget bounds buffers, scratch and the encoded copies that TensorStore holds until they are on disk: at most
`memory_limit_bytes`, whatever the size of a leaf (a larger block is written by itself). Chunk shapes are pure geometry,
decided in one place; every process writes its work share of the chunks. If the source has checksums, everything read is
compared with them; the checksums of the written blocks are computed in passing.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import tensorstore as ts

from orbax_t5x.concurrency import (
    Block,
    LoopThread,
    await_to_end,
    for_each_block,
    reader_pool,
    run_in_pool,
    waiting_pool,
)
from orbax_t5x.files.limits import check_memory_limit
from orbax_t5x.handlers.type_handlers.checksums import SaveSums
from orbax_t5x.handlers.write_errors import raise_as_checkpoint_error
from orbax_t5x.lazy import Box, Leaf, ReadStats, View
from orbax_t5x.lazy.box import box_size, box_slices
from orbax_t5x.lazy.chunks import ChunkPreferences, block_bytes, chunk_of, grid_boxes
from orbax_t5x.lazy.read import read_block
from orbax_t5x.readers.box_sums import array_crc
from orbax_t5x.restoring.options import memory_limit
from orbax_t5x.text.progress_bar import Progress, check_progress, shown_progress

# Copies of a block in memory, measured on data that does not compress: its buffer, TensorStore's copy of it, the
# encoded bytes, and those again in the write to disk.
COPIES_PER_BLOCK = 4
# OCDBT caches nodes of its tree, which grow with every leaf; Orbax allows 100 MB, most of a small limit.
_NODE_CACHE_FRACTION = 16
_MAX_NODE_CACHE_BYTES = 100_000_000
# Writes at a time; each thread keeps buffers of its own.
_FILE_THREADS = 16


class BlockOutput(Protocol):
    """Stored array that is written box by box."""

    async def write(self, box: Box, data: np.ndarray) -> None:
        """Writes a box.

        A write that has begun goes on to its end. Several boxes may be written at once.
        """


class WriteJob(NamedTuple):
    """Lazy array to write.

    `output` makes the stored array, from the shape of its chunks and TensorStore's context.
    """

    view: View
    name: str
    output: Callable[[tuple[int, ...], ts.Context | None], BlockOutput]
    context: ts.Context | None
    path: str
    chunks: ChunkPreferences = ChunkPreferences()
    key: str = ""


class ChunkWriter:
    """Writer of the lazy arrays of a save.

    It reads `snapshots` of leaves in memory, as they were at its begin. Jobs come from Orbax, which knows where arrays
    go. They are written at once in Orbax's background thread, or, deferred, when `run_deferred` is called: a long write
    that the caller waits for must be stoppable by an interrupt, without leaving writers behind.
    """

    def __init__(
        self,
        memory_limit_bytes: int | None = None,
        progress: Progress | None = None,
        *,
        deferred: bool = False,
        sums: SaveSums | None = None,
        processes: Collection[int] | None = None,
    ):
        """Initializes a writer.

        `deferred` jobs wait for `run_deferred`, and `processes` divide the chunks.
        """
        check_memory_limit(memory_limit_bytes)
        limit = memory_limit(memory_limit_bytes)
        check_progress(progress)
        _check_numbers(processes)
        self.deferred = deferred
        self.snapshots: dict[Leaf, Leaf] = {}
        self._sums = sums
        self._processes = processes
        self._limit = limit
        self._progress: Progress | None = progress
        self._jobs: list[WriteJob] = []

    def check_processes(self) -> None:
        """Refuses unknown processes, for chunks would be missing.

        JAX may not know their number earlier.
        """
        count = jax.process_count()
        unknown = sorted(process for process in self._processes or () if process >= count)
        if unknown:
            raise ValueError(
                f"active_processes has {', '.join(map(str, unknown))}, but the last process is number {count - 1}; "
                "their chunks would not be written"
            )

    def defer(self, jobs: Sequence[WriteJob]) -> None:
        """Keeps jobs for `run_deferred`."""
        self._jobs.extend(jobs)

    def run_deferred(self) -> None:
        """Writes the deferred jobs and waits.

        An interrupt stops the writing, and is raised when it has stopped.
        """
        jobs, self._jobs = self._jobs, []
        if jobs:
            # Orbax has written already. While it writes, all must share its context, and so one view of the database.
            context = own_context(self._limit)
            with LoopThread("orbax_t5x-write") as thread:
                thread.run(self.write([job._replace(context=context) for job in jobs]))

    async def write(self, jobs: Sequence[WriteJob]) -> None:
        """Writes lazy arrays to disk and compares checksums.

        It returns when they are on disk and agree with their source's checksums. When it raises, nothing is being
        written any more.
        """
        stats = ReadStats("touched", self._limit)
        with shown_progress(self._progress, "saving") as on_progress:
            total = sum(job.view.nbytes for job in jobs)
            await for_each_block(self._blocks(jobs, stats), self._limit, total, on_progress)
        for leaf in dict.fromkeys(leaf for job in jobs for leaf in job.view.leaves()):
            await leaf.verify_checksum(stats, stats.ranges(leaf))
        await run_in_pool(waiting_pool(), stats.check_watched)

    def _blocks(self, jobs: Sequence[WriteJob], stats: ReadStats) -> Iterator[Block]:
        """Yields the writing of each block of this process."""
        processes = range(jax.process_count()) if self._processes is None else sorted(self._processes)
        for turn, job in enumerate(jobs):
            view, chunk = job.view, chunk_of(job.view, block_bytes(self._limit, COPIES_PER_BLOCK), job.chunks)
            output = job.output(chunk, job.context)
            for index, box in enumerate(grid_boxes(view.shape, chunk)):
                if processes[(turn + index) % len(processes)] == jax.process_index():
                    work = functools.partial(self._write, job, output, box, stats)
                    yield Block(work, memory_of_block(view, box), box_size(box) * view.dtype.itemsize, job.name)

    async def _write(self, job: WriteJob, output: BlockOutput, box: Box, stats: ReadStats) -> None:
        out = await read_block(job.view.node, box, stats, self.snapshots)
        if self._sums is not None:
            crc = await run_in_pool(reader_pool(), array_crc, out)
            self._sums.add(job.key, job.view.shape, out.dtype.name, box, crc)
        try:
            await output.write(box, out)
        except Exception as error:
            raise_as_checkpoint_error(error, job.path, leaf=job.name)


def memory_of_block(view: View, box: Box) -> int:
    """Returns the bytes of memory that reading and writing a box take."""
    return COPIES_PER_BLOCK * box_size(box) * view.dtype.itemsize + view.scratch_bytes(box)


def _check_numbers(processes: Any) -> None:
    """Checks numbers of processes; None means all."""
    if processes is None:
        return
    numbers = processes if isinstance(processes, Collection) else [processes]
    known = [isinstance(number, int | np.integer) and not isinstance(number, bool) for number in numbers]
    if not isinstance(processes, Collection) or not all(known):
        raise TypeError(f"active_processes are numbers of processes, such as {{0, 1}}, not {processes!r}")
    if not processes:
        raise ValueError("active_processes is empty; pass None for all processes")
    if min(processes) < 0:
        raise ValueError(f"active_processes has {min(processes)}; processes are numbered from 0")


def own_context(limit: int) -> ts.Context:
    """Returns TensorStore's context for writing with `limit` bytes of memory."""
    cache = min(_MAX_NODE_CACHE_BYTES, limit // _NODE_CACHE_FRACTION)
    return ts.Context(
        {"file_io_concurrency": {"limit": _FILE_THREADS}, "cache_pool#ocdbt": {"total_bytes_limit": cache}}
    )


class TensorStoreArray(BlockOutput):
    """TensorStore array for a view, opened with its first block."""

    def __init__(self, spec: dict[str, Any], context: ts.Context | None):
        self._spec = spec
        self._context = context
        self._opening = asyncio.Lock()
        self._store: ts.TensorStore | None = None

    async def write(self, box: Box, data: np.ndarray) -> None:
        async with self._opening:
            if self._store is None:
                opened = ts.open(ts.Spec(self._spec), create=True, open=True, context=self._context)
                self._store = await await_to_end(opened)
        written = self._store[box_slices(box)].write(data, can_reference_source_data_indefinitely=True)
        await await_to_end(written)
