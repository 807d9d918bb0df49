"""Tells apart what checkpoints are stored on: a disk of each host, a file system of all hosts, or a bucket.

Only what is known decides: the environment variable `ORBAX_T5X_STORE`, a URL, or the type under which a file system
is mounted. Any other file system counts as local, from which each process reads for itself.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from orbax_t5x.errors import Fix, Problem, RestorePlanError
from orbax_t5x.lazy import Leaf
from orbax_t5x.restoring.plan_data import PlanData
from orbax_t5x.storage.paths import url_scheme

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
    """Kind of a store; of two answers about one store the larger counts."""

    LOCAL = 0
    SHARED = 1
    BUCKET = 2

    @property
    def label(self) -> str:
        """The name, as `ORBAX_T5X_STORE` has it."""
        return self.name.lower()


def store_of(path: str) -> StoreKind:
    """Returns the store of a path or URL, as far as this process knows.

    Raises:
      RestorePlanError: `ORBAX_T5X_STORE` is none of the names.
    """
    given = os.environ.get(STORE_VARIABLE)
    if given:
        named = {store.label: store for store in StoreKind}
        if given not in named:
            raise unknown_store(given)
        return named[given]
    return (
        StoreKind.BUCKET if is_in_bucket(path) else _store_of_type(_file_system_type(os.path.realpath(path), _mounts()))
    )


def unknown_store(given: str, process: int | None = None, path: str | None = None) -> RestorePlanError:
    """Returns the error of a value of `ORBAX_T5X_STORE`, on this process or another, that is none of the names."""
    where = "" if process is None else f" on process {process}"
    message = f"{STORE_VARIABLE} is {given!r}{where}, and can be 'local', 'shared' or 'bucket' only"
    fix = Fix(f"set {STORE_VARIABLE} to one of these, or remove it, so that the path decides")
    return RestorePlanError([Problem("target", None, message, fix)], path=path)


def is_in_bucket(path: str) -> bool:
    """Reports whether a path is a URL of anything but local files."""
    return url_scheme(path) not in (None, "file")


class Stores(NamedTuple):
    """Stores of the sources of one plan: of those behind URLs, and of all others."""

    remote: StoreKind
    local: StoreKind

    @classmethod
    def of_plan(cls, plan: PlanData) -> Stores:
        """Returns the stores as this process knows them; of several the one farthest away."""
        found = [StoreKind.LOCAL, StoreKind.LOCAL]
        for checkpoint in plan.checkpoints.values():
            index = 0 if is_in_bucket(checkpoint.path) else 1
            found[index] = max(found[index], store_of(checkpoint.path))
        return cls(*found)

    def of(self, leaves: Iterable[Leaf]) -> StoreKind:
        """Returns the store of what leaves are read from together."""
        kinds = [self.remote if is_in_bucket(leaf.path) else self.local for leaf in leaves if not leaf.is_value]
        return max(kinds, default=StoreKind.LOCAL)


def _mounts() -> Iterable[str]:
    try:
        return _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return ()


def _file_system_type(path: str, mounts: Iterable[str]) -> str:
    """Returns the type of the file system on which a path is; empty where that is unknown."""
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


def _store_of_type(name: str) -> StoreKind:
    if name in _BUCKET_TYPES:
        return StoreKind.BUCKET
    return StoreKind.SHARED if name in _SHARED_TYPES else StoreKind.LOCAL
