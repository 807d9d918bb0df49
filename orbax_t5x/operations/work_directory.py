"""The directory beside a destination in which a conversion writes, and how the result takes the destination's place.

A conversion that was killed leaves its directory behind. Whoever writes holds a lock on its directory, which ends with
the process, so the next conversion to the same destination finds out which ones nobody writes any more: it removes
them, and puts back what one of them had already moved away.

Where the system can exchange two names in one step (Linux, on most file systems), the destination is at any time the
old one or the new one. Elsewhere the old one is renamed away first: a process that is killed between two renames leaves
nothing at the destination, and the old one in its directory, from where the next conversion puts it back.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import tempfile
from collections.abc import Generator
from pathlib import Path

from orbax_t5x.handlers.failed_saves import remove_tree

_SUFFIX = ".orbax-t5x-tmp"
_REPLACED = "replaced"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
# What a kernel or a file system says that cannot do it.
_CANNOT_EXCHANGE = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM})


@contextlib.contextmanager
def work_directory(target: Path) -> Generator[Path, None, None]:
    """A new directory beside a destination, removed at the end; those that killed conversions left are removed first.

    Beside it, because a rename across file systems would not be one step.
    """
    _clean(target)
    work, lock = _make(target)
    try:
        yield work
    finally:
        remove_tree(work)
        os.close(lock)


def _make(target: Path) -> tuple[Path, int]:
    """A directory and the descriptor that holds its lock."""
    while True:
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=_SUFFIX, dir=target.parent))
        lock = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a file system without locks: then nobody removes what is left either
            fcntl.flock(lock, fcntl.LOCK_EX)
        if work.exists():
            return work, lock
        os.close(lock)  # somebody took it for one that was left, before it was locked


def _clean(target: Path) -> None:
    """Removes the directories of conversions to this destination whose processes are gone."""
    left = re.compile(rf"\.{re.escape(target.name)}\.[a-z0-9_]{{8}}{re.escape(_SUFFIX)}")
    for entry in sorted(os.scandir(target.parent), key=lambda entry: entry.name):
        if left.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            _remove_left(Path(entry.path), target)


def _remove_left(work: Path, target: Path) -> None:
    try:
        lock = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # removed meanwhile, or somebody else's
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        replaced = work / _REPLACED
        if os.path.lexists(replaced) and not os.path.lexists(target):
            os.rename(replaced, target)
        remove_tree(work)
    except OSError:  # it is being written, or its file system has no locks
        return
    finally:
        os.close(lock)


def put_in_place(work: Path, target: Path) -> None:
    """Renames what was written, `work/<target's name>`; what it replaces stays in the work directory."""
    written = work / target.name
    if not os.path.lexists(target):
        os.rename(written, target)
    elif not exchange(written, target):
        _rename_twice(written, target, work / _REPLACED)


def _rename_twice(written: Path, target: Path, replaced: Path) -> None:
    os.rename(target, replaced)
    try:
        os.rename(written, target)
    except BaseException:
        os.rename(replaced, target)
        raise


def exchange(one: Path, other: Path) -> bool:
    """Exchanges two names in one step; False, and nothing done, where the system cannot.

    Raises:
      OSError: it can, and failed.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), os.fspath(one))
