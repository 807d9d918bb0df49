"""Schedules a broadcast: which process reads what, and in which rounds it is sent.

All processes derive the same schedule from what all of them need. What is stored is cut into *chunks*, so that no
stored byte belongs to two of them. One process reads a chunk; the others that need some of it get that from the owner,
in *rounds*. Owners are chosen so that all read about as much. Pure geometry: nothing is allocated, read or sent.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from orbax_t5x.lazy import Box, Leaf
from orbax_t5x.lazy.box import box_size
from orbax_t5x.restoring.broadcast.chunks import (
    BroadcastChunk,
    DividedChunk,
    divide,
    host_bytes,
    piece_bytes,
    with_neighbours,
)
from orbax_t5x.restoring.broadcast.decision import ReadDecision, SharedReads, decide_reads
from orbax_t5x.restoring.broadcast.needs import EntryNeeds
from orbax_t5x.restoring.broadcast.rounds import BroadcastRound, buffer_limit, rounds_of
from orbax_t5x.restoring.broadcast.stores import Stores
from orbax_t5x.restoring.execute.groups import clusters_of
from orbax_t5x.restoring.plan_data import PlanEntry

# A chunk is read at once. Larger: reading and sending overlap less. Smaller: more requests.
_CHUNK_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Schedule of a broadcast; `unshared` is what each process reads for itself.

    `decisions` are those about each entry, by name, where it was decided.
    """

    unshared: tuple[PlanEntry, ...]
    needs: Mapping[PlanEntry, EntryNeeds]
    chunks: tuple[BroadcastChunk, ...]
    rounds: tuple[BroadcastRound, ...]
    decisions: Mapping[str, ReadDecision]


def schedule_broadcast(
    needs: Sequence[EntryNeeds], processes: int, limit: int, stores: Stores | None = None
) -> Schedule:
    """Schedules what all processes need, in plan order, with `limit` bytes in flight in each.

    With `stores`, only what costs less when it is read once and sent than when each process reads it for itself.
    """
    unshared: list[PlanEntry] = []
    sent: list[EntryNeeds] = []
    chunks: list[BroadcastChunk] = []
    load = [0] * processes
    decisions: dict[str, ReadDecision] = {}
    gathered_bytes, exchanged_bytes = (
        min(_CHUNK_BYTES, buffer_limit(limit, processes, is_exchanged)) for is_exchanged in (False, True)
    )
    for cluster in clusters_of(needs, with_neighbours):
        divided = None if _is_unshared(cluster) else divide(cluster, gathered_bytes, exchanged_bytes)
        if stores is not None:
            decision = decide_cluster(cluster, divided, stores)
            decisions.update((one.entry.name, decision) for one in cluster)
            divided = divided if decision.is_broadcast else None
        if divided is None:
            unshared += [one.entry for one in cluster]
            continue
        sent += cluster
        for one in divided:
            owner = min(one.candidates, key=lambda process: (load[process], process))
            load[owner] += sum(map(piece_bytes, one.pieces))
            size = sum(host_bytes(whole) for whole, _ in one.reads)
            chunks.append(BroadcastChunk(owner, one.members, one.pieces, one.reads, one.is_exchanged, size))
    by_entry = {one.entry: one for one in sent}
    rounds = tuple(rounds_of(chunks, by_entry, limit))
    return Schedule(tuple(unshared), by_entry, tuple(chunks), rounds, decisions)


def decide_cluster(
    cluster: Sequence[EntryNeeds], divided: Sequence[DividedChunk] | None, stores: Stores
) -> ReadDecision:
    """Decides about entries that share stored bytes."""
    chunks = None
    if divided is not None:
        chunks = [SharedReads(one.pieces, [whole for whole, _ in one.reads], one.members) for one in divided]
    return decide_reads(cluster, chunks, stores.of(leaf for one in cluster for leaf in one.leaves))


def _is_unshared(cluster: Sequence[EntryNeeds]) -> bool:
    """Tests whether no stored byte is needed by two processes."""
    by_process: dict[int, dict[Leaf, list[Box]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for one in cluster:
        for box, needers in zip(one.boxes, one.needers, strict=True):
            for leaf, requested in one.view.requests(box):
                if leaf.is_value or not box_size(requested):
                    continue
                if len(needers) > 1:
                    return False
                for process in needers:
                    by_process[process][leaf].append(requested)
    if len(by_process) < 2:
        return True
    together: dict[Leaf, list[Box]] = collections.defaultdict(list)
    separate = 0
    for reads in by_process.values():
        for leaf, boxes in reads.items():
            separate += with_neighbours(leaf, boxes)
            together[leaf] += boxes
    return separate == sum(with_neighbours(leaf, boxes) for leaf, boxes in together.items())
