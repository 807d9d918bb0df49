"""Executes a plan: reads boxes into the arrays' shards.

An event loop in a thread of its own takes groups of leaves in plan order. Each group waits for its bytes of one budget
(first in, first out; a group larger than the budget waits for all others), allocates 64-byte aligned buffers (which
`jax` takes over without a copy on CPU), has its leaves read into them, and runs what views have left to do (casts,
averages, reshapes). Its arrays are made, and `progress` is called, in the thread of the caller, by whose JAX settings
arrays are made. Leaves that are read by blocking calls are read in worker threads, a group per hop; leaves of
asynchronous formats and of remote stores are awaited, many at a time. Leaves that share stored bytes are in one group,
so that each box is read once.

Host memory is bounded by the results that stay on the host plus the budget in flight. On accelerators a group's bytes
are given back when its arrays have arrived there. The memory in which leaves of chunked formats decode chunks has a
budget of its own, of the same size at most (`decoding_bytes`).

What several processes do beside it is in `joint_executor`, which they alone load.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from orbax_t5x import on_demand
from orbax_t5x.concurrency import Budget, CallerThread, LoopThread, call_of_user, run_in_pool
from orbax_t5x.errors import LimitExceededError
from orbax_t5x.files.memory import naming_memory_errors
from orbax_t5x.files.windows import WINDOW_BYTES
from orbax_t5x.lazy import Leaf, ReadStats, Request, ValueLeaf, slices_within
from orbax_t5x.lazy.box import box_shape
from orbax_t5x.lazy.read import LeafReads
from orbax_t5x.restoring.execute.buffers import check_value, layouts_of, make_values
from orbax_t5x.restoring.execute.groups import Group, group_entries
from orbax_t5x.restoring.execute.reading import BufferedPiece, Reader
from orbax_t5x.restoring.fallback import ComputedLeaf
from orbax_t5x.restoring.options import RestoreOptions
from orbax_t5x.restoring.plan import Compute, PlanEntry, RestorePlan, RestoreReport
from orbax_t5x.restoring.target_leaf import is_key_dtype
from orbax_t5x.text.progress_bar import OnProgress

_execute_jointly = on_demand.function("orbax_t5x.restoring.joint_executor", "execute_jointly")

# Workers for blocking reads. More than cores and they wait for one another: on two cores four take 1.4 s and 2.0 s
# of processor time for what two do in 1.0 s and 1.5 s.
_THREADS = max(2, min(8, os.cpu_count() or 1))
# For decoding small chunks; of large ones, so many for each worker.
_DECODING_BYTES = 64 << 20
_CHUNKS_PER_THREAD = 2
# Devices of these compute in the host's memory: an array takes its buffer over, and no transfer is under way.
_HOST_PLATFORMS = frozenset({"cpu"})


def execute_plan(
    plan: RestorePlan, options: RestoreOptions, on_progress: OnProgress | None = None
) -> tuple[dict[str, Any], RestoreReport]:
    """Runs a plan for `RestorePlan.execute`."""
    # The processes of a job meet before JAX makes its backend, as `process_count` does.
    if jax.distributed.is_initialized() or jax.process_count() > 1:
        return _execute_jointly(plan, options, on_progress)
    return Execution(plan, options, on_progress).run()


def decoding_bytes(leaves: Iterable[Leaf], limit: int) -> int:
    """Returns the memory for decoding chunks.

    Enough to keep all cores at work; more would only be filled by reads that run ahead of decoding. Remote leaves get
    all of the limit: what is under way to them hides round trips.
    """
    largest = 0
    for leaf in leaves:
        if leaf.is_remote:
            return limit
        if leaf.chunks is not None:
            largest = max(largest, leaf.working_bytes)
    return min(limit, max(_DECODING_BYTES, _CHUNKS_PER_THREAD * _THREADS * largest))


def peak_bytes(plan: RestorePlan) -> int:
    """Bounds the host memory of an execution beside its result."""
    entries = [entry for entry in plan.entries if entry.view is not None]
    leaves = {leaf for entry in entries for leaf in entry.leaves}
    limit = RestoreOptions().limit
    groups = group_entries(entries, limit)
    sends = has_transfers(entries)
    held = [group.size if sends else group.scratch for group in groups]
    decoded = [leaf.working_bytes for leaf in leaves]
    # A chunk is in memory as stored and decoded; a thread has windows of what it reads and places.
    decoding = 2 * max(min(sum(decoded), decoding_bytes(leaves, limit)), max(decoded, default=0))
    return max(min(limit, sum(held)), max(held, default=0)) + decoding + 4 * _THREADS * WINDOW_BYTES


def has_transfers(entries: Iterable[PlanEntry]) -> bool:
    """Tests if arrays are sent to devices with their own memory."""
    leaves = {id(entry.leaf): entry.leaf for entry in entries}.values()
    shardings = {leaf.sharding for leaf in leaves if leaf is not None and not leaf.is_on_host}
    platforms = {device.platform for sharding in shardings if sharding is not None for device in sharding.device_set}
    if None in shardings:
        untyped: Any = jax.config
        device = untyped.jax_default_device
        platforms.add(jax.default_backend() if device is None else getattr(device, "platform", device))
    return not platforms <= _HOST_PLATFORMS


_Buffers = dict[str, list[np.ndarray]]


class Execution:
    """Execution of a plan by the only process."""

    _is_joint = False

    def __init__(self, plan: RestorePlan, options: RestoreOptions, on_progress: OnProgress | None):
        self._plan = plan
        self._limit = options.limit
        self._progress = on_progress
        leaves = {leaf for entry in plan.entries for leaf in entry.leaves}
        self._stats = ReadStats(options.verify, decoding_bytes(leaves, self._limit))
        self._values: dict[str, Any] = {}
        self._caller = CallerThread()
        self._done_bytes = 0
        self._pending: collections.Counter[Leaf] = collections.Counter()
        self._verified: dict[Leaf, bool | None] = {}
        self._stop = threading.Event()
        self._reader = Reader(self._stats, self._stop)
        self._bytes_received: int = 0
        self._awaits_transfers = False

    def run(self) -> tuple[dict[str, Any], RestoreReport]:
        """Reads the plan; returns the values by name and the report."""
        started = time.monotonic()
        entries = [entry for entry in self._plan.entries if entry.view is not None]
        self._awaits_transfers = has_transfers(entries)
        own = self._own_entries(entries)
        if self._plan.fallback is not None:
            self._reader.in_memory = self._computed_leaves(entries, self._plan.fallback)
        groups = group_entries(own, self._limit)
        for group in groups:
            self._pending.update(group.leaves)
        if groups or self._is_joint:
            self._read(groups)
        self._reader.in_memory = {}
        if self._plan.fallback is not None:
            self._values.update(self._computed(self._plan.fallback))
        report = self._report(time.monotonic() - started)
        for entry in self._plan.entries:
            if entry.action == "keep":
                self._values[entry.name] = self._plan.target.original.get(entry.name)
        return self._values, report

    # -- reading

    def _own_entries(self, entries: list[PlanEntry]) -> list[PlanEntry]:
        """Returns the entries that this process reads for itself: all."""
        return entries

    def _read(self, groups: list[Group]) -> None:
        workers = concurrent.futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="orbax_t5x-restore")
        try:
            with LoopThread() as thread, workers as pool:
                try:
                    self._read_in(thread, groups, pool)
                finally:
                    self._stop.set()
        finally:
            self._stop.set()  # also where an interrupt came before the inner one

    def _read_in(self, thread: LoopThread, groups: list[Group], pool: concurrent.futures.Executor) -> None:
        """Reads groups in an event loop, and verifies the bytes."""
        thread.run(self._read_all(groups, pool), caller=self._caller)

    async def _read_all(self, groups: list[Group], pool: concurrent.futures.Executor) -> None:
        budget = Budget(self._limit)
        tasks: set[asyncio.Task[None]] = set()

        async def one(group: Group) -> None:
            try:
                if group.blocking:
                    buffers = await run_in_pool(pool, self._read_blocking, group)
                else:
                    buffers = await self._read_awaited(group, pool)
                if buffers is None:
                    return
                placed = await self._caller.run(self._place, group.entries, buffers)
                if self._awaits_transfers:
                    # Transfers run on: only when they have arrived may other groups take these bytes of the host's
                    # memory.
                    await run_in_pool(pool, jax.block_until_ready, placed)
                await self._verify_group(group)
            finally:
                budget.give(group.size)

        try:
            for group in groups:
                await budget.take(group.size)
                for task in [task for task in tasks if task.done()]:
                    tasks.discard(task)
                    task.result()
                tasks.add(asyncio.create_task(one(group)))
            while tasks:
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    task.result()
        except BaseException:
            self._stop.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    def _read_blocking(self, group: Group) -> _Buffers | None:
        """Reads and finishes a group in this thread, or returns None."""
        buffers, bare, stages = _allocate(group)
        return buffers if self._reader.fill(stages, group.entries[0], bare) else None

    async def _read_awaited(self, group: Group, pool: concurrent.futures.Executor) -> _Buffers:
        """Awaits a group's reads, and computes in a worker thread."""
        buffers, bare, stages = _allocate(group)
        await self._reader.fill_awaited(stages, group.entries[0], pool, bare)
        return buffers

    async def _verify_group(self, group: Group) -> None:
        """Compares the checksums of leaves after their last read."""
        for leaf in group.leaves:
            self._pending[leaf] -= 1
            if not self._pending[leaf]:
                has_sums = self._stats.verify != "off" and leaf.checksums is not None
                ranges = self._stats.ranges(leaf) if has_sums else ()
                self._verified[leaf] = await leaf.verify_checksum(self._stats, ranges) if has_sums else None

    # -- results

    def _place(self, entries: Sequence[PlanEntry], buffers: _Buffers) -> list[Any]:
        """Makes the values of entries, in the caller's thread, and returns them."""
        placed = make_values(entries, buffers)
        self._values.update(placed)
        if self._progress is not None:
            total = self._plan.bytes_to_read
            for entry in entries:
                self._done_bytes += entry.bytes_to_read
                call_of_user(self._progress, min(self._done_bytes, total), total, entry.name)
        return list(placed.values())

    def _computed_leaves(self, entries: Sequence[PlanEntry], compute: Compute) -> dict[Leaf, ValueLeaf]:
        """Computes the leaves that need computing after reading."""
        computed = [leaf for entry in entries for leaf in entry.leaves if isinstance(leaf, ComputedLeaf)]
        if not computed:
            return {}
        targets = {entry.name: entry.leaf for entry in entries if entry.leaf is not None}
        computed_targets = {leaf.name: dataclasses.replace(targets[leaf.name], dtype=leaf.dtype) for leaf in computed}
        arrays = {
            name: jax.random.key_data(value) if is_key_dtype(value.dtype) else value
            for name, value in compute(computed_targets).items()
        }
        return {leaf: ValueLeaf(arrays[leaf.name], leaf.name) for leaf in computed}

    def _computed(self, compute: Compute) -> dict[str, Any]:
        """Computes the leaves that a fallback function fills."""
        entries = [entry for entry in self._plan.entries if entry.action == "fallback" and entry.view is None]
        if not entries:
            return {}
        values = compute({entry.name: entry.leaf for entry in entries if entry.leaf is not None})
        for entry in entries:
            check_value(entry, values[entry.name])
        return values

    def _report(self, seconds: float) -> RestoreReport:
        stored = [(leaf, verified) for leaf, verified in self._verified.items() if not leaf.is_value]
        bare = [leaf for leaf, verified in stored if verified is None]
        if self._stats.verify == "off":
            bare = [leaf for leaf in bare if leaf.checksums is None]
        return RestoreReport(
            bytes_read=self._stats.bytes_read,
            gap_bytes=self._stats.gap_bytes,
            index_bytes=sum([checkpoint.index_bytes for checkpoint in self._plan.checkpoints.values()]),
            fill_chunks=self._stats.fill_chunks,
            verified=tuple(sorted([leaf.name for leaf, verified in stored if verified])),
            unverified=tuple(sorted([leaf.name for leaf, verified in stored if verified is False])),
            without_checksum=tuple(sorted([leaf.name for leaf in bare])),
            seconds=seconds,
            bytes_received=self._bytes_received,
            from_fallback=self._plan.filled,
        )


def _allocate(group: Group) -> tuple[_Buffers, list[LeafReads], list[list[BufferedPiece]]]:
    """Allocates the buffers of each entry's shards."""
    buffers: _Buffers = {}
    outs: _Buffers = {}
    layouts = dict(zip(group.entries, layouts_of(group.entries), strict=True))
    entry = group.entries[0]
    try:
        for entry, layout in layouts.items():
            assert entry.view is not None
            buffers[entry.name], outs[entry.name] = layout.allocate(entry.view.node.dtype)
    except (LimitExceededError, MemoryError) as error:
        with naming_memory_errors(entry.leaves[0].path, entry.name):
            raise error
    bare = [(entry.leaves[0], list(map(Request, layouts[entry].read_boxes, outs[entry.name]))) for entry in group.bare]
    stages: list[list[BufferedPiece]] = []
    for pieces in group.stages:
        stages.append([])
        for piece in pieces:
            out = outs[piece.entry.name][piece.box_index]
            if out.shape != box_shape(piece.box):
                out = out[slices_within(piece.box, layouts[piece.entry].read_boxes[piece.box_index])]
            stages[-1].append((piece, out))
    return buffers, bare, stages
