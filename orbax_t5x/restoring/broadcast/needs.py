"""Gathers what all processes of a restore need: the boxes of each entry, and the processes that need each of them.

Each process sends its own boxes, so that targets may be placed differently on each of them; together they are the same
table on all, from which all derive the same schedule.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from orbax_t5x.errors import Fix, Problem, RestorePlanError
from orbax_t5x.lazy import Box, Leaf, View
from orbax_t5x.multihost.collectives import gather, gather_bytes
from orbax_t5x.restoring.broadcast.stores import STORE_VARIABLE, StoreKind, Stores, unknown_store
from orbax_t5x.restoring.options import BroadcastMode
from orbax_t5x.restoring.plan_data import PlanData, PlanEntry, box_of_index, boxes_by_leaf


@dataclasses.dataclass(frozen=True, eq=False)
class EntryNeeds:
    """Boxes of one entry that the processes of a job need, each once, and for each the processes, ascending."""

    entry: PlanEntry
    boxes: tuple[Box, ...]
    needers: tuple[tuple[int, ...], ...]

    @property
    def view(self) -> View:
        """The view that is read."""
        assert self.entry.view is not None
        return self.entry.view

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The leaves that the view is made of."""
        return self.entry.leaves

    @property
    def reads(self) -> tuple[tuple[Leaf, tuple[Box, ...]], ...]:
        """The boxes of each leaf that reading all of it takes."""
        return self._reads

    @functools.cached_property
    def _reads(self) -> tuple[tuple[Leaf, tuple[Box, ...]], ...]:
        return boxes_by_leaf((self.view, box) for box in self.boxes)


def is_text(entry: PlanEntry) -> bool:
    """Reports whether an entry that is read is one of strings."""
    assert entry.view is not None
    return entry.view.dtype.hasobject


def compare_plans(plan: PlanData, broadcast: BroadcastMode, path: str | None) -> Stores:
    """Compares what the processes are about to execute; every process must call it.

    Returns:
      The stores on which all agree, if `broadcast` is "auto": of differing views of one, the one farthest away.

    Raises:
      RestorePlanError: on all processes: their plans differ, or `ORBAX_T5X_STORE` has a wrong value on one of them.
    """
    compared = [
        broadcast if broadcast == "auto" else bool(broadcast),
        [checkpoint.shared_path for checkpoint in plan.checkpoints.values()],
        [(entry.name, entry.sources, entry.shape, str(entry.dtype), entry.action) for entry in plan.entries],
    ]
    digest = hashlib.sha256(json.dumps(compared).encode()).digest()
    stores, is_wrong = Stores(StoreKind.LOCAL, StoreKind.LOCAL), False
    try:
        stores = Stores.of_plan(plan) if broadcast == "auto" else stores
    except RestorePlanError:  # the others wait for this process
        is_wrong = True
    rows = gather(np.frombuffer(digest + bytes([*stores, is_wrong]), np.uint8), path)
    if (rows[:, : len(digest)] != rows[0, : len(digest)]).any():
        message = "the processes of this restore have different plans: other steps, sources, targets or broadcast="
        fix = "call restore with the same arguments on every process"
        raise RestorePlanError([Problem("target", None, message, Fix(fix))], path=path)
    for process in np.flatnonzero(rows[:, -1])[:1].tolist():
        values = gather_bytes(os.fsencode(os.environ.get(STORE_VARIABLE, "")), None, path)
        raise unknown_store(os.fsdecode(values[process]), process, path)
    return Stores(*(StoreKind(int(kind)) for kind in rows[:, len(digest) : -1].max(axis=0)))


def gather_needs(entries: Sequence[PlanEntry], path: str | None) -> list[EntryNeeds]:
    """Gathers what all processes need of the entries, which are the same on all; every process must call it."""
    sent = gather_bytes(json.dumps([entry.boxes() for entry in entries]).encode(), None, path)
    by_process: list[list[Sequence[Sequence[Sequence[int]]]]] = [json.loads(text) for text in sent]
    return [_needs_of(entry, boxes) for entry, *boxes in zip(entries, *by_process, strict=True)]


def needs_of_shardings(entries: Sequence[PlanEntry], processes: int) -> list[EntryNeeds]:
    """Returns what all processes need of the entries where their targets are placed like this process's."""
    return [_needs_of(entry, _boxes_by_process(entry, processes)) for entry in entries]


def _boxes_by_process(entry: PlanEntry, processes: int) -> list[list[Box]]:
    """Returns the boxes of each process; without a sharding each has the whole array."""
    if entry.leaf is None or entry.leaf.sharding is None:
        return [list(entry.boxes())] * processes
    untyped: Any = entry.leaf.sharding
    found: list[list[Box]] = [[] for _ in range(processes)]
    for device, index in untyped.devices_indices_map(entry.leaf.shape).items():
        box = box_of_index(index or (), entry.leaf.shape)
        if box not in found[device.process_index]:
            found[device.process_index].append(box)
    return found


def _needs_of(entry: PlanEntry, by_process: Sequence[Sequence[Sequence[Sequence[int]]]]) -> EntryNeeds:
    needers: dict[Box, list[int]] = {}
    for process, boxes in enumerate(by_process):
        for box in boxes:
            needers.setdefault(tuple([(start, stop) for start, stop in box]), []).append(process)
    return EntryNeeds(entry, tuple(needers), tuple(map(tuple, needers.values())))
