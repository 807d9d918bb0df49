"""Gathers the boxes that all processes of a restore need.

Each process sends its own boxes, so that targets may be placed differently on each of them; together they are the same
table on all, from which all derive the same schedule.

With `broadcast="auto"` they also exchange what the checkpoint is stored on: a disk of each host, a file system of all
hosts, or a bucket. Only what is known decides: the environment variable `ORBAX_T5X_STORE`, a URL, or the type under
which a file system is mounted. Any other file system counts as local, from which each process reads for itself.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from orbax_t5x.errors import Fix, Problem, RestorePlanError
from orbax_t5x.files.paths import url_scheme
from orbax_t5x.lazy import Box, Leaf, View
from orbax_t5x.multihost.collectives import gather_bytes
from orbax_t5x.multihost.groups import ProcessGroup
from orbax_t5x.restoring.options import BroadcastMode
from orbax_t5x.restoring.plan import PlanEntry, RestorePlan, box_of_index, boxes_by_leaf

STORE_VARIABLE = "ORBAX_T5X_STORE"
_MOUNTS = Path("/proc/self/mountinfo")
_BUCKET_TYPES = {
    *("fuse.gcsfuse", "fuse.s3fs", "fuse.mountpoint-s3", "fuse.goofys", "fuse.rclone", "fuse.geesefs"),
    *("fuse.blobfuse", "fuse.blobfuse2"),
}
_SHARED_TYPES = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "ceph", "fuse.ceph", "fuse.glusterfs", "beegfs", "afs"),
    *("wekafs", "panfs", "ocfs2", "gfs2", "orangefs", "fuse.sshfs", "fuse.juicefs", "fuse.quobyte", "fuse.cvmfs2"),
}
_ESCAPED = re.compile(r"\\([0-7]{3})")


class StoreKind(enum.IntEnum):
    """Kind of a store; the larger of two answers counts."""

    LOCAL = 0
    SHARED = 1
    BUCKET = 2

    @property
    def label(self) -> str:
        """The name, as `ORBAX_T5X_STORE` has it."""
        return self.name.lower()


def store_of(path: str) -> StoreKind:
    """Returns the store of a path or URL, if known."""
    given = os.environ.get(STORE_VARIABLE)
    if given:
        named = {store.label: store for store in StoreKind}
        if given not in named:
            raise unknown_store(given)
        return named[given]
    if is_in_bucket(path):
        return StoreKind.BUCKET
    name = _file_system_type(os.path.realpath(path), _mounts())
    return StoreKind.BUCKET if name in _BUCKET_TYPES else StoreKind.SHARED if name in _SHARED_TYPES else StoreKind.LOCAL


def unknown_store(given: str, process: int | None = None, path: str | None = None) -> RestorePlanError:
    """Returns the error of a wrong value of `ORBAX_T5X_STORE`."""
    where = "" if process is None else f" on process {process}"
    message = f"{STORE_VARIABLE} is {given!r}{where}, and can be 'local', 'shared' or 'bucket' only"
    fix = Fix(f"set {STORE_VARIABLE} to one of these, or remove it, so that the path decides")
    return RestorePlanError([Problem("target", None, message, fix)], path=path)


def is_in_bucket(path: str) -> bool:
    """Reports whether a path is a URL of no local file."""
    return url_scheme(path) not in (None, "file")


class Stores(NamedTuple):
    """Stores of a plan's sources: behind URLs, and local."""

    remote: StoreKind
    local: StoreKind

    @classmethod
    def of_plan(cls, plan: RestorePlan) -> Stores:
        """Returns the stores of a plan, the farthest of several."""
        found = [StoreKind.LOCAL, StoreKind.LOCAL]
        for checkpoint in plan.checkpoints.values():
            index = 0 if is_in_bucket(checkpoint.path) else 1
            found[index] = max(found[index], store_of(checkpoint.path))
        return cls(*found)

    def of(self, leaves: Iterable[Leaf]) -> StoreKind:
        """Returns the farthest store of leaves."""
        kinds = [self.remote if is_in_bucket(leaf.path) else self.local for leaf in leaves if not leaf.is_value]
        return max(kinds, default=StoreKind.LOCAL)


def _mounts() -> Iterable[str]:
    try:
        return _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return ()


def _file_system_type(path: str, mounts: Iterable[str]) -> str:
    found, longest = "", -1
    for line in mounts:
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        point = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields[4])
        # Of two mounts at one point the later one is in use.
        if len(point) >= longest and (path == point or path.startswith(point.rstrip("/") + "/")):
            found, longest = after.split()[0], len(point)
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class EntryNeeds:
    """Boxes of an entry that members need, each with its ranks."""

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
        """The boxes of each leaf to read."""
        return self._reads

    @functools.cached_property
    def _reads(self) -> tuple[tuple[Leaf, tuple[Box, ...]], ...]:
        return boxes_by_leaf((self.view, box) for box in self.boxes)


def is_text(entry: PlanEntry) -> bool:
    """Reports whether an entry holds strings."""
    assert entry.view is not None
    return entry.view.dtype.hasobject


def compare_plans(plan: RestorePlan, broadcast: BroadcastMode, group: ProcessGroup, path: str | None) -> Stores:
    """Compares the plans of all processes; every process calls it."""
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
    # A process whose planning failed sends its error here.
    sent = gather_bytes(digest + bytes([*stores, is_wrong]), None, group, path)
    rows = np.frombuffer(b"".join(sent), np.uint8).reshape(len(sent), -1)
    if (rows[:, : len(digest)] != rows[0, : len(digest)]).any():
        message = "the processes of this restore have different plans: other steps, sources, targets or broadcast="
        fix = "call restore with the same arguments on every process"
        raise RestorePlanError([Problem("target", None, message, Fix(fix))], path=path)
    for rank in np.flatnonzero(rows[:, -1])[:1].tolist():
        values = gather_bytes(os.fsencode(os.environ.get(STORE_VARIABLE, "")), None, group, path)
        raise unknown_store(os.fsdecode(values[rank]), group.members[rank], path)
    return Stores(*(StoreKind(int(kind)) for kind in rows[:, len(digest) : -1].max(axis=0)))


def gather_needs(entries: Sequence[PlanEntry], group: ProcessGroup, path: str | None) -> list[EntryNeeds]:
    """Gathers the needs of all members; every member calls it."""
    sent = gather_bytes(json.dumps([entry.boxes() for entry in entries]).encode(), None, group, path)
    by_process: list[list[Sequence[Sequence[Sequence[int]]]]] = [json.loads(text) for text in sent]
    return [_needs_of(entry, boxes) for entry, *boxes in zip(entries, *by_process, strict=True)]


def needs_of_shardings(entries: Sequence[PlanEntry], members: Sequence[int]) -> list[EntryNeeds]:
    """Returns all needs, if all targets have these shardings."""
    return [_needs_of(entry, _boxes_by_process(entry, members)) for entry in entries]


def _boxes_by_process(entry: PlanEntry, members: Sequence[int]) -> list[list[Box]]:
    if entry.leaf is None or entry.leaf.sharding is None:
        return [list(entry.boxes())] * len(members)
    untyped: Any = entry.leaf.sharding
    found: dict[int, list[Box]] = {member: [] for member in members}
    for device, index in untyped.devices_indices_map(entry.leaf.shape).items():
        box = box_of_index(index or (), entry.leaf.shape)
        boxes = found.get(device.process_index)  # None of devices of other processes
        if boxes is not None and box not in boxes:
            boxes.append(box)
    return list(found.values())


def _needs_of(entry: PlanEntry, by_process: Sequence[Sequence[Sequence[Sequence[int]]]]) -> EntryNeeds:
    needers: dict[Box, list[int]] = {}
    for process, boxes in enumerate(by_process):
        for box in boxes:
            needers.setdefault(tuple([(start, stop) for start, stop in box]), []).append(process)
    return EntryNeeds(entry, tuple(needers), tuple(map(tuple, needers.values())))
