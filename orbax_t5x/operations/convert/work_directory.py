"""The work directory beside a conversion's destination.

The renames at the end are here, too. Each destination has one, and the converting process holds a lock on it, which
ends with the process: a second conversion to the same destination is refused while the first runs. A killed conversion
leaves its directory behind; the next one resumes with its contents, or empties it.

Whoever may write beside the destination can make a directory of that name first. Only a directory that the effective
user owns, that no other user may write, and that holds nothing but files and directories of a conversion is used; any
other is left as it is, and the next name is taken.

What is replaced is renamed away first, and the new one is renamed to the destination in the next call of the system. A
process that is killed between the two leaves nothing at the destination, and the old one in the work directory, from
where the next conversion puts it back. An error, or an interrupt, puts it back at once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import stat
import uuid
from pathlib import Path

from orbax_t5x.errors import CheckpointIOError, UnsafeCheckpointError
from orbax_t5x.files.durability import sync_path
from orbax_t5x.files.paths import Descriptor
from orbax_t5x.operations.convert.journal import is_being_written, journals
from orbax_t5x.operations.convert.output_format import BLOCKS_DIRECTORY
from orbax_t5x.operations.convert.pipeline import STOP_FILE

_logger = logging.getLogger(__name__)

WORK_SUFFIX = ".orbax-t5x-convert"
"""Suffix of the names of work directories."""
_REPLACED = "replaced"
_OWNER, _OWNER_DIGITS = "owner", 32
_FILES = re.compile(rf"journal\.\d+|{STOP_FILE}|{_OWNER}")
# More directories of others than this are an attack.
_MOST_NAMES = 100
_OPEN_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Errors of opening what is no directory, a link, or not ours to read.
_IS_FOREIGN = frozenset({errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM})
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def work_directory_of(target: Path) -> Path:
    """Returns the first choice for the work directory."""
    return target.parent / f".{target.name}{WORK_SUFFIX}"


class WorkDirectory:
    """Work directory of a conversion, and a context.

    The end removes it unless `is_kept` for a later conversion.
    """

    def __init__(self, target: Path, name: str | None = None):
        """Locks the directory, and puts back renamed destinations."""
        self.is_kept = False
        self._target = target
        self.path, self._lock = _take(target, name or str(target))
        try:
            for journal in journals(self.path).values():
                if is_being_written(journal):
                    raise _is_taken(name or str(target), "another process of an earlier conversion still writes to it")
            self._put_back()
        except BaseException:
            self._lock.close()
            raise

    def owner(self) -> str:
        """Returns a text for this directory's other belongings."""
        path = self.path / _OWNER
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            owner = file.read(_OWNER_DIGITS + 1)
            if not re.fullmatch(rb"[0-9a-f]{%d}" % _OWNER_DIGITS, owner):
                raise _is_taken(str(self._target), f"{path} is not of a conversion; if none runs, remove {self.path}")
            return owner.decode()
        owner = uuid.uuid4().hex
        path.write_text(owner, "ascii")
        sync_path(path)
        return owner

    def empty(self) -> None:
        """Removes all its contents but the owner's name."""
        with os.scandir(self._lock.number) as entries:
            for entry in list(entries):
                if entry.name == _OWNER:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.name, dir_fd=self._lock.number)
                else:
                    os.unlink(entry.name, dir_fd=self._lock.number)

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

    def _put_back(self) -> None:
        """Puts a renamed destination back, if its place is free."""
        replaced = self.path / _REPLACED
        if os.path.lexists(replaced) and not os.path.lexists(self._target):
            os.rename(replaced, self._target)
            _logger.warning("%s: a conversion was stopped while it replaced this; the old one is back", self._target)

    def __exit__(self, *exception: object) -> None:
        try:
            if not self.is_kept:
                with contextlib.suppress(OSError):
                    self._put_back()
                    self.empty()
                    (self.path / _OWNER).unlink(missing_ok=True)
                    os.rmdir(self.path)
        finally:  # a second signal leaves the directory to the next conversion
            self._lock.close()


def _take(target: Path, name: str) -> tuple[Path, Descriptor]:
    """Makes or finds a work directory of ours, and locks it."""
    first = work_directory_of(target)
    for number in range(_MOST_NAMES):
        path = first.with_name(f"{first.name}.{number}") if number else first
        lock = _lock(path, target, name)
        if lock is not None:
            return path, lock
        _logger.warning("%s is not a work directory that only this user may write; it is left as it is", path)
    message = f"{first} and {_MOST_NAMES - 1} more names of work directories are taken by what other users may write"
    raise UnsafeCheckpointError(message, path=name)


def _lock(path: Path, target: Path, name: str) -> Descriptor | None:
    """Makes and locks a work directory, or returns None."""
    while True:
        is_new = True
        try:
            path.mkdir(stat.S_IRWXU)
        except FileExistsError:
            is_new = False
        try:
            lock = Descriptor(path, _OPEN_FLAGS)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno in _IS_FOREIGN:
                return None
            raise
        if not _is_private(os.fstat(lock.number)):
            return None
        try:
            fcntl.flock(lock.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError) or not is_new:
                why = f"another conversion writes to it, in {path}"
                if not isinstance(error, BlockingIOError):
                    why = f"{path} is there, and its file system has no locks; if no conversion runs, remove it"
                raise _is_taken(name, why) from None
        if _is_same(path, lock.number):
            return lock if is_new or _holds_a_conversion(lock.number, target.name) else None
        lock.close()  # its last owner removed it before it was locked


def _is_private(found: os.stat_result, forbidden: int = _WRITABLE_BY_OTHERS) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & forbidden


def _holds_a_conversion(directory: int, destination: str) -> bool:
    """Tests if a directory holds only a conversion's files."""
    directories = re.compile(rf"{BLOCKS_DIRECTORY}|{_REPLACED}|{re.escape(destination)}(\..*)?")
    forbidden = _WRITABLE_BY_OTHERS & _umask()
    for parent, below, _, opened in os.fwalk(".", dir_fd=directory):
        for name in os.listdir(opened):
            found = os.stat(name, dir_fd=opened, follow_symlinks=False)
            is_directory = stat.S_ISDIR(found.st_mode)
            if not is_directory and not (stat.S_ISREG(found.st_mode) and found.st_nlink == 1):
                return False
            if not _is_private(found, forbidden):
                return False
            if parent == "." and not (directories if is_directory else _FILES).fullmatch(name):
                return False
        if parent == "." and _REPLACED in below:
            below.remove(_REPLACED)
    return True


def _umask() -> int:
    """Reads the mask of new files."""
    try:
        found = re.search(r"^Umask:\s*(\d+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return int(found[1], 8) if found else _WRITABLE_BY_OTHERS


def _is_same(work: Path, opened: int) -> bool:
    try:
        return os.path.samestat(os.stat(work, follow_symlinks=False), os.fstat(opened))
    except FileNotFoundError:
        return False


def _is_taken(name: str, why: str) -> CheckpointIOError:
    return CheckpointIOError(why, path=name, errno=errno.EBUSY)
