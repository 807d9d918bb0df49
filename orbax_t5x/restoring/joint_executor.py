"""Execution of a plan by several processes.

Each process reads first what it alone needs, then takes part in the broadcast. Checksums are verified by all together
at the end. A process that fails tells the others, which would wait for it.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from orbax_t5x.concurrency import CallerThread, LoopThread, balanced_shares, run_in_pool, wait_all
from orbax_t5x.errors import CheckpointError
from orbax_t5x.lazy import ChecksummedRange, Leaf, ReadStats, full_box
from orbax_t5x.multihost.collectives import gather_bytes, raise_together
from orbax_t5x.multihost.groups import ProcessGroup
from orbax_t5x.multihost.rendezvous import rendezvous_before_backend
from orbax_t5x.readers.ranges.coverage import fold_columns
from orbax_t5x.restoring.broadcast.needs import StoreKind, Stores, compare_plans, gather_needs, is_text
from orbax_t5x.restoring.broadcast.schedule import schedule_broadcast
from orbax_t5x.restoring.broadcast.send import Broadcast
from orbax_t5x.restoring.execute.groups import Group
from orbax_t5x.restoring.executor import Execution
from orbax_t5x.restoring.options import BroadcastMode, RestoreOptions
from orbax_t5x.restoring.plan import PlanEntry, RestorePlan, RestoreReport
from orbax_t5x.text.progress_bar import OnProgress

_COLUMNS = 6  # of a checksummed range in a message: leaf, start, stop, crc, stride, times


def execute_jointly(
    plan: RestorePlan, options: RestoreOptions, on_progress: OnProgress | None
) -> tuple[dict[str, Any], RestoreReport]:
    """Runs a plan on each process of a job; all call it."""
    group = rendezvous_before_backend(plan.processes)
    if group.size == 1:
        return Execution(plan, options, on_progress).run()
    return _JointExecution(plan, options, on_progress, group).run()


class _JointExecution(Execution):
    """Execution of a plan on a process of several."""

    _is_joint = True

    def __init__(self, plan: RestorePlan, options: RestoreOptions, on_progress: OnProgress | None, group: ProcessGroup):
        super().__init__(plan, options, on_progress)
        self._mode: BroadcastMode = options.broadcast
        self._path = plan.path
        self._group = group
        self._caller = CallerThread()
        self._broadcast: Broadcast | None = None

    def _own_entries(self, entries: list[PlanEntry]) -> list[PlanEntry]:
        """Compares all plans; returns the entries that are not sent."""
        stores = compare_plans(self._plan, self._mode, self._group, self._path)
        if self._mode == "auto":
            return entries if max(stores) is StoreKind.LOCAL else self._prepare_broadcast(entries, stores)
        return self._prepare_broadcast(entries, None) if self._mode else entries

    def _prepare_broadcast(self, entries: Sequence[PlanEntry], stores: Stores | None) -> list[PlanEntry]:
        """Schedules the broadcast; returns the entries read without it."""
        texts = [entry for entry in entries if is_text(entry) and (stores is None or stores.of(entry.leaves))]
        arrays = [entry for entry in entries if not is_text(entry)]
        local_texts = [entry for entry in entries if is_text(entry) and entry not in texts]
        needs = gather_needs(arrays, self._group, self._path)
        schedule = schedule_broadcast(needs, self._group.size, self._limit, stores)
        if stores is not None:
            self._plan.decisions = schedule.decisions
        self._broadcast = Broadcast(
            schedule, texts, self._reader, self._place_arrived, group=self._group, limit=self._limit, path=self._path
        )
        return [*local_texts, *schedule.unshared]

    def _read_in(self, thread: LoopThread | None, groups: list[Group], pool: concurrent.futures.Executor) -> None:
        assert thread is not None
        error: BaseException | None = None
        broadcast = self._broadcast
        try:
            try:
                self._read_groups(thread, groups, pool)
                thread.run(wait_all(leaf.check_for_all(self._stats) for leaf in self._leaves))
            except BaseException as caught:  # the other processes must receive it first
                self._stop.set()
                error = caught
            if broadcast is not None and (error is None or isinstance(error, Exception)):
                try:
                    thread.run(broadcast.run(pool, error), caller=self._caller)
                except BaseException as caught:
                    error = caught
                self._bytes_received = broadcast.bytes_received
            self._stop.set()
            lost_peer = broadcast is not None and broadcast.lost_peer
            if not lost_peer and (error is None or isinstance(error, Exception)):
                self._verify_together(thread, error)
            if error is not None:
                raise error
        finally:
            del error  # whose traceback holds this frame, and so the threads

    async def _place_arrived(self, entry: PlanEntry, buffers: list[np.ndarray]) -> None:
        """Makes a received value; failures do not stop the broadcast."""
        placed, error = await self._caller.run(self._place_or_error, entry, buffers)
        if error is not None:
            raise error
        if self._staging is not None:
            await run_in_pool(None, jax.block_until_ready, placed)

    def _place_or_error(
        self, entry: PlanEntry, buffers: list[np.ndarray]
    ) -> tuple[list[Any], None] | tuple[None, Exception]:
        try:
            return self._place([entry], {entry.name: buffers}), None
        except Exception as error:
            return None, error

    # -- checksums

    def _verify_together(self, thread: LoopThread, error: Exception | None) -> None:
        """Compares checksums of all processes; this process's error comes first."""
        try:
            ranges = gather_checksums(self._stats, self._leaves, self._group, error=error, path=self._path)
        except CheckpointError:
            if error is None:
                raise
            return

        def found(leaf: Leaf) -> Sequence[ChecksummedRange]:
            return ranges.get(leaf, ())

        if self._stats.verify != "full":
            thread.run(self._verify(self._leaves, found, self._stats))
            return
        try:
            thread.run(self._verify_rest(found))
        except Exception as caught:
            error = caught
        raise_together(error, self._group, self._path)

    async def _verify_rest(self, ranges: Callable[[Leaf], Sequence[ChecksummedRange]]) -> None:
        """Compares checksums; reads leaves that are not covered."""
        await self._verify(self._leaves, ranges, ReadStats("touched"))
        rest = [leaf for leaf, verified in self._verified.items() if verified is False]
        work_shares = balanced_shares(rest, lambda leaf: leaf.bytes_of((full_box(leaf.shape),)), self._group.size)
        await self._verify(work_shares[self._group.rank], ranges, self._stats)
        # Unless another process finds damage in its own: `raise_together` then raises that here, too.
        self._verified.update(dict.fromkeys(rest, True))


def gather_checksums(
    stats: ReadStats, leaves: Sequence[Leaf], group: ProcessGroup, *, error: Exception | None, path: str | None
) -> dict[Leaf, list[ChecksummedRange]]:
    """Gathers the checksummed ranges of all members, by this process's leaf.

    Every process must call it, also one whose reading failed with `error`: the others would wait for it.
    """
    # What `verify="full"` has to read in addition is only seen in the ranges themselves.
    ranges = [stats.ranges(leaf) for leaf in leaves]
    if stats.verify != "full":
        ranges = [
            fold_columns(found, checksums.kind) if (checksums := leaf.checksums) is not None else []
            for leaf, found in zip(leaves, ranges, strict=True)
        ]
    numbers = [(index, *one) for index, found in enumerate(ranges) for one in found]
    mine = np.asarray(numbers, np.uint64).reshape(-1, _COLUMNS)
    gathered: dict[Leaf, list[ChecksummedRange]] = {}
    for sent in gather_bytes(mine.tobytes(), error, group, path):
        rows: list[list[int]] = np.frombuffer(sent, np.uint64).reshape(-1, _COLUMNS).tolist()
        for index, *one in rows:
            gathered.setdefault(leaves[index], []).append(ChecksummedRange(*one))
    return gathered
