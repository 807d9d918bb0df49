"""Untrusted names become files inside a root, or an error.

This is the only code that joins them to a path. The path that the caller gives is trusted and resolved once; it becomes
a `Root`. Below it every component is opened relative to the directory before it and never followed by the kernel:
symlinks are read and walked here, so that no link, `..` or race leads out. One exception has a name: a snapshot of the
Hugging Face hub cache links to `blobs/<hex>` of the same `models--…` directory. Files are opened without blocking and
must be regular: a FIFO, a socket or a device is refused before a byte is read.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import stat
from collections.abc import Callable, Generator
from typing import Self, TypeVar

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointIOError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
)


class Descriptor:
    """Open file descriptor.

    It is closed by `close` or when nothing refers to it any more. Opening and closing are one call of the interpreter
    each, so that an exception of a signal handler finds the descriptor open and kept here, or not open.
    """

    __slots__ = ("_numbers",)

    def __init__(self, path: str | os.PathLike[str], flags: int, *, directory: int | None = None):
        """Opens a path as `os.open` does, with its errors."""
        self._numbers: list[int] = []
        self._numbers.extend(map(functools.partial(os.open, mode=0o666, dir_fd=directory), (path,), (flags,)))

    @property
    def number(self) -> int:
        """The number for calls of the operating system."""
        return self._numbers[0]

    def close(self, _close: Callable[[int], None] = os.close) -> None:
        """Closes the descriptor."""
        list(map(_close, map(self._numbers.pop, (-1,) * len(self._numbers))))

    def __del__(self) -> None:
        if hasattr(self, "_numbers"):
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


_Error = TypeVar("_Error", bound=CheckpointError)

LEADS_OUT = "a symlink leads out of the checkpoint's directory"
# What Linux itself allows on one path.
_MAX_LINKS = 40
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://")
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Of a file below a root: never a link, and never a wait for the other end of a FIFO.
FILE_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_NOCTTY", 0)
_PLAIN_NAME = re.compile(r"(?!\.)[\w.-]+", re.ASCII)
_UPWARDS = re.compile(r"(\.|%2e)(\.|%2e)", re.IGNORECASE)
_HUB_BLOB = re.compile(r"(?P<cache>.*/models--[^/]+)/blobs/(?P<blob>[0-9a-f]{40}|[0-9a-f]{64})")
_HUB_SNAPSHOT = re.compile(r"(?P<cache>.*/models--[^/]+)/snapshots(/.*)?")
_HUB_FILE = re.compile(
    r".*/models--(?P<org>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})(?P<file>/.*)?", re.ASCII
)
_CUT_URL = re.compile(r"(gs|s3|hf|https?):/([^/].*)", re.DOTALL)
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symlink",
}


def url_scheme(path: str) -> str | None:
    """Returns a URL's scheme (`gs`, `s3`, `https`), or None."""
    match = _URL.match(path)
    return match["scheme"].lower() if match else None


def whole_url(path: str) -> str | None:
    """Repairs a URL that is a `pathlib.Path`."""
    match = _CUT_URL.fullmatch(path)
    return match and f"{match[1]}://{match[2]}"


def shared_path(path: str) -> str:
    """Returns a path as every host of a job has it.

    For files in the hub's cache it is their URL on the hub.
    """
    match = _HUB_FILE.fullmatch(path)
    return path if match is None else f"hf://{match['org']}/{match['name']}@{match['commit']}{match['file'] or ''}"


def is_hub_blob(path: str) -> bool:
    """Tests if a resolved path is a blob of the hub's cache."""
    return _HUB_BLOB.fullmatch(path) is not None


def split_name(name: str, *, path: str | None = None, leaf: str | None = None) -> list[str]:
    """Splits a name that a file gave.

    Absolute and empty names, `..`, NUL, a backslash and encoded dots are refused.
    """
    parts = name.split("/")
    problem = None
    if not name:
        problem = "is empty"
    elif name.startswith("/"):
        problem = "is absolute"
    elif "\0" in name or "\\" in name:
        problem = "holds a NUL or a backslash"
    elif not _encodable(name):
        problem = "is no text that a file system knows"
    elif any(map(_UPWARDS.fullmatch, parts)):
        problem = "leads upwards"
    if problem is not None:
        raise UnsafeCheckpointError(
            f"the file name {name!r} {problem}; names must stay inside the checkpoint", path=path, leaf=leaf
        )
    return [part for part in parts if part not in ("", ".")]


def is_name(text: object) -> bool:
    """Tests if a file's value is a single name, and no path."""
    if not isinstance(text, str):
        return False
    try:
        return split_name(text) == [text]
    except UnsafeCheckpointError:
        return False


def _encodable(name: str) -> bool:
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return True


def _os_error(error: OSError, path: str, leaf: str | None, doing: str) -> Exception:
    """Types an OS error about a path inside the root."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return CheckpointNotFoundError("no such file", path=path, leaf=leaf)
    if error.errno == errno.ENAMETOOLONG:
        return CorruptCheckpointError("the file name is too long for this file system", path=path, leaf=leaf)
    if error.errno == errno.ELOOP:
        return UnsafeCheckpointError("became a symlink while it was opened", path=path, leaf=leaf)
    if error.errno == errno.ENXIO:
        return CorruptCheckpointError("a socket or a device, not a file", path=path, leaf=leaf)
    return io_error(error, doing, path=path, leaf=leaf)


def io_error(error: OSError, doing: str, *, path: str, leaf: str | None = None) -> CheckpointIOError:
    """Types an error of the operating system, with its errno."""
    return CheckpointIOError(f"{doing}: {error.strerror or error}", path=path, leaf=leaf, errno=error.errno)


class Root:
    """Directory that names from files may not leave.

    The caller has named it.

    Attributes:
      named: the absolute path, with symlinks as the caller gave them.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Looks at nothing yet."""
        self.named: str = os.path.abspath(path)
        self._path: str | None = None

    @property
    def path(self) -> str:
        """The directory, resolved once."""
        if self._path is None:
            self._path = os.path.realpath(self.named)
        return self._path

    def join(self, name: str) -> str:
        """Returns the path of a name, for messages."""
        return os.path.join(self.path, name) if name else self.path

    @contextlib.contextmanager
    def _walk(self, name: str, leaf: str | None) -> Generator[tuple[int, str | None, str], None, None]:
        """Yields (directory fd, last component or None, resolved path)."""
        walker = _PathWalker(self, name, leaf)
        try:
            yield walker.run()
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            raise _os_error(error, self.join(name), leaf, "opening it") from error
        finally:
            walker.close()

    def _plain_stat(self, name: str) -> os.stat_result | None:
        """Stats a regular file in the root itself, or returns None.

        Below the root no symlink can lead to it, so that no walk is needed.
        """
        with contextlib.suppress(OSError):  # the walk finds the reason
            if _PLAIN_NAME.fullmatch(name):
                found = os.stat(self.join(name), follow_symlinks=False)
                return found if stat.S_ISREG(found.st_mode) else None
        return None

    def open(self, name: str, *, leaf: str | None = None, is_plain: bool = False) -> tuple[Descriptor, os.stat_result]:
        """Opens a regular file for reading, without blocking.

        `is_plain`: no symlink leads to its directory, so that only a link in its place needs a walk.
        """
        if is_plain or self._plain_stat(name) is not None:
            path = self.join(name)
            with contextlib.suppress(OSError):  # the walk finds the reason
                opened = Descriptor(path, FILE_FLAGS)
                found = os.fstat(opened.number)
                _require_regular(found, path, leaf)
                return opened, found
        with self._walk(name, leaf) as (directory, last, path):
            if last is None:
                raise CorruptCheckpointError("a directory, not a file", path=self.join(name), leaf=leaf)
            opened = Descriptor(last, FILE_FLAGS, directory=directory)
            found = os.fstat(opened.number)
            _require_regular(found, path, leaf)
            return opened, found

    def stat(self, name: str, *, leaf: str | None = None) -> os.stat_result:
        """Returns the stat of the file that `open` would open."""
        if (plain := self._plain_stat(name)) is not None:
            return plain
        with self._walk(name, leaf) as (directory, last, path):
            if last is None:
                raise CorruptCheckpointError("a directory, not a file", path=self.join(name), leaf=leaf)
            found = os.stat(last, dir_fd=directory, follow_symlinks=False)
            _require_regular(found, path, leaf)
            return found

    def locate(self, name: str, *, leaf: str | None = None) -> str:
        """Returns the resolved path of an existing name in the root."""
        with self._walk(name, leaf) as (directory, last, path):
            if last is not None:
                os.stat(last, dir_fd=directory, follow_symlinks=False)
            return path


def _require_regular(found: os.stat_result, path: str, leaf: str | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "of an unknown kind")
        raise CorruptCheckpointError(f"{kind}, not a regular file", path=path, leaf=leaf)


class _PathWalker:
    """A walk from a root down a name, an fd per level."""

    def __init__(self, root: Root, name: str, leaf: str | None):
        self._root = root
        self._name = name
        self._leaf = leaf
        self._pending = split_name(name, path=root.path, leaf=leaf)[::-1]
        self._opened: list[Descriptor] = []
        self._names: list[str] = []
        self._links = 0
        self._top = root.path

    def close(self) -> None:
        while self._opened:
            self._opened.pop().close()

    def _restart(self, top: str, parts: list[str]) -> None:
        self.close()
        self._top = top
        self._names = []
        self._pending = [*self._pending, *parts[::-1]]
        self._opened.append(Descriptor(top, _DIRECTORY_FLAGS))

    def run(self) -> tuple[int, str | None, str]:
        self._restart(self._top, [])
        while self._pending:
            part = self._pending.pop()
            if part in ("", "."):
                continue
            if part == "..":
                if not self._names:
                    raise self._leads_out()
                self._names.pop()
                self._opened.pop().close()
                continue
            found = self._stat(part)
            if stat.S_ISLNK(found.st_mode):
                self._follow(os.readlink(part, dir_fd=self._opened[-1].number))
            elif stat.S_ISDIR(found.st_mode):
                self._opened.append(Descriptor(part, _DIRECTORY_FLAGS, directory=self._opened[-1].number))
                self._names.append(part)
            elif self._pending:
                raise self._error(CorruptCheckpointError, f"{part!r} is not a directory")
            else:
                return self._opened[-1].number, part, os.path.join(self._top, *self._names, part)
        return self._opened[-1].number, None, os.path.join(self._top, *self._names)

    def _stat(self, part: str) -> os.stat_result:
        try:
            return os.stat(part, dir_fd=self._opened[-1].number, follow_symlinks=False)
        except FileNotFoundError:
            if self._links:
                raise self._error(CorruptCheckpointError, "a dangling symlink") from None
            raise

    def _follow(self, target: str) -> None:
        self._links += 1
        if self._top != self._root.path:  # a blob of the hub cache is a file
            raise self._leads_out()
        if self._links > _MAX_LINKS:
            raise self._error(CorruptCheckpointError, "symlinks lead in a circle")
        directory = os.path.join(self._top, *self._names)
        if blob := self._hub_blob(os.path.normpath(os.path.join(directory, target))):
            self._restart(*blob)
        elif target == self._root.path or target.startswith(self._root.path.rstrip("/") + "/"):
            # Walked, not resolved by name: `realpath` lets ".." follow a file, which the kernel does not.
            self._restart(self._root.path, target[len(self._root.path) :].split("/"))
        elif os.path.isabs(target):
            resolved = os.path.realpath(target)
            if resolved != self._root.path and not resolved.startswith(self._root.path.rstrip("/") + "/"):
                raise self._leads_out()
            # `realpath` forgets that what ends in a slash must be a directory.
            ending = ["."] if os.path.basename(target) in ("", ".") else []
            self._restart(self._root.path, [*os.path.relpath(resolved, self._root.path).split("/"), *ending])
        else:
            self._pending.extend(reversed(target.split("/")))

    def _hub_blob(self, target: str) -> tuple[str, list[str]] | None:
        """Returns directory and name of a blob of the hub's cache."""
        blob, snapshot = _HUB_BLOB.fullmatch(target), _HUB_SNAPSHOT.fullmatch(self._root.path)
        if blob and snapshot and blob["cache"] == snapshot["cache"] and not self._pending:
            return blob["cache"] + "/blobs", [blob["blob"]]
        return None

    def _leads_out(self) -> UnsafeCheckpointError:
        return self._error(UnsafeCheckpointError, LEADS_OUT)

    def _error(self, kind: type[_Error], message: str) -> _Error:
        return kind(message, path=self._root.join(self._name), leaf=self._leaf)
