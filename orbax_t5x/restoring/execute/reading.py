"""Allocates the buffers of groups, and fills those of pieces."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from orbax_t5x.concurrency import run_in_pool
from orbax_t5x.errors import LimitExceededError
from orbax_t5x.files.memory import naming_memory_errors
from orbax_t5x.lazy import Box, Leaf, ReadStats, Request, ValueLeaf, slices_within
from orbax_t5x.lazy.box import box_shape
from orbax_t5x.lazy.read import LeafReads, read_all, read_all_blocking
from orbax_t5x.restoring.execute.buffers import StagingBuffers, layouts_of
from orbax_t5x.restoring.execute.groups import Group, Piece
from orbax_t5x.restoring.plan import PlanEntry

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
                        copies.append(_Copy(first.out, request.out))
        found = [*bare, *[(leaf, list(requests.values())) for leaf, requests in reads.items()]]
        if self.in_memory:
            found = [(self.in_memory.get(leaf, leaf), requests) for leaf, requests in found]
        return found, [*copies, *finish]


def _finish(actions: Sequence[_Action], entry: PlanEntry) -> None:
    with naming_memory_errors(entry.leaves[0].path, entry.name):
        for action in actions:
            action()


class _Copy(NamedTuple):
    source: np.ndarray
    out: np.ndarray

    def __call__(self) -> None:
        self.out[...] = self.source
