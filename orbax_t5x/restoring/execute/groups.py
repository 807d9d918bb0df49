"""Which leaves of a plan are read together: those that share stored bytes, and small neighbours."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from orbax_t5x.lazy import BlockingLeaf, Box, Leaf
from orbax_t5x.restoring.execute.buffers import pieces_of
from orbax_t5x.restoring.execute.lowering import SCRATCH_BYTES, scratch
from orbax_t5x.restoring.plan_data import PlanEntry

# Small leaves travel together: one hop between threads costs as much as reading 100 KB. Larger groups delay the first
# bytes.
_GROUP_BYTES = 4 << 20
_GROUP_ENTRIES = 64


@dataclasses.dataclass
class Group:
    """Entries that are read together, because they share stored bytes or because they are small."""

    entries: list[PlanEntry]
    size: int
    leaves: dict[int, Leaf]
    blocking: bool


def group_entries(entries: Sequence[PlanEntry], limit: int) -> list[Group]:
    """Entries in plan order, joined where they share stored bytes, small neighbours together."""
    groups: list[Group] = []
    small: Group | None = None
    for cluster in _clusters(entries):
        group = _as_group(cluster, limit)
        if group.size >= _GROUP_BYTES or len(group.entries) > 1:
            groups.append(group)
            continue
        if (
            small is None
            or small.blocking != group.blocking
            or small.size + group.size > min(_GROUP_BYTES, limit)
            or len(small.entries) >= _GROUP_ENTRIES
        ):
            small = group
            groups.append(group)
        else:
            small.entries.extend(group.entries)
            small.size += group.size
            small.leaves.update(group.leaves)
    return groups


def _as_group(entries: list[PlanEntry], limit: int) -> Group:
    leaves = {id(leaf): leaf for entry in entries if entry.view is not None for leaf in entry.view.leaves()}
    size = sum(_host_bytes(entry) for entry in entries)
    blocking = all(isinstance(leaf, BlockingLeaf) for leaf in leaves.values())
    return Group(entries, max(1, size), leaves, blocking)


def _host_bytes(entry: PlanEntry) -> int:
    """Buffers of all boxes, and the scratch of the one that needs most."""
    assert entry.view is not None
    pieces = pieces_of(entry)
    return pieces.size + sum(min(scratch(entry.view, box), SCRATCH_BYTES) for box in pieces.reading)


def _clusters(entries: Sequence[PlanEntry]) -> list[list[PlanEntry]]:
    """Entries joined where they read the same leaf: from a chunked format always, else where their boxes overlap."""
    by_leaf: dict[int, list[int]] = {}
    for index, entry in enumerate(entries):
        assert entry.view is not None
        for leaf in entry.view.leaves():
            by_leaf.setdefault(id(leaf), []).append(index)
    parent = list(range(len(entries)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    for key, users in by_leaf.items():
        if len(users) > 1 and _share_bytes([entries[index] for index in users], key):
            for index in users[1:]:
                low, high = sorted((root(users[0]), root(index)))
                parent[high] = low
    clusters: dict[int, list[PlanEntry]] = {}
    for index, entry in enumerate(entries):
        clusters.setdefault(root(index), []).append(entry)
    return list(clusters.values())


def _share_bytes(users: Sequence[PlanEntry], key: int) -> bool:
    boxes: list[Box] = []
    for entry in users:
        assert entry.view is not None
        mine = {box for part in entry.boxes() for leaf, box in entry.view.requests(part) if id(leaf) == key}
        if any(leaf.chunks is not None for leaf in entry.view.leaves() if id(leaf) == key):
            return True
        if any(_overlap(box, other) for box in mine for other in boxes):
            return True
        boxes.extend(mine)
    return False


def _overlap(one: Box, other: Box) -> bool:
    return all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))
