"""The work directory beside a destination, in which a conversion writes, and the exchange of the two at the end.

Each destination has one, and the converting process holds a lock on it, which ends with the process: a second
conversion to the same destination is refused while the first runs. A killed conversion leaves its directory behind; the
next one resumes with its contents, or empties it.

Where the system can exchange two names atomically (Linux, on most file systems), the destination is at any time the old
one or the new one. Elsewhere the old one is renamed away first: a process that is killed between two renames leaves
nothing at the destination, and the old one in the work directory, from where the next conversion restores it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from pathlib import Path

from orbax_t5x.errors import CheckpointIOError
from orbax_t5x.operations.convert.journal import is_being_written, journals
from orbax_t5x.storage.durability import sync_path

_SUFFIX = ".orbax-t5x-convert"
_REPLACED = "replaced"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
# Errors of a kernel or a file system that cannot exchange names.
_CANNOT_EXCHANGE = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM})


def work_directory_of(target: Path) -> Path:
    """Returns the work directory of a destination: beside it, because a rename across file systems is not atomic."""
    return target.parent / f".{target.name}{_SUFFIX}"


class WorkDirectory:
    """Work directory of one conversion; a context, whose end removes it.

    Attributes:
      path: of the directory.
      is_kept: whether it stays at the end, for a later conversion.
    """

    def __init__(self, target: Path):
        """Locks the directory, and puts back what a killed conversion had renamed away.

        Raises:
          CheckpointIOError: another conversion to the destination is running.
        """
        self.path = work_directory_of(target)
        self.is_kept = False
        self._target = target
        self._lock = _take(self.path, target)
        try:
            for journal in journals(self.path).values():
                if is_being_written(journal):
                    raise _is_taken(target, "another process of an earlier conversion still writes to it")
            replaced = self.path / _REPLACED
            if os.path.lexists(replaced) and not os.path.lexists(target):
                os.rename(replaced, target)
        except BaseException:
            os.close(self._lock)
            raise

    def empty(self) -> None:
        """Removes all its contents."""
        for entry in os.scandir(self.path):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)

    def put_in_place(self, written: Path) -> None:
        """Moves a directory written in here to the destination; what it replaces is moved in here."""
        if not os.path.lexists(self._target):
            os.rename(written, self._target)
        elif not exchange(written, self._target):
            _rename_twice(written, self._target, self.path / _REPLACED)
        sync_path(self._target.parent)

    def __enter__(self) -> WorkDirectory:
        return self

    def __exit__(self, *exception: object) -> None:
        if not self.is_kept:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _take(work: Path, target: Path) -> int:
    """Makes and locks a work directory; returns the descriptor that holds the lock."""
    while True:
        is_new = True
        try:
            work.mkdir()
        except FileExistsError:
            is_new = False
        try:
            lock = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError) or not is_new:
                os.close(lock)
                why = f"another conversion writes to it, in {work}"
                if not isinstance(error, BlockingIOError):
                    why = f"{work} is there, and its file system has no locks; if no conversion runs, remove it"
                raise _is_taken(target, why) from None
        if _is_same(work, lock):
            return lock
        os.close(lock)  # its last owner removed it before it was locked


def _is_same(work: Path, opened: int) -> bool:
    try:
        return os.path.samestat(os.stat(work, follow_symlinks=False), os.fstat(opened))
    except FileNotFoundError:
        return False


def _is_taken(target: Path, why: str) -> CheckpointIOError:
    return CheckpointIOError(why, path=target, errno=errno.EBUSY)


def _rename_twice(written: Path, target: Path, replaced: Path) -> None:
    os.rename(target, replaced)
    try:
        os.rename(written, target)
    except BaseException:
        os.rename(replaced, target)
        raise


def exchange(one: Path, other: Path) -> bool:
    """Exchanges two names atomically; returns False, with nothing done, if the system cannot.

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
