"""Groups entries of a plan that are read together: those that share stored bytes, and small neighbours."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Protocol, TypeVar

from orbax_t5x.lazy import BlockingLeaf, Box, Leaf
from orbax_t5x.restoring.execute.buffers import layout_of
from orbax_t5x.restoring.execute.stages import Piece, StoredBytesOf, stages_of, stored_bytes
from orbax_t5x.restoring.plan import PlanEntry

# Small leaves are read together: one hop between threads costs as much as reading 100 KB, and making the arrays of one
# group competes with the reads of the next for the interpreter. Larger groups delay the first bytes.
_GROUP_BYTES = 4 << 20
_GROUP_ENTRIES = 1 << 12


class ReadsLeaves(Protocol):
    """Reader of boxes of leaves: an entry of a plan, for one process or for all."""

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The leaves that it is made of."""
        ...

    @property
    def reads(self) -> tuple[tuple[Leaf, tuple[Box, ...]], ...]:
        """The boxes of each leaf, each once."""
        ...


_Reading = TypeVar("_Reading", bound=ReadsLeaves)


@dataclasses.dataclass
class Group:
    """Group of entries that are read together, because they share stored bytes or because they are small.

    `size` counts results and scratch on the host. A group is `blocking` where all leaves are read by blocking calls,
    one after the other. Remote ones are not: their round trips overlap.
    """

    entries: list[PlanEntry]
    size: int
    leaves: dict[Leaf, None]
    stages: list[list[Piece]]
    blocking: bool

    def is_small(self) -> bool:
        """Tests whether the group may be joined with neighbours."""
        return self.size < _GROUP_BYTES and len(self.entries) == 1 and len(self.stages) == 1

    def can_take(self, other: Group, limit: int) -> bool:
        """Tests whether a small neighbour may be joined with the group."""
        return (
            self.blocking == other.blocking
            and self.size + other.size <= min(_GROUP_BYTES, limit)
            and len(self.entries) < _GROUP_ENTRIES
        )

    def take(self, other: Group) -> None:
        """Adds a small neighbour."""
        self.entries += other.entries
        self.size += other.size
        self.leaves.update(other.leaves)
        self.stages[0] += other.stages[0]


def group_entries(entries: Sequence[PlanEntry], limit: int) -> list[Group]:
    """Groups entries that share stored bytes, in plan order, and small ones that are near in a file."""
    groups: list[Group] = []
    small: Group | None = None
    clusters = [_as_group(cluster) for cluster in clusters_of(entries)]
    are_small = [group.is_small() for group in clusters]
    by_place = iter(sorted(itertools.compress(clusters, are_small), key=_place))
    for group, is_small in zip(clusters, are_small, strict=True):
        if not is_small:
            groups.append(group)
            continue
        group = next(by_place)
        if small is None or not small.can_take(group, limit):
            small = group
            groups.append(group)
        else:
            small.take(group)
    return groups


def _place(group: Group) -> tuple[str, int]:
    """Returns the file of a group's first leaf and where it begins; formats without such places keep their order."""
    leaf = next(iter(group.leaves), None)
    extent = leaf.extent if isinstance(leaf, BlockingLeaf) else None
    return ("", 0) if extent is None else (extent.file.path, extent.start)


def _as_group(entries: list[PlanEntry]) -> Group:
    leaves = dict.fromkeys([leaf for entry in entries for leaf in entry.leaves])
    stages = stages_of(entries)
    size = sum([layout_of(entry).size for entry in entries]) + stages.scratch_bytes
    blocking = all([not leaf.is_remote and isinstance(leaf, BlockingLeaf) for leaf in leaves])
    return Group(entries, max(1, size), leaves, [list(pieces) for pieces in stages.pieces], blocking)


def clusters_of(entries: Sequence[_Reading], stored: StoredBytesOf = stored_bytes) -> list[list[_Reading]]:
    """Joins entries that read the same leaf and share bytes of it; in order of their first ones.

    `stored` counts the bytes that one read of boxes takes.
    """
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
    """Tests whether reading a leaf for each user separately would read something twice."""
    read: list[tuple[Box, ...]] = [boxes for entry in users for one, boxes in entry.reads if one is leaf]
    separate = sum(stored(leaf, boxes) for boxes in read)
    return separate > stored(leaf, itertools.chain.from_iterable(read))
