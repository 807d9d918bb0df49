"""The work directory beside a conversion's destination, and the renames at the end.

A conversion holds a lock on its directory, which ends with the process: a second conversion to the same destination is
refused meanwhile. A killed conversion leaves its directory behind; the next one empties it and starts again.

What is replaced is renamed away first, and the new checkpoint is renamed to the destination in the next call of the
system. A process that is killed between the two leaves nothing at the destination, and the old checkpoint in the work
directory, from where the next conversion puts it back. An error, or an interrupt, puts it back at once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import stat
import uuid
from pathlib import Path

from orbax_t5x.errors import CheckpointIOError
from orbax_t5x.files.durability import sync_path
from orbax_t5x.files.paths import Descriptor

_logger = logging.getLogger(__name__)

WORK_SUFFIX = ".orbax-t5x-convert"
"""Suffix of the names of work directories."""
_REPLACED = "replaced"
_OWNER = "owner"
_OPEN_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def work_directory_of(target: Path) -> Path:
    """Returns the path of the work directory of a destination."""
    return target.parent / f".{target.name}{WORK_SUFFIX}"


class WorkDirectory:
    """Empty private directory of a conversion, and a context that removes it.

    Attributes:
      keeps_owner: Whether the end leaves the directory with nothing but its owner's name, by which the next conversion
        knows objects in a bucket as its own.
    """

    def __init__(self, target: Path, name: str | None = None):
        """Locks and empties the directory, and puts back a destination that a killed conversion renamed away."""
        self.keeps_owner = False
        self.path: Path = work_directory_of(target)
        self._target = target
        self._lock = _lock(self.path, name or str(target))
        try:
            self._put_back()
            self._empty()
        except BaseException:
            self._lock.close()
            raise

    def owner(self) -> str:
        """Returns the name under which this directory owns objects elsewhere."""
        path = self.path / _OWNER
        with contextlib.suppress(FileNotFoundError):
            return path.read_text("ascii")
        owner = uuid.uuid4().hex
        path.write_text(owner, "ascii")
        sync_path(path)
        return owner

    def put_in_place(self, written: Path) -> None:
        """Moves a written directory to the destination."""
        replaced = self.path / _REPLACED
        try:
            if os.path.lexists(self._target):
                os.rename(self._target, replaced)
            os.rename(written, self._target)
        except BaseException:
            self._put_back()
            raise
        sync_path(self._target.parent)

    def __enter__(self) -> WorkDirectory:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            with contextlib.suppress(OSError):
                self._put_back()
                self._empty()
                if not self.keeps_owner:
                    (self.path / _OWNER).unlink(missing_ok=True)
                    os.rmdir(self.path)
        finally:  # a second signal leaves the directory to the next conversion
            self._lock.close()

    def _put_back(self) -> None:
        """Puts a renamed destination back, if its place is free."""
        replaced = self.path / _REPLACED
        if os.path.lexists(replaced) and not os.path.lexists(self._target):
            os.rename(replaced, self._target)
            _logger.warning("%s: a conversion was stopped while it replaced this; the old one is back", self._target)

    def _empty(self) -> None:
        """Removes everything but the owner's name."""
        for path in self.path.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != _OWNER:
                path.unlink()


def _lock(path: Path, name: str) -> Descriptor:
    """Makes and locks a work directory, or takes over one that a killed conversion left."""
    while True:
        is_new = True
        try:
            path.mkdir(stat.S_IRWXU)
        except FileExistsError:
            is_new = False
        try:
            lock = Descriptor(path, _OPEN_FLAGS)
        except FileNotFoundError:
            continue  # another conversion has just ended
        except OSError as error:
            raise _is_taken(
                name, f"{path} is no work directory of a conversion; remove it or choose another destination"
            ) from error
        try:
            fcntl.flock(lock.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _is_taken(name, f"another conversion writes to it, in {path}") from None
        except OSError as error:
            if not is_new:
                message = f"{path} exists, and its file system has no locks; if no conversion runs, remove it"
                raise _is_taken(name, message) from error
        if _is_same(path, lock.number):
            return lock
        lock.close()  # its last owner removed it before it was locked


def _is_same(work: Path, opened: int) -> bool:
    try:
        return os.path.samestat(os.stat(work, follow_symlinks=False), os.fstat(opened))
    except FileNotFoundError:
        return False


def _is_taken(name: str, why: str) -> CheckpointIOError:
    return CheckpointIOError(why, path=name, errno=errno.EBUSY)
