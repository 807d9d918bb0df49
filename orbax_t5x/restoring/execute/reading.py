"""Fills shards: lowers views to reads of leaves, reads the leaves, and does what views have left to do."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Mapping, Sequence

from orbax_t5x.concurrency import run_in_pool, wait_all
from orbax_t5x.lazy import BlockingLeaf, Leaf, ReadStats, Request, ValueLeaf
from orbax_t5x.restoring.execute.lowering import Shard, lower_shards
from orbax_t5x.restoring.plan_data import PlanEntry
from orbax_t5x.storage.memory import naming_memory_errors

ShardStages = Sequence[Sequence[Shard]]


class Reader:
    """Reader that fills shards, stage by stage; `in_memory` replaces leaves that have no values before an execution."""

    def __init__(self, stats: ReadStats, stop: threading.Event):
        """Takes what to count in, and what is set when nothing more is to be read."""
        self._stats = stats
        self._stop = stop
        self.in_memory: Mapping[Leaf, ValueLeaf] = {}

    def fill(self, stages: ShardStages, entry: PlanEntry) -> bool:
        """Fills shards of leaves that block; False where reading was stopped meanwhile."""
        for shards in stages:
            reads, finish = _lower(shards, entry)
            for leaf, requests in reads:
                if self._stop.is_set():
                    return False
                assert isinstance(leaf, BlockingLeaf), "all leaves here block"
                self.in_memory.get(leaf, leaf).read_blocking(requests, self._stats)
            _finish(finish, entry)
        return True

    async def fill_awaited(self, stages: ShardStages, entry: PlanEntry, pool: concurrent.futures.Executor) -> None:
        """Fills shards of any leaves; what computes is done in a worker thread of `pool`."""
        for shards in stages:
            reads, finish = _lower(shards, entry)
            await wait_all(self.in_memory.get(leaf, leaf).read_into(requests, self._stats) for leaf, requests in reads)
            if finish:
                await run_in_pool(pool, _finish, finish, entry)


def _lower(
    shards: Sequence[Shard], entry: PlanEntry
) -> tuple[list[tuple[Leaf, list[Request]]], list[Callable[[], None]]]:
    with naming_memory_errors(entry.leaves[0].path, entry.name):
        return lower_shards(shards)


def _finish(actions: Sequence[Callable[[], None]], entry: PlanEntry) -> None:
    with naming_memory_errors(entry.leaves[0].path, entry.name):
        for action in actions:
            action()
