"""Gathers what all processes of a restore need: the boxes of each entry, and the processes that need each of them.

Each process sends its own boxes, so that targets may be placed differently on each of them; together they are the same
table on all, from which all derive the same schedule.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence

import numpy as np

from orbax_t5x.errors import Fix, Problem, RestorePlanError
from orbax_t5x.lazy import Box, Leaf, View
from orbax_t5x.multihost.collectives import gather, gather_bytes
from orbax_t5x.restoring.plan_data import PlanData, PlanEntry, boxes_by_leaf


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


def compare_plans(plan: PlanData, broadcast: bool, path: str | None) -> None:
    """Compares what the processes are about to execute; every process must call it."""
    compared = [
        broadcast,
        [checkpoint.shared_path for checkpoint in plan.checkpoints.values()],
        [(entry.name, entry.sources, entry.shape, str(entry.dtype), entry.action) for entry in plan.entries],
    ]
    digest = hashlib.sha256(json.dumps(compared).encode()).digest()
    rows = gather(np.frombuffer(digest, np.uint8), path)
    if (rows != rows[0]).any():
        message = "the processes of this restore have different plans: other steps, sources, targets or broadcast="
        fix = "call restore with the same arguments on every process"
        raise RestorePlanError([Problem("target", None, message, Fix(fix))], path=path)


def gather_needs(entries: Sequence[PlanEntry], path: str | None) -> list[EntryNeeds]:
    """Gathers what all processes need of the entries, which are the same on all; every process must call it."""
    sent = gather_bytes(json.dumps([entry.boxes() for entry in entries]).encode(), None, path)
    by_process: list[list[Sequence[Sequence[Sequence[int]]]]] = [json.loads(text) for text in sent]
    return [_needs_of(entry, boxes) for entry, *boxes in zip(entries, *by_process, strict=True)]


def _needs_of(entry: PlanEntry, by_process: Sequence[Sequence[Sequence[Sequence[int]]]]) -> EntryNeeds:
    needers: dict[Box, list[int]] = {}
    for process, boxes in enumerate(by_process):
        for box in boxes:
            needers.setdefault(tuple([(start, stop) for start, stop in box]), []).append(process)
    return EntryNeeds(entry, tuple(needers), tuple(map(tuple, needers.values())))
