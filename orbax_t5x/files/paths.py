"""Untrusted names become files inside a root, or an error.

This is the only code that joins them to a path. The path that the caller gives is trusted and resolved once; it becomes
a `Root`. A name below it is checked as text, and where a symlink is on its way, what it leads to must lie inside the
root. One exception has a name: a snapshot of the Hugging Face hub cache links to `blobs/<hex>` of the same
`models--…` directory. Files are opened without blocking and must be regular: a FIFO, a socket or a device is refused
before a byte is read.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable
from pathlib import PurePath
from typing import Self

from orbax_t5x.errors import CheckpointIOError, CheckpointNotFoundError, CorruptCheckpointError, UnsafeCheckpointError


class Descriptor:
    """Open file descriptor, closed by `close` or when nothing refers to it any more."""

    number: int = -1

    def __init__(self, path: str | os.PathLike[str], flags: int):
        """Opens a path as `os.open` does, with its errors."""
        self.number = os.open(path, flags)

    def close(self, _close: Callable[[int], None] = os.close) -> None:
        """Closes the descriptor once; the default outlives the module at the interpreter's end."""
        number, self.number = self.number, -1
        if number >= 0:
            _close(number)

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


LEADS_OUT = "a symlink leads out of the checkpoint's directory"
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://")
# Never a wait for the other end of a FIFO.
FILE_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | getattr(os, "O_NOCTTY", 0)
_HUB_BLOB = re.compile(r"(?P<cache>.*/models--[^/]+)/blobs/(?P<blob>[0-9a-f]{40}|[0-9a-f]{64})")
_HUB_SNAPSHOT = re.compile(r"(?P<cache>.*/models--[^/]+)/snapshots(/.*)?")
_CUT_URL = re.compile(r"(gs|s3|hf|https?):/([^/].*)", re.DOTALL)


def url_scheme(path: str) -> str | None:
    """Returns a URL's scheme (`gs`, `s3`, `https`), or None."""
    match = _URL.match(path)
    return match["scheme"].lower() if match else None


def whole_url(path: str) -> str | None:
    """Repairs a URL that is a `pathlib.Path`."""
    match = _CUT_URL.fullmatch(path)
    return match and f"{match[1]}://{match[2]}"


def is_hub_blob(path: str) -> bool:
    """Returns True if a resolved path is a blob of the hub's cache."""
    return _HUB_BLOB.fullmatch(path) is not None


def split_name(name: str, *, path: str | None = None, leaf: str | None = None) -> list[str]:
    """Splits a name that a file gave.

    Absolute and empty names, `..`, NUL and a backslash are refused.
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
    elif ".." in parts:
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


def _os_error(error: OSError, path: str, leaf: str | None) -> Exception:
    """Types an OS error about a path inside the root."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return CheckpointNotFoundError("no such file", path=path, leaf=leaf)
    if error.errno == errno.ENAMETOOLONG:
        return CorruptCheckpointError("the file name is too long for this file system", path=path, leaf=leaf)
    if error.errno == errno.ENXIO:
        return CorruptCheckpointError("a socket or a device, not a file", path=path, leaf=leaf)
    return io_error(error, "opening it", path=path, leaf=leaf)


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

    def resolve(self, name: str, *, leaf: str | None = None) -> tuple[str, os.stat_result]:
        """Returns the path of an existing name inside the root, without symlinks, and its stat."""
        path = self.path
        parts = split_name(name, path=path, leaf=leaf)
        try:
            status = os.lstat(path)
            for part in parts:
                path = os.path.join(path, part)
                status = os.lstat(path)
                if stat.S_ISLNK(status.st_mode):
                    return self._follow(name, leaf)
        except OSError as error:
            raise _os_error(error, self.join(name), leaf) from error
        return path, status

    def _follow(self, name: str, leaf: str | None) -> tuple[str, os.stat_result]:
        """Resolves a name with a symlink on its way."""
        path = self.join(name)
        resolved = os.path.realpath(path)
        if not PurePath(resolved).is_relative_to(self.path) and not self._is_own_blob(resolved):
            raise UnsafeCheckpointError(LEADS_OUT, path=path, leaf=leaf)
        try:
            return resolved, os.stat(resolved)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise CorruptCheckpointError("symlinks lead in a circle", path=path, leaf=leaf) from None
            if error.errno == errno.ENOENT:
                raise CorruptCheckpointError("a dangling symlink", path=path, leaf=leaf) from None
            raise

    def _is_own_blob(self, resolved: str) -> bool:
        """Returns True if a path is a blob of the hub cache that the root is a snapshot of."""
        blob, snapshot = _HUB_BLOB.fullmatch(resolved), _HUB_SNAPSHOT.fullmatch(self.path)
        return blob is not None and snapshot is not None and blob["cache"] == snapshot["cache"]

    def open(self, name: str, *, leaf: str | None = None) -> tuple[Descriptor, os.stat_result]:
        """Opens a regular file for reading, without blocking."""
        path, _ = self.resolve(name, leaf=leaf)
        try:
            opened = Descriptor(path, FILE_FLAGS)
            status = os.fstat(opened.number)
        except OSError as error:
            raise _os_error(error, path, leaf) from error
        require_regular(status, path, leaf)
        return opened, status

    def stat(self, name: str, *, leaf: str | None = None) -> os.stat_result:
        """Returns the stat of the file that `open` would open."""
        path, status = self.resolve(name, leaf=leaf)
        require_regular(status, path, leaf)
        return status

    def locate(self, name: str, *, leaf: str | None = None) -> str:
        """Returns the resolved path of an existing name in the root."""
        return self.resolve(name, leaf=leaf)[0]


_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def require_regular(status: os.stat_result, path: str, leaf: str | None) -> None:
    """Refuses a FIFO, a socket, a device or a directory."""
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "of an unknown kind")
        raise CorruptCheckpointError(f"{kind}, not a regular file", path=path, leaf=leaf)
