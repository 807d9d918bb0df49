"""Executes a plan: reads boxes into the arrays' shards.

The caller's thread begins groups of leaves in plan order. Each group waits for its bytes of one budget (a group larger
than the budget waits for all others), allocates 64-byte aligned buffers (which `jax` takes over without a copy on CPU),
has its leaves read into them, and runs what views have left to do (casts, averages, reshapes). Leaves that are read by
blocking calls are read in worker threads. An event loop awaits leaves of asynchronous formats and of remote stores,
many at a time; it is made only for them and for checksums. The caller's thread makes the arrays, by its JAX settings,
and calls `progress`. Leaves that share stored bytes are in one group, so that each box is read once.

Host memory is bounded by the results that stay on the host plus the budget in flight. On accelerators a group's bytes
are given back when its arrays have arrived there, and its buffer is used again (`StagingBuffers`). The memory in which
leaves of chunked formats decode chunks has a budget of its own, of the same size at most (`decoding_bytes`).

Several processes compare their plans before they read. Leaves that they send each other (`execute.spread`) come last,
in batches within the budget. Before each batch is sent, and at the end, they tell each other that none has failed.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from orbax_t5x.concurrency import (
    LoopThread,
    as_carried,
    balanced_shares,
    call_of_user,
    first_failure,
    run_in_pool,
    wait_all,
)
from orbax_t5x.errors import LimitExceededError
from orbax_t5x.files.memory import naming_memory_errors
from orbax_t5x.files.windows import WINDOW_BYTES
from orbax_t5x.lazy import Box, Leaf, ReadStats, Request, ValueLeaf, slices_within
from orbax_t5x.lazy.box import box_shape, full_box
from orbax_t5x.lazy.read import LeafReads, read_all, read_all_blocking
from orbax_t5x.lazy.value import ComputedLeaf
from orbax_t5x.restoring.execute.buffers import StagingBuffers, check_value, layouts_of, make_values, sent_leaves
from orbax_t5x.restoring.execute.groups import Group, Piece, group_entries
from orbax_t5x.restoring.execute.spread import (
    SpreadEntry,
    batches_of,
    load_values,
    plan_digest,
    send_values,
    spans_processes,
    spread_entry,
    spreads_of,
)
from orbax_t5x.restoring.options import BroadcastMode, RestoreOptions
from orbax_t5x.restoring.plan import Compute, PlanEntry, RestorePlan, RestoreReport
from orbax_t5x.restoring.processes import STALL_AGAIN_SECS, STALL_SECS, ProcessGroup
from orbax_t5x.restoring.targets import is_key_dtype
from orbax_t5x.text.progress_bar import OnProgress

_logger = logging.getLogger(__name__)

# Workers for blocking reads. More than cores and they wait for one another: on two cores four take 1.4 s and 2.0 s
# of processor time for what two do in 1.0 s and 1.5 s.
_THREADS = max(2, min(8, os.cpu_count() or 1))
# For decoding small chunks; of large ones, so many for each worker.
_DECODING_BYTES = 64 << 20
_CHUNKS_PER_THREAD = 2
# How late the end of the event loop's thread may be noticed.
_POLL_SECS = 0.2

BufferedPiece = tuple[Piece, np.ndarray]
"""A piece, and the buffer that it is read into."""

_Action = Callable[[], None]
BufferedStages = Sequence[Sequence[BufferedPiece]]


class GroupBuffers(NamedTuple):
    """Buffers of a group, and the reads that fill them.

    Attributes:
      buffers: of the shards of each entry, by its name.
      bare: the reads of bare leaves.
      stages: the pieces to read.
      staging: the memory of those that are staged; empty without any.
    """

    buffers: dict[str, list[np.ndarray]]
    bare: list[LeafReads]
    stages: list[list[BufferedPiece]]
    staging: np.ndarray


def allocate(group: Group, staging: StagingBuffers | None) -> GroupBuffers:
    """Allocates the buffers of a group's shards."""
    buffers: dict[str, list[np.ndarray]] = {}
    outs: dict[str, list[np.ndarray]] = {}
    layouts = dict(zip(group.entries, layouts_of(group.entries), strict=True))
    entry = group.entries[0]
    try:
        staged = {
            entry: layout.allocated_bytes for entry, layout in layouts.items() if staging and staging.holds(entry)
        }
        memory = left = staging.take(sum(staged.values())) if staging and staged else np.empty(0, np.uint8)
        for entry, layout in layouts.items():
            assert entry.view is not None
            own, left = (left[: staged[entry]], left[staged[entry] :]) if entry in staged else (None, left)
            buffers[entry.name], outs[entry.name] = layout.allocate(entry.view.node.dtype, own)
    except (LimitExceededError, MemoryError) as error:
        with naming_memory_errors(entry.leaves[0].path, entry.name):
            raise error
    # A process without shards of an array does not look at its file.
    with_shards = [entry for entry in group.bare if layouts[entry].read_boxes]
    bare = [(entry.leaves[0], list(map(Request, layouts[entry].read_boxes, outs[entry.name]))) for entry in with_shards]
    stages: list[list[BufferedPiece]] = []
    for pieces in group.stages:
        stages.append([])
        for piece in pieces:
            out = outs[piece.entry.name][piece.box_index]
            if out.shape != box_shape(piece.box):
                out = out[slices_within(piece.box, layouts[piece.entry].read_boxes[piece.box_index])]
            stages[-1].append((piece, out))
    return GroupBuffers(buffers, bare, stages, memory)


class Reader:
    """Reader of pieces, stage by stage.

    `in_memory` replaces leaves that have no values before an execution.
    """

    def __init__(self, stats: ReadStats, stop: threading.Event):
        """Takes the read stats, and an event that stops reading."""
        self._stats = stats
        self._stop = stop
        self.in_memory: Mapping[Leaf, ValueLeaf] = {}

    def fill(self, stages: BufferedStages, entry: PlanEntry, bare: Sequence[LeafReads] = ()) -> bool:
        """Fills from leaves that block; returns False if stopped."""
        for pieces in stages:
            reads, finish = self._lower(bare, pieces, entry)
            if not read_all_blocking(reads, self._stats, self._stop.is_set):
                return False
            if finish:
                _finish(finish, entry)
            bare = ()
        return True

    async def fill_awaited(
        self,
        stages: BufferedStages,
        entry: PlanEntry,
        pool: concurrent.futures.Executor,
        bare: Sequence[LeafReads] = (),
    ) -> None:
        """Fills from any leaves; computes in a worker thread."""
        for pieces in stages:
            reads, finish = self._lower(bare, pieces, entry)
            await read_all(reads, self._stats)
            if finish:
                await run_in_pool(pool, _finish, finish, entry)
            bare = ()

    def _lower(
        self, bare: Sequence[LeafReads], pieces: Sequence[BufferedPiece], entry: PlanEntry
    ) -> tuple[list[LeafReads], list[_Action]]:
        """Returns the requests by leaf, and the actions after them."""
        reads: dict[Leaf, dict[Box, Request]] = {}
        copies: list[_Action] = []
        finish: list[_Action] = []
        with naming_memory_errors(entry.leaves[0].path, entry.name):
            for piece, out in pieces:
                lowered = piece.view.lower(piece.box, out)
                finish.extend(lowered.finish)
                for leaf, request in lowered.reads:
                    first = reads.setdefault(leaf, {}).setdefault(request.box, request)
                    if first is not request:
                        copies.append(functools.partial(np.copyto, request.out, first.out))
        found = [*bare, *[(leaf, list(requests.values())) for leaf, requests in reads.items()]]
        if self.in_memory:
            found = [(self.in_memory.get(leaf, leaf), requests) for leaf, requests in found]
        return found, [*copies, *finish]


def _finish(actions: Sequence[_Action], entry: PlanEntry) -> None:
    with naming_memory_errors(entry.leaves[0].path, entry.name):
        for action in actions:
            action()


def execute_plan(
    plan: RestorePlan, options: RestoreOptions, on_progress: OnProgress | None = None
) -> tuple[dict[str, Any], RestoreReport]:
    """Runs a plan for `RestorePlan.execute`."""
    group = ProcessGroup.of(plan.processes)
    with group.sharing_errors():
        return Execution(plan, options, on_progress, group).run()


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
    sends = bool(sent_leaves(entries))
    held = [group.size if sends else group.scratch for group in groups]
    decoded = [leaf.working_bytes for leaf in leaves]
    # A chunk is in memory as stored and decoded; a thread has windows of what it reads and places.
    decoding = 2 * max(min(sum(decoded), decoding_bytes(leaves, limit)), max(decoded, default=0))
    return max(min(limit, sum(held)), max(held, default=0)) + decoding + 4 * _THREADS * WINDOW_BYTES


class _ReadWatch:
    """Watch over groups that are read, which names one in the log when nothing is read for long."""

    def __init__(self, stats: ReadStats):
        self._stats = stats
        self._groups: list[Group] = []
        self._progressed()

    def begin(self, group: Group) -> None:
        """Adds a group to those that are read."""
        self._groups.append(group)

    def end(self, group: Group) -> None:
        """Removes a group that was read."""
        self._groups = [pending for pending in self._groups if pending is not group]
        self._progressed()

    def look(self) -> None:
        """Logs a warning if there was no progress for long, and again after a while."""
        if self._stats.bytes_read != self._bytes_read:
            self._progressed()
        waited = time.monotonic() - self._since
        if self._groups and waited >= self._report_secs:
            self._report_secs += STALL_AGAIN_SECS
            leaf = self._groups[0].leaves[0]
            _logger.warning("waited %.0f s for leaf %r of %s to be read", waited, leaf.name, leaf.path)

    def _progressed(self) -> None:
        self._since = time.monotonic()
        self._report_secs = STALL_SECS
        self._bytes_read = self._stats.bytes_read


def _agree(members: Iterable[Mapping[str, Any]], name: str, value: Any) -> bool:
    """Returns True if all members have a value under a name."""
    return all(values.get(name) == value for values in members)


_Ended = queue.SimpleQueue[tuple[Group, GroupBuffers | None, BaseException | None]]
"""Groups whose reads or transfers have ended, with their buffers or the error."""


def _call(ended: _Ended, group: Group, function: Callable[[], GroupBuffers | None]) -> None:
    try:
        ended.put((group, function(), None))
    except BaseException as error:
        ended.put((group, None, as_carried(error)))


_MakeValues = Callable[[Sequence[PlanEntry], dict[str, list[np.ndarray]]], list[Any]]
"""Makes arrays of entries from the buffers of their boxes."""


class Execution:
    """Execution of a plan by this process of a group."""

    def __init__(self, plan: RestorePlan, options: RestoreOptions, on_progress: OnProgress | None, group: ProcessGroup):
        self._plan = plan
        self._group = group
        self._broadcast: BroadcastMode = options.broadcast
        self._limit = options.limit
        self._progress = on_progress
        self._leaves = list(dict.fromkeys([leaf for entry in plan.entries for leaf in entry.leaves]))
        self._stats = ReadStats(options.verify, decoding_bytes(self._leaves, self._limit))
        self._values: dict[str, Any] = {}
        self._done_bytes = 0
        self._verified: dict[Leaf, bool | None] = {}
        self._stop = threading.Event()
        self._reader = Reader(self._stats, self._stop)
        # Arrays of the batch that is sent next, by name.
        self._loaded: dict[str, list[jax.Array]] = {}
        # Of devices with their own memory, or None.
        self._staging: StagingBuffers | None = None

    def run(self) -> tuple[dict[str, Any], RestoreReport]:
        """Reads the plan; returns the values by name and the report."""
        started = time.monotonic()
        entries = [entry for entry in self._plan.entries if entry.view is not None]
        sent = sent_leaves(entries)
        self._staging = StagingBuffers(self._limit, sent) if sent else None
        spreads = self._agree_on_spreads(entries)
        own = [entry for entry in entries if entry.name not in spreads]
        batches = list(batches_of(list(spreads.values()), self._limit)) if spreads else []
        if self._plan.fallback is not None:
            self._reader.in_memory = self._computed_leaves(entries, self._plan.fallback)
        groups = group_entries(own, self._limit)
        if groups or self._group.size > 1:
            self._read(groups, batches)
        self._group.exchange(b"", self._plan.path)
        self._reader.in_memory = {}
        if self._plan.fallback is not None:
            self._values.update(self._computed(self._plan.fallback))
        report = self._report(time.monotonic() - started)
        for entry in self._plan.entries:
            if entry.action == "keep":
                self._values[entry.name] = self._plan.target.original.get(entry.name)
        return self._values, report

    # -- reading

    def _agree_on_spreads(self, entries: Sequence[PlanEntry]) -> dict[str, SpreadEntry]:
        """Compares the plans of all members, and returns the entries that they send each other, by name."""
        if self._group.size == 1:
            return {}
        path = self._plan.path
        mine = [plan_digest(self._plan, self._broadcast), self._limit, spreads_of(entries, self._broadcast)]
        plans = self._group.of_all(mine, path)
        self._group.require_equal([digest for digest, _, _ in plans], "restore", path)
        if any(spans_processes(entry.sharding) for entry in entries):
            self._group.meet_on_devices(path)
        self._limit = min(limit for _, limit, _ in plans)
        first, *others = [spreads for _, _, spreads in plans]
        agreed = {name: counts for name, (counts, chunks) in first.items() if _agree(others, name, [counts, chunks])}
        return {entry.name: spread_entry(entry, tuple(agreed[entry.name])) for entry in entries if entry.name in agreed}

    def _read(self, groups: list[Group], batches: Sequence[Sequence[SpreadEntry]]) -> None:
        batch_groups = [group_entries([spread.loading for spread in batch], self._limit) for batch in batches]
        every_group = [group for some in (groups, *batch_groups) for group in some]
        awaits = bool(self._summed_leaves) or not all([group.blocking for group in every_group])
        workers = concurrent.futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="orbax_t5x-restore")
        try:
            # What the event loop awaits ends before the workers do.
            with workers as pool, LoopThread() if awaits else contextlib.nullcontext() as thread:
                try:
                    self._read_groups(thread, groups, pool, self._place)
                    for batch, of_batch in zip(batches, batch_groups, strict=True):
                        self._read_groups(thread, of_batch, pool, self._load)
                        self._send(batch)
                    self._verify_leaves(thread)
                    self._stats.check_watched()
                finally:
                    self._stop.set()
        finally:
            self._stop.set()  # also where an interrupt came before the inner one

    def _read_groups(
        self, thread: LoopThread | None, groups: list[Group], pool: concurrent.futures.Executor, make: _MakeValues
    ) -> None:
        """Reads groups within the budget; makes their values in this thread."""
        waiting = collections.deque(groups)
        watch = _ReadWatch(self._stats)
        ended: _Ended = queue.SimpleQueue()
        taken = under_way = 0
        while waiting or under_way:
            while waiting and (not under_way or taken + waiting[0].size <= self._limit):
                group = waiting.popleft()
                taken += group.size
                under_way += 1
                watch.begin(group)
                if group.blocking:
                    pool.submit(_call, ended, group, functools.partial(self._read_blocking, group))
                else:
                    assert thread is not None
                    thread.begin(self._read_awaited(group, pool, ended))
            try:
                group, result, error = ended.get(timeout=_POLL_SECS)
            except queue.Empty:
                watch.look()
                if thread is None or thread.is_alive():
                    continue
                raise RuntimeError("the thread that reads has ended before all was read") from None
            if error is not None:
                try:
                    raise first_failure(error)
                finally:
                    del error  # whose traceback holds this frame
            if result is not None:
                watch.end(group)
                placed = make(group.entries, result.buffers)
                if self._staging is not None:
                    # Transfers run on: only when they have arrived may other groups take these bytes of the host's
                    # memory.
                    pool.submit(_call, ended, group, functools.partial(self._await_arrival, placed, result.staging))
                    continue
            taken -= group.size
            under_way -= 1

    def _read_blocking(self, group: Group) -> GroupBuffers:
        """Reads and finishes a group in this thread."""
        filled = allocate(group, self._staging)
        self._reader.fill(filled.stages, group.entries[0], filled.bare)
        return filled

    async def _read_awaited(self, group: Group, pool: concurrent.futures.Executor, ended: _Ended) -> None:
        """Awaits a group's reads, and computes in a worker thread."""
        try:
            filled = allocate(group, self._staging)
            await self._reader.fill_awaited(filled.stages, group.entries[0], pool, filled.bare)
            ended.put((group, filled, None))
        except BaseException as error:
            ended.put((group, None, as_carried(error)))

    def _await_arrival(self, placed: list[Any], memory: np.ndarray) -> None:
        """Waits for arrays on their devices; gives back the buffer."""
        untyped: Any = jax
        untyped.block_until_ready(placed)
        if self._staging is not None and memory.size:
            self._staging.give(memory)

    @functools.cached_property
    def _summed_leaves(self) -> list[Leaf]:
        return [] if self._stats.verify == "off" else [leaf for leaf in self._leaves if leaf.checksums is not None]

    def _verify_leaves(self, thread: LoopThread | None) -> None:
        """Compares checksums; of those that `verify="full"` reads for, each member takes a share."""
        self._verified = dict.fromkeys(self._leaves)
        is_divided = self._group.size > 1 and self._stats.verify == "full"
        if thread is not None:
            thread.run(self._verify(self._summed_leaves, ReadStats("touched") if is_divided else self._stats))
        if not is_divided:
            return
        verified = self._group.of_all(list(self._verified.values()), self._plan.path)
        leaves = zip(self._leaves, *verified, strict=False)
        rest = [leaf for leaf, *flags in leaves if self._verified[leaf] is False and True not in flags]
        shares = balanced_shares(rest, lambda leaf: leaf.bytes_of((full_box(leaf.shape),)), self._group.size)
        if thread is not None:
            thread.run(self._verify(shares[self._group.rank], self._stats))
        # Where another member finds damage, it is raised here, too, at the last exchange.
        self._verified.update(dict.fromkeys(self._summed_leaves, True))

    async def _verify(self, leaves: Iterable[Leaf], stats: ReadStats) -> None:
        """Compares the checksums of leaves after their last read."""
        reading = asyncio.Semaphore(_THREADS)

        async def verify(leaf: Leaf) -> None:
            async with reading:
                self._verified[leaf] = await leaf.verify_checksum(stats, self._stats.ranges(leaf))

        if stats.verify == "full":
            await wait_all(map(verify, leaves))
            return
        for leaf in leaves:
            await verify(leaf)

    # -- results

    def _place(self, entries: Sequence[PlanEntry], buffers: dict[str, list[np.ndarray]]) -> list[Any]:
        """Makes the values of entries, in the caller's thread, and returns them."""
        placed = make_values(entries, buffers)
        self._values.update(placed)
        self._note_progress(entries)
        return list(placed.values())

    def _load(self, entries: Sequence[PlanEntry], buffers: dict[str, list[np.ndarray]]) -> list[Any]:
        """Makes the arrays of entries that are sent later, and returns them."""
        loaded = load_values(entries, buffers)
        self._loaded.update(loaded)
        return list(loaded.values())

    def _send(self, batch: Sequence[SpreadEntry]) -> None:
        """Makes the values of a batch, once all members have loaded it."""
        path = self._plan.path
        self._group.exchange(b"", path)
        with self._group.naming_lost_processes(path):
            self._values.update(send_values(batch, self._loaded))
        self._loaded.clear()
        self._note_progress([spread.entry for spread in batch])

    def _note_progress(self, entries: Iterable[PlanEntry]) -> None:
        if self._progress is not None:
            total = self._plan.bytes_to_read
            for entry in entries:
                self._done_bytes += entry.bytes_to_read
                call_of_user(self._progress, min(self._done_bytes, total), total, entry.name)

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
            from_fallback=self._plan.filled,
        )
