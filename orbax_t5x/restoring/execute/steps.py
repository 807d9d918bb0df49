"""Which parts of shards are read together: one step after another, so that scratch stays small.

Shards that share stored bytes are cut at the same rows and read in the same step, and a cut is made only where no
stored byte lies on both sides of it: however the views of a leaf differ, each of its bytes is read once, and steps read
together what a plan counts. Shards that cannot be cut so are read in one step, whose scratch counts against the budget.
Pure geometry: nothing is allocated or read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from orbax_t5x.lazy import Box, Leaf, View
from orbax_t5x.restoring.execute.buffers import pieces_of
from orbax_t5x.restoring.plan_data import PlanEntry, boxes_by_leaf

# Scratch that one step may need. Smaller: more steps, each of which waits for the one before. Larger: more memory
# beside the results.
SCRATCH_BYTES = 16 << 20


def stored_bytes(leaf: Leaf, boxes: Iterable[Box]) -> int:
    """Bytes that one read of boxes takes from where they are stored; of a chunked leaf those of whole chunks."""
    chunks = leaf.chunks
    if chunks is None:
        return leaf.bytes_of(tuple(boxes))
    return leaf.bytes_of(tuple([to_chunks(box, chunks, leaf.shape) for box in boxes]))


def to_chunks(box: Box, chunks: Sequence[int], shape: Sequence[int]) -> Box:
    """The box of the chunks that a box meets, within an array of this shape."""
    sizes = zip(box, chunks, shape, strict=True)
    return tuple([(low // chunk * chunk, min(-(-high // chunk) * chunk, size)) for (low, high), chunk, size in sizes])


StoredBytesOf = Callable[[Leaf, Iterable[Box]], int]
"""Tells the bytes that one read of boxes of a leaf takes."""


class Part(NamedTuple):
    """A part of one shard.

    Attributes:
      entry: of the plan.
      place: of the shard among the boxes of the entry that are read.
      box: within that shard; in the coordinates of the whole array.
    """

    entry: PlanEntry
    place: int
    box: Box

    @property
    def view(self) -> View:
        """What is read."""
        assert self.entry.view is not None
        return self.entry.view


@dataclasses.dataclass(frozen=True)
class Steps:
    """How some entries are read.

    Attributes:
      parts: to read together, step by step.
      scratch_bytes: the memory beside the results that the step with most needs.
    """

    parts: tuple[tuple[Part, ...], ...]
    scratch_bytes: int


def steps_of(entries: Iterable[PlanEntry]) -> Steps:
    """The steps of entries that share stored bytes, or of one entry."""
    parts = [Part(entry, place, box) for entry in entries for place, box in enumerate(pieces_of(entry).reading)]
    if all(part.view.leaf is not None for part in parts):
        return Steps((tuple(parts),), 0)
    found: list[tuple[Part, ...]] = []
    most = 0
    scratch = [part.view.scratch_bytes(part.box) for part in parts]
    while max(scratch, default=0) > SCRATCH_BYTES or (found and sum(scratch) > SCRATCH_BYTES):
        cut = cut_clean(parts, sum(scratch), SCRATCH_BYTES)
        if cut is None:
            break
        head, parts = cut
        found.append(tuple(head))
        most = max(most, sum(part.view.scratch_bytes(part.box) for part in head))
        scratch = [part.view.scratch_bytes(part.box) for part in parts]
    return Steps((*found, tuple(parts)), max(most, sum(scratch)))


def cut_clean(
    parts: Sequence[Part], size: int, wanted_size: int, axis: int = 0, stored: StoredBytesOf = stored_bytes
) -> tuple[list[Part], list[Part]] | None:
    """The first rows of all parts and the rest; None where every cut would have stored bytes on both sides.

    Args:
      parts: to cut.
      size: bytes that all of them stand for.
      wanted_size: bytes that the first rows should about stand for.
      axis: the dimension whose indices are the rows.
      stored: tells the bytes that one read of boxes takes.
    """
    ranges = [part.box[axis] for part in parts if len(part.box) > axis]
    if not ranges:
        return None
    start, stop = min(start for start, _ in ranges), max(stop for _, stop in ranges)
    wanted = start + max(1, (stop - start) * wanted_size // size)
    whole = parts_stored_bytes(parts, stored)
    for edge in _edges(parts, start, wanted, stop):
        head, tail = _divided(parts, edge, axis)
        if parts_stored_bytes(head, stored) + parts_stored_bytes(tail, stored) == whole:
            return head, tail
    return None


def _divided(parts: Iterable[Part], edge: int, axis: int) -> tuple[list[Part], list[Part]]:
    """What parts have of the rows before `edge`, and of the others; those of lower rank come first."""
    head: list[Part] = []
    tail: list[Part] = []
    for part in parts:
        if len(part.box) <= axis or part.box[axis][1] <= edge:
            head.append(part)
        elif part.box[axis][0] >= edge:
            tail.append(part)
        else:
            (start, stop), before, after = part.box[axis], part.box[:axis], part.box[axis + 1 :]
            head.append(part._replace(box=(*before, (start, edge), *after)))
            tail.append(part._replace(box=(*before, (edge, stop), *after)))
    return head, tail


def _edges(parts: Iterable[Part], start: int, wanted: int, stop: int) -> list[int]:
    """Rows at which to try a cut: near the wanted one, where chunks or joined dimensions of a leaf may end.

    Those up to the wanted row come first, the largest first.
    """
    leaves = {leaf for view in {part.view for part in parts} for leaf in view.leaves()}
    edges = {wanted}
    for unit in {unit for leaf in leaves for unit in _units(leaf)}:
        for base in (0, start):
            below = base + (wanted - base) // unit * unit
            edges |= {below, below + unit}
    inside = [edge for edge in edges if start < edge < stop]
    return sorted(inside, key=lambda edge: (edge > wanted, abs(edge - wanted)))


def _units(leaf: Leaf) -> set[int]:
    """Numbers of rows after which a view's rows may be done with what is stored together.

    A row of a view may be an index of any dimension of the leaf, or of some that a reshape joined.
    """
    rank = len(leaf.shape)
    chunks = leaf.chunks or (1,) * rank
    return {
        max(1, chunks[first] * math.prod(leaf.shape[first + 1 : last]))
        for first in range(rank)
        for last in range(first + 1, rank + 1)
    }


def parts_stored_bytes(parts: Iterable[Part], stored: StoredBytesOf = stored_bytes) -> int:
    """Bytes that reading these parts together takes from where they are stored; `stored` as in `cut_clean`."""
    found = boxes_by_leaf((part.view, part.box) for part in parts)
    return sum(stored(leaf, boxes) for leaf, boxes in found)
