"""Executes a plan: reads its boxes directly into the buffers that become the arrays' shards.

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

With several processes and `broadcast`, what more than one of them needs is read by one and sent (`broadcast`), after
what each reads for itself.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import math
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from orbax_t5x.concurrency import Budget, CallerThread, LoopThread, balanced_shares, call_of_user, run_in_pool
from orbax_t5x.errors import CheckpointError
from orbax_t5x.lazy import ChecksummedRange, Leaf, ReadStats, ValueLeaf, full_box, slices_within
from orbax_t5x.lazy.box import box_shape
from orbax_t5x.multihost.collectives import raise_together
from orbax_t5x.multihost.heartbeat import sending_heartbeats
from orbax_t5x.multihost.rendezvous import rendezvous_before_backend
from orbax_t5x.restoring.broadcast.needs import compare_plans, gather_needs, is_text
from orbax_t5x.restoring.broadcast.stores import StoreKind, Stores
from orbax_t5x.restoring.execute.buffers import check_value, explicit_transfers, layout_of, make_value
from orbax_t5x.restoring.execute.groups import Group, group_entries
from orbax_t5x.restoring.execute.reading import BufferedPiece, Reader
from orbax_t5x.restoring.execute.shared_checksums import gather_checksums
from orbax_t5x.restoring.fallback import ComputedLeaf
from orbax_t5x.restoring.options import BroadcastMode, RestoreOptions
from orbax_t5x.restoring.plan_data import PlanData, PlanEntry, RestoreReport
from orbax_t5x.restoring.target_leaf import is_key_dtype
from orbax_t5x.storage.memory import naming_memory_errors
from orbax_t5x.text.progress_bar import OnProgress

if TYPE_CHECKING:
    from orbax_t5x.restoring.broadcast.send import Broadcast

# Workers for blocking reads. More than cores and they wait for one another: on two cores four take 1.4 s and 2.0 s
# of processor time for what two do in 1.0 s and 1.5 s.
_THREADS = max(2, min(8, os.cpu_count() or 1))
# For decoding small chunks; of large ones, so many for each worker.
_DECODING_BYTES = 64 << 20
_CHUNKS_PER_THREAD = 2
# Devices of these compute in the host's memory: an array takes its buffer over, and no transfer is under way.
_HOST_PLATFORMS = frozenset({"cpu"})


def execute_plan(
    plan: PlanData, options: RestoreOptions, on_progress: OnProgress | None = None
) -> tuple[dict[str, Any], RestoreReport]:
    """Runs a plan for `RestorePlan.execute`; returns the values by name, and what was read and checked.

    `options.progress` is ignored: `on_progress` is called when bytes have arrived.
    """
    rendezvous_before_backend()
    with sending_heartbeats():
        return _Execution(plan, options, on_progress).run()


def decoding_bytes(leaves: Iterable[Leaf], limit: int) -> int:
    """Returns the memory in which leaves of chunked formats may decode chunks, within the limit of an execution.

    Enough to keep all cores at work; more would only be filled by reads that run ahead of decoding. Remote leaves get
    all of the limit: what is under way to them hides round trips.
    """
    largest = 0
    for leaf in leaves:
        if leaf.is_remote:
            return limit
        if leaf.chunks is not None:
            largest = max(largest, math.prod(leaf.chunks) * leaf.dtype.itemsize)
    return min(limit, max(_DECODING_BYTES, _CHUNKS_PER_THREAD * _THREADS * largest))


def has_transfers(entries: Iterable[PlanEntry]) -> bool:
    """Reports whether arrays are sent to devices with memory of their own, whatever the default backend is."""
    shardings = {entry.leaf.sharding for entry in entries if entry.leaf is not None and not entry.leaf.is_on_host}
    platforms = {device.platform for sharding in shardings if sharding is not None for device in sharding.device_set}
    if None in shardings:
        untyped: Any = jax.config
        device = untyped.jax_default_device
        platforms.add(jax.default_backend() if device is None else getattr(device, "platform", device))
    return not platforms <= _HOST_PLATFORMS


_Buffers = dict[str, list[np.ndarray]]


class _Execution:
    """Execution of one plan."""

    def __init__(self, plan: PlanData, options: RestoreOptions, on_progress: OnProgress | None):
        self._plan = plan
        self._limit = options.limit
        self._progress = on_progress
        leaves = {leaf for entry in plan.entries for leaf in entry.leaves}
        self._stats = ReadStats(options.verify, decoding_bytes(leaves, options.limit))
        self._values: dict[str, Any] = {}
        self._caller = CallerThread()
        self._done_bytes = 0
        self._pending: collections.Counter[Leaf] = collections.Counter()
        self._verified: dict[Leaf, bool | None] = {}
        self._several = jax.process_count() > 1
        self._mode: BroadcastMode = options.broadcast if self._several else False
        self._stop = threading.Event()
        self._reader = Reader(self._stats, self._stop)
        self._path = ", ".join(checkpoint.path for checkpoint in plan.checkpoints.values()) or None
        self._bytes_received = 0
        self._awaits_transfers = False

    def run(self) -> tuple[dict[str, Any], RestoreReport]:
        started = time.monotonic()
        stores: Stores | None = None
        entries = [entry for entry in self._plan.entries if entry.view is not None]
        self._awaits_transfers = has_transfers(entries)
        if self._several:
            stores = compare_plans(self._plan, self._mode, self._path)
        self._reader.in_memory = self._computed_leaves(entries)
        broadcast: Broadcast | None = None
        if self._mode == "auto" and stores is not None and max(stores) is not StoreKind.LOCAL:
            broadcast, entries = self._broadcast(entries, stores)
        elif self._mode and self._mode != "auto":
            broadcast, entries = self._broadcast(entries, None)
        groups = group_entries(entries, self._limit)
        for group in groups:
            self._pending.update(group.leaves.keys())
        if groups or self._several:
            self._read(groups, broadcast)
        self._reader.in_memory = {}
        self._values.update(self._computed())
        report = self._report(time.monotonic() - started)
        for entry in self._plan.entries:
            if entry.action == "keep":
                self._values[entry.name] = self._plan.target.original.get(entry.name)
        return self._values, report

    # -- reading

    def _broadcast(self, entries: Sequence[PlanEntry], stores: Stores | None) -> tuple[Broadcast, list[PlanEntry]]:
        """Prepares the broadcast of what several processes need; returns also the entries that are read without it.

        With `stores`, only what they make worth sending is sent; strings of a local disk are read by each.
        """
        from orbax_t5x.restoring.broadcast.schedule import schedule_broadcast  # noqa: PLC0415  (several processes only)
        from orbax_t5x.restoring.broadcast.send import Broadcast  # noqa: PLC0415  (as well)

        texts = [entry for entry in entries if is_text(entry) and (stores is None or stores.of(entry.leaves))]
        arrays = [entry for entry in entries if not is_text(entry)]
        local_texts = [entry for entry in entries if is_text(entry) and entry not in texts]
        processes = jax.process_count()
        schedule = schedule_broadcast(gather_needs(arrays, self._path), processes, self._limit, stores)
        if stores is not None:
            self._plan.decisions = schedule.decisions
        broadcast = Broadcast(
            schedule,
            texts,
            self._reader,
            self._place_arrived,
            process=jax.process_index(),
            processes=processes,
            limit=self._limit,
            path=self._path,
        )
        return broadcast, [*local_texts, *schedule.unshared]

    def _read(self, groups: list[Group], broadcast: Broadcast | None) -> None:
        error: BaseException | None = None
        workers = concurrent.futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="orbax_t5x-restore")
        try:
            with LoopThread() as thread, workers as pool:
                try:
                    thread.run(self._read_all(groups, pool), caller=self._caller)
                except BaseException as caught:  # the other processes must receive it first
                    error = caught
                if broadcast is not None and (error is None or isinstance(error, Exception)):
                    try:
                        thread.run(broadcast.run(pool, error), caller=self._caller)
                    except BaseException as caught:
                        error = caught
                    self._bytes_received = broadcast.bytes_received
                self._stop.set()
                lost_peer = broadcast is not None and broadcast.lost_peer
                if self._several and not lost_peer and (error is None or isinstance(error, Exception)):
                    self._verify_together(thread, error)
                if error is not None:
                    raise error
        finally:
            self._stop.set()
            del error  # whose traceback holds this frame, and so the threads

    def _verify_together(self, thread: LoopThread, error: Exception | None) -> None:
        """Exchanges checksums with the other processes and compares; the error of this process comes before theirs."""
        try:
            ranges = gather_checksums(self._stats, self._leaves_in_order(), error=error, path=self._path)
        except CheckpointError:
            if error is None:
                raise
            return
        if self._stats.verify != "full":
            thread.run(self._verify_all(self._leaves_in_order(), ranges, self._stats))
            return
        try:
            thread.run(self._verify_rest(ranges))
        except Exception as caught:
            error = caught
        raise_together(error, self._path)

    async def _verify_rest(self, ranges: Mapping[Leaf, Sequence[ChecksummedRange]]) -> None:
        """Compares checksums of what was read; leaves that this does not cover are read, some by each process."""
        await self._verify_all(self._leaves_in_order(), ranges, ReadStats("touched"))
        rest = [leaf for leaf, verified in self._verified.items() if verified is False]
        work_shares = balanced_shares(rest, _stored_bytes, jax.process_count())
        await self._verify_all(work_shares[jax.process_index()], ranges, self._stats)
        # Unless another process finds damage in its own: `raise_together` then raises that here, too.
        self._verified.update(dict.fromkeys(rest, True))

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
            if self._several:
                await asyncio.gather(*[leaf.check_for_all(self._stats) for leaf in self._leaves_in_order()])
        except BaseException:
            self._stop.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    def _read_blocking(self, group: Group) -> _Buffers | None:
        """Reads and finishes one group in this worker thread; None where another group has failed meanwhile."""
        buffers, stages = _allocate(group)
        return buffers if self._reader.fill(stages, group.entries[0]) else None

    async def _read_awaited(self, group: Group, pool: concurrent.futures.Executor) -> _Buffers:
        """Awaits one group's reads; what computes is done in a worker thread."""
        buffers, stages = _allocate(group)
        await self._reader.fill_awaited(stages, group.entries[0], pool)
        return buffers

    # -- checksums

    async def _verify_group(self, group: Group) -> None:
        """Compares the checksums of leaves after their last read; of several processes all do that at the end."""
        if self._several:
            return
        for leaf in group.leaves:
            self._pending[leaf] -= 1
            if not self._pending[leaf]:
                self._verified[leaf] = await leaf.verify_checksum(self._stats, self._stats.ranges(leaf))

    async def _verify_all(
        self, leaves: Iterable[Leaf], ranges: Mapping[Leaf, Sequence[ChecksummedRange]], stats: ReadStats
    ) -> None:
        for leaf in leaves:
            self._verified[leaf] = await leaf.verify_checksum(stats, ranges.get(leaf, ()))

    def _leaves_in_order(self) -> list[Leaf]:
        """Returns the leaves in plan order, the same on every process; grouping depends on its own boxes."""
        return list(dict.fromkeys(leaf for entry in self._plan.entries for leaf in entry.leaves))

    # -- results

    async def _place_arrived(self, entry: PlanEntry, buffers: list[np.ndarray]) -> None:
        """Makes the value of what a broadcast received; the broadcast goes on where this fails."""
        placed, error = await self._caller.run(self._place_or_error, entry, buffers)
        if error is not None:
            raise error
        if self._awaits_transfers:
            await run_in_pool(None, jax.block_until_ready, placed)

    def _place_or_error(
        self, entry: PlanEntry, buffers: list[np.ndarray]
    ) -> tuple[list[Any], None] | tuple[None, Exception]:
        try:
            return self._place([entry], {entry.name: buffers}), None
        except Exception as error:
            return None, error

    def _place(self, entries: Sequence[PlanEntry], buffers: _Buffers) -> list[Any]:
        """Makes the values of entries, in the caller's thread, and returns them."""
        with explicit_transfers():
            placed = {entry.name: make_value(entry, buffers.pop(entry.name)) for entry in entries}
        for entry in entries:
            check_value(entry, placed[entry.name])
        self._values.update(placed)
        if self._progress is not None:
            total = self._plan.bytes_to_read
            for entry in entries:
                self._done_bytes += entry.bytes_to_read
                call_of_user(self._progress, min(self._done_bytes, total), total, entry.name)
        return list(placed.values())

    def _computed_leaves(self, entries: Sequence[PlanEntry]) -> dict[Leaf, ValueLeaf]:
        """Computes the leaves that a fallback function fills partly, or that are cast here.

        They are arrays of the function's own dtypes, placed like these leaves.
        """
        computed = [leaf for entry in entries for leaf in entry.leaves if isinstance(leaf, ComputedLeaf)]
        if not computed or self._plan.fallback is None:
            return {}
        targets = {entry.name: entry.leaf for entry in entries if entry.leaf is not None}
        computed_targets = {leaf.name: dataclasses.replace(targets[leaf.name], dtype=leaf.dtype) for leaf in computed}
        arrays = {
            name: jax.random.key_data(value) if is_key_dtype(value.dtype) else value
            for name, value in self._plan.fallback(computed_targets).items()
        }
        return {leaf: ValueLeaf(arrays[leaf.name], leaf.name) for leaf in computed}

    def _computed(self) -> dict[str, Any]:
        """Computes the leaves that a fallback function fills completely, in the target's dtypes."""
        entries = [entry for entry in self._plan.entries if entry.action == "fallback" and entry.view is None]
        if not entries or self._plan.fallback is None:
            return {}
        values = self._plan.fallback({entry.name: entry.leaf for entry in entries if entry.leaf is not None})
        for entry in entries:
            check_value(entry, values[entry.name])
        return values

    def _report(self, seconds: float) -> RestoreReport:
        stored = [(leaf, verified) for leaf, verified in self._verified.items() if not leaf.is_value]

        return RestoreReport(
            bytes_read=self._stats.bytes_read,
            gap_bytes=self._stats.gap_bytes,
            index_bytes=sum(checkpoint.index_bytes for checkpoint in self._plan.checkpoints.values()),
            fill_chunks=self._stats.fill_chunks,
            verified=tuple(sorted(leaf.name for leaf, verified in stored if verified)),
            unverified=tuple(sorted(leaf.name for leaf, verified in stored if verified is False)),
            without_checksum=tuple(sorted(leaf.name for leaf, _ in stored if leaf.checksums is None)),
            seconds=seconds,
            bytes_received=self._bytes_received,
            from_fallback=self._plan.filled,
        )


def _stored_bytes(leaf: Leaf) -> int:
    return leaf.bytes_of((full_box(leaf.shape),))


def _allocate(group: Group) -> tuple[_Buffers, list[list[BufferedPiece]]]:
    """Allocates the buffers of each entry's shards; returns them and the pieces to read into them, by stage."""
    buffers: _Buffers = {}
    outs: _Buffers = {}
    for entry in group.entries:
        assert entry.view is not None
        with naming_memory_errors(entry.leaves[0].path, entry.name):
            buffers[entry.name], outs[entry.name] = layout_of(entry).allocate(np.dtype(entry.view.dtype))
    stages: list[list[BufferedPiece]] = []
    for pieces in group.stages:
        stages.append([])
        for piece in pieces:
            out = outs[piece.entry.name][piece.box_index]
            if out.shape != box_shape(piece.box):
                out = out[slices_within(piece.box, layout_of(piece.entry).read_boxes[piece.box_index])]
            stages[-1].append((piece, out))
    return buffers, stages
