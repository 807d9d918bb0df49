"""Groups entries that are read together, in stages.

Entries that share stored bytes are one group, and so are small neighbours. Of a group, what shares stored bytes is cut
at the same rows and read in the same stage, so that scratch memory stays small, and a cut is made only where no stored
byte is on both sides of it: however the views of a leaf differ, each of its bytes is read once, and a stage reads
together what a plan counts. What cannot be cut so is read in one stage, whose scratch counts against the budget. Pure
geometry: nothing is allocated or read.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from orbax_t5x.lazy import BlockingLeaf, Box, Leaf, View
from orbax_t5x.lazy.node import LeafNode
from orbax_t5x.restoring.execute.buffers import layout_of, layouts_of
from orbax_t5x.restoring.plan import PlanEntry, boxes_by_leaf

# Scratch that one stage may need. Smaller: more stages, each of which waits for the one before. Larger: more memory
# beside the results.
SCRATCH_BYTES = 16 << 20


def stored_bytes(leaf: Leaf, boxes: Iterable[Box]) -> int:
    """Counts the stored bytes that reading boxes together takes."""
    chunks = leaf.chunks
    if chunks is None:
        return leaf.bytes_of(tuple(boxes))
    return leaf.bytes_of(tuple([to_chunks(box, chunks, leaf.shape) for box in boxes]))


def to_chunks(box: Box, chunks: Sequence[int], shape: Sequence[int]) -> Box:
    """Widens a box to whole chunks, within an array of this shape."""
    sizes = zip(box, chunks, shape, strict=True)
    return tuple([(low // chunk * chunk, min(-(-high // chunk) * chunk, size)) for (low, high), chunk, size in sizes])


StoredBytesOf = Callable[[Leaf, Iterable[Box]], int]
"""Counts the bytes that one read of boxes of a leaf takes."""


class Piece(NamedTuple):
    """Box of a view that is read at once.

    It lies in one box of the entry that is read: of a shard, or of several that follow one another in memory.
    """

    entry: PlanEntry
    box_index: int
    box: Box

    @property
    def view(self) -> View:
        """The view that is read."""
        assert self.entry.view is not None
        return self.entry.view


class Stages(NamedTuple):
    """Stages of reads, and the most memory beside the results."""

    pieces: tuple[tuple[Piece, ...], ...]
    scratch_bytes: int


def stages_of(entries: Iterable[PlanEntry]) -> Stages:
    """Divides entries that share stored bytes into stages."""
    pieces = [
        Piece(entry, box_index, box) for entry in entries for box_index, box in enumerate(layout_of(entry).read_boxes)
    ]
    if None not in [piece.view.leaf for piece in pieces]:
        return Stages((tuple(pieces),), 0)
    found: list[tuple[Piece, ...]] = []
    most = 0
    scratch = [piece.view.scratch_bytes(piece.box) for piece in pieces]
    while max(scratch, default=0) > SCRATCH_BYTES or (found and sum(scratch) > SCRATCH_BYTES):
        cut = cut_clean(pieces, sum(scratch), SCRATCH_BYTES)
        if cut is None:
            break
        head, pieces = cut
        found.append(tuple(head))
        most = max(most, sum(piece.view.scratch_bytes(piece.box) for piece in head))
        scratch = [piece.view.scratch_bytes(piece.box) for piece in pieces]
    return Stages((*found, tuple(pieces)), max(most, sum(scratch)))


def cut_clean(
    pieces: Sequence[Piece], size: int, wanted_size: int, axis: int = 0, stored: StoredBytesOf = stored_bytes
) -> tuple[list[Piece], list[Piece]] | None:
    """Cuts pieces into the first rows and the rest, on `axis`.

    None where every cut would have stored bytes on both sides.
    """
    ranges = [piece.box[axis] for piece in pieces if len(piece.box) > axis]
    if not ranges:
        return None
    start, stop = min(start for start, _ in ranges), max(stop for _, stop in ranges)
    wanted = start + max(1, (stop - start) * wanted_size // size)
    whole = pieces_stored_bytes(pieces, stored)
    for edge in _edges(pieces, start, wanted, stop):
        head, tail = _divided(pieces, edge, axis)
        if pieces_stored_bytes(head, stored) + pieces_stored_bytes(tail, stored) == whole:
            return head, tail
    return None


def _divided(pieces: Iterable[Piece], edge: int, axis: int) -> tuple[list[Piece], list[Piece]]:
    """Divides pieces at the row `edge`."""
    head: list[Piece] = []
    tail: list[Piece] = []
    for piece in pieces:
        if len(piece.box) <= axis or piece.box[axis][1] <= edge:
            head.append(piece)
        elif piece.box[axis][0] >= edge:
            tail.append(piece)
        else:
            (start, stop), before, after = piece.box[axis], piece.box[:axis], piece.box[axis + 1 :]
            head.append(piece._replace(box=(*before, (start, edge), *after)))
            tail.append(piece._replace(box=(*before, (edge, stop), *after)))
    return head, tail


def _edges(pieces: Iterable[Piece], start: int, wanted: int, stop: int) -> list[int]:
    """Returns rows for trying a cut."""
    leaves = {leaf for view in {piece.view for piece in pieces} for leaf in view.leaves()}
    edges = {wanted}
    for unit in {unit for leaf in leaves for unit in _units(leaf)}:
        for base in (0, start):
            below = base + (wanted - base) // unit * unit
            edges |= {below, below + unit}
    inside = [edge for edge in edges if start < edge < stop]
    return sorted(inside, key=lambda edge: (edge > wanted, abs(edge - wanted)))


def _units(leaf: Leaf) -> set[int]:
    """Returns the units of rows that may end stored bytes.

    A row of a view may be an index of any dimension of the leaf, or of some that a reshape joined.
    """
    rank = len(leaf.shape)
    chunks = leaf.chunks or (1,) * rank
    return {
        max(1, chunks[first] * math.prod(leaf.shape[first + 1 : last]))
        for first in range(rank)
        for last in range(first + 1, rank + 1)
    }


def pieces_stored_bytes(pieces: Iterable[Piece], stored: StoredBytesOf = stored_bytes) -> int:
    """Counts the stored bytes of reading pieces together."""
    found = boxes_by_leaf((piece.view, piece.box) for piece in pieces)
    return sum(stored(leaf, boxes) for leaf, boxes in found)


# Small leaves are read together: one hop between threads costs as much as reading 100 KB, and making the arrays of one
# group competes with the reads of the next for the interpreter. Larger groups delay the first bytes.
_GROUP_BYTES = 4 << 20
_GROUP_ENTRIES = 1 << 12


class ReadsLeaves(Protocol):
    """Reader of boxes of leaves."""

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The leaves that it is made of."""
        ...

    @property
    def reads(self) -> tuple[tuple[Leaf, tuple[Box, ...]], ...]:
        """The boxes of each leaf, each once."""
        ...


_Reading = TypeVar("_Reading", bound=ReadsLeaves)


@dataclasses.dataclass(slots=True)
class Group:
    """Group of entries that are read together.

    Bare leaves that no other entry wants are read whole in the first stage, and have no pieces.

    Attributes:
      size: bytes of results and scratch on the host; `scratch` are the latter.
      blocking: whether all leaves are read by blocking calls. Remote ones are not: their round trips overlap.
      bare: the entries without pieces.
    """

    entries: list[PlanEntry]
    size: int
    leaves: list[Leaf]
    blocking: bool
    stages: list[list[Piece]]
    bare: list[PlanEntry] = dataclasses.field(default_factory=list[PlanEntry])
    scratch: int = 0


class _Small(NamedTuple):
    """An entry that may be read with its neighbours in a file."""

    path: str
    offset: int
    blocking: bool
    position: int
    size: int
    entry: PlanEntry
    group: Group | None


def group_entries(entries: Sequence[PlanEntry], limit: int) -> list[Group]:
    """Groups entries that share stored bytes, in plan order."""
    uses = collections.Counter(itertools.chain.from_iterable([entry.leaves for entry in entries]))
    found: list[tuple[int, Group]] = []
    small: list[_Small] = []
    composed: dict[PlanEntry, int] = {}
    for position, (entry, layout) in enumerate(zip(entries, layouts_of(entries), strict=True)):
        assert entry.view is not None
        leaf = entry.leaves[0]
        if not isinstance(entry.view.node, LeafNode) or uses[leaf] > 1:
            composed[entry] = position
        elif layout.size < _GROUP_BYTES:
            small.append(_Small(*place_of(leaf), position, max(1, layout.size), entry, None))
        else:
            found.append((position, Group([entry], layout.size, [leaf], _is_blocking(leaf), [[]], [entry])))
    for cluster in clusters_of(list(composed)):
        group, position = _as_group(cluster), composed[cluster[0]]
        if group.size < _GROUP_BYTES and len(cluster) == len(group.stages) == 1:
            path, offset, _ = place_of(group.leaves[0])
            small.append(_Small(path, offset, group.blocking, position, group.size, cluster[0], group))
        else:
            found.append((position, group))
    found += _joined(small, min(_GROUP_BYTES, limit))
    return [group for _, group in sorted(found, key=operator.itemgetter(0))]


def _joined(small: list[_Small], limit: int) -> list[tuple[int, Group]]:
    """Joins neighbours in a file to groups in plan order."""
    slots = sorted([one.position for one in small])
    found: list[tuple[int, Group]] = []
    group = Group([], limit, [], False, [[]])
    for slot, (_, _, blocking, _, size, entry, alone) in zip(slots, sorted(small), strict=True):
        if group.size + size > limit or group.blocking != blocking or len(group.entries) >= _GROUP_ENTRIES:
            group = Group([], 0, [], blocking, [[]])
            found.append((slot, group))
        group.entries.append(entry)
        group.leaves += entry.leaves
        group.size += size
        if alone is None:
            group.bare.append(entry)
        else:
            group.stages[0] += alone.stages[0]
            group.scratch += alone.scratch
    return found


def place_of(leaf: Leaf) -> tuple[str, int, bool]:
    """Returns the file and offset of a leaf, and whether reads block."""
    if not isinstance(leaf, BlockingLeaf):
        return "", 0, False
    extent = leaf.extent
    return ("", 0, not leaf.is_remote) if extent is None else (extent.file.path, extent.start, not leaf.is_remote)


def _is_blocking(leaf: Leaf) -> bool:
    return isinstance(leaf, BlockingLeaf) and not leaf.is_remote


def _as_group(entries: list[PlanEntry]) -> Group:
    leaves = list(dict.fromkeys([leaf for entry in entries for leaf in entry.leaves]))
    stages = stages_of(entries)
    size = sum([layout.size for layout in layouts_of(entries)]) + stages.scratch_bytes
    blocking = all(map(_is_blocking, leaves))
    pieces = [list(one) for one in stages.pieces]
    return Group(entries, max(1, size), leaves, blocking, pieces, scratch=stages.scratch_bytes)


def clusters_of(entries: Sequence[_Reading], stored: StoredBytesOf = stored_bytes) -> list[list[_Reading]]:
    """Joins entries that share bytes of a leaf."""
    by_leaf: dict[Leaf, list[int]] = {}
    for index, entry in enumerate(entries):
        for leaf in entry.leaves:
            by_leaf.setdefault(leaf, []).append(index)
    parent = list(range(len(entries)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    for leaf, users in by_leaf.items():
        if len(users) > 1 and _share_bytes(leaf, [entries[index] for index in users], stored):
            for index in users[1:]:
                low, high = sorted((root(users[0]), root(index)))
                parent[high] = low
    clusters: dict[int, list[_Reading]] = {}
    for index, entry in enumerate(entries):
        clusters.setdefault(root(index), []).append(entry)
    return list(clusters.values())


def _share_bytes(leaf: Leaf, users: Sequence[ReadsLeaves], stored: StoredBytesOf) -> bool:
    """Tests if separate reads of a leaf would read bytes twice."""
    read: list[tuple[Box, ...]] = [boxes for entry in users for one, boxes in entry.reads if one is leaf]
    separate = sum(stored(leaf, boxes) for boxes in read)
    return separate > stored(leaf, itertools.chain.from_iterable(read))
