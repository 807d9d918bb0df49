"""A directory of this machine as `Files`."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointIOError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LimitExceededError,
    UnsafeCheckpointError,
)
from orbax_t5x.storage.descriptor import Descriptor
from orbax_t5x.storage.files import FileSet
from orbax_t5x.storage.paths import FILE_FLAGS, io_error
from orbax_t5x.storage.store import ArrayDirectory, Files, Look, Subdirectories
from orbax_t5x.storage.tree_checks import TreeSnapshot, check_tree, list_directory

_READ_CHUNK_BYTES = 1 << 24
# Of the root itself, which may be a symlink.
_OPEN_FLAGS = FILE_FLAGS & ~os.O_NOFOLLOW


class LocalFiles(FileSet, Files):
    """Directory or file that the caller named; see `Files` and `Root`."""

    is_remote = False
    can_list = True

    # -- the root itself

    def is_link(self) -> bool:
        return os.path.islink(self.named)

    def is_file(self) -> bool:
        return os.path.isfile(self.named)

    def is_directory(self) -> bool:
        return os.path.isdir(self.named)

    def names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.named))
        except OSError as error:
            raise io_error(error, "listing it", path=self.named) from error

    def subdirectories(self) -> Subdirectories:
        found = Subdirectories([], [])
        links: list[str] = []
        try:
            with os.scandir(self.named) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        links.append(entry.name)
                    elif entry.is_dir(follow_symlinks=False):
                        found.inside.append(entry.name)
        except FileNotFoundError:
            raise CheckpointGoneError("the directory vanished while it was listed", path=self.named) from None
        except OSError as error:
            raise io_error(error, "listing it", path=self.named) from error
        for name in links:
            try:
                if os.path.isdir(self.locate(name)):
                    found.inside.append(name)
            except UnsafeCheckpointError:
                found.outside.append(name)
            except CheckpointError:  # a link to nothing, or in a circle
                continue
        return found

    # -- names below

    def exists(self, name: str = "") -> bool:
        path = os.path.join(self.named, name) if name else self.named
        try:
            os.lstat(path)
            return True
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return False
            raise io_error(error, "reading its status", path=path) from error

    def has_file(self, name: str) -> bool:
        path = os.path.join(self.named, name)
        try:
            mode = os.lstat(path).st_mode
            if not stat.S_ISLNK(mode):
                return stat.S_ISREG(mode)
            self.stat(name)
            return True
        except CheckpointIOError:
            raise
        except UnsafeCheckpointError:
            return True
        except (FileNotFoundError, NotADirectoryError, CheckpointError, ValueError):  # ValueError: a NUL in the path
            return False
        except OSError as error:
            raise io_error(error, "reading its status", path=path) from error

    def has_files(self, names: Sequence[str]) -> list[bool]:
        return [self._has_inside(name) for name in names]

    def _has_inside(self, name: str) -> bool:
        try:
            self.stat(name)
        except CheckpointError:
            return False
        return True

    def require_file(self, name: str) -> None:
        self.stat(name)

    def look(self, name: str = "", *, head: int, tail: int) -> Look:
        if name:
            return self._look_inside(name, head, tail)
        try:
            mode = os.stat(self.named).st_mode
        except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the path
            return Look("missing")
        except OSError as error:
            raise io_error(error, "reading its status", path=self.named) from error
        try:
            if stat.S_ISDIR(mode):
                return Look("directory", names=frozenset(os.listdir(self.named)))
            if not stat.S_ISREG(mode):
                return Look("special")
            opened = Descriptor(self.named, _OPEN_FLAGS)
            return _look_at(opened, os.fstat(opened.number), self.named, head, tail)
        except OSError as error:
            if isinstance(error, CheckpointIOError):
                raise
            raise io_error(error, "reading its status", path=self.named) from error

    def _look_inside(self, name: str, head: int, tail: int) -> Look:
        try:
            opened, found = self.open(name)
        except CheckpointIOError:
            raise
        except CheckpointNotFoundError:
            return Look("missing")
        except UnsafeCheckpointError:
            return Look("outside")
        except CheckpointError:
            return Look("special")
        return _look_at(opened, found, os.path.join(self.named, name), head, tail)

    def read_whole(self, name: str, *, limit: int, leaf: str | None = None, bound: str = "Limits.index_bytes") -> bytes:
        opened, found = self.open(name, leaf=leaf)
        path = self.join(name)
        try:
            if found.st_size > limit:
                raise LimitExceededError(f"{found.st_size} bytes, more than {bound} = {limit}", path=path, leaf=leaf)
            pieces: list[bytes] = []
            size = 0
            # A file that grows while it is read ends where it ended when it was opened.
            while size < found.st_size:
                piece = os.pread(opened.number, min(found.st_size - size, _READ_CHUNK_BYTES), size)
                if not piece:
                    raise CorruptCheckpointError(f"ends after {size} bytes; it had {found.st_size}", path=path)
                pieces.append(piece)
                size += len(piece)
            return b"".join(pieces)
        except OSError as error:
            if isinstance(error, CheckpointIOError):
                raise
            raise io_error(error, "reading it", path=path, leaf=leaf) from error
        finally:
            opened.close()

    def read_end(self, name: str, size: int) -> bytes:
        opened, found = self.open(name)
        try:
            return os.pread(opened.number, size, max(0, found.st_size - size))
        except OSError as error:
            raise io_error(error, "reading it", path=self.join(name)) from error
        finally:
            opened.close()

    # -- announcements

    def stat_ahead(self, names: Sequence[str], *, beside: Sequence[str] = ()) -> None:
        """Does nothing: a local stat does not wait."""

    def read_ahead(self, names: Sequence[str], *, limit: int) -> None:
        """Does nothing, likewise."""

    # -- what TensorStore reads by itself

    def kvstore(self, name: str) -> dict[str, Any]:
        return _file_kvstore(self.locate(name) if name else self.path)

    def entries(self, name: str) -> dict[str, bool]:
        found = list_directory(self.locate(name) if name else self.path)
        return {entry: there.is_dir(follow_symlinks=False) for entry, there in found.items()}

    def require_plain(self, name: str, *, leaf: str | None = None) -> None:
        check_tree(self, name, leaf=leaf)

    def snapshot(self, names: Sequence[str], metadata: str, *, leaf: str | None = None) -> TreeSnapshot:
        return TreeSnapshot(self, names, leaf=leaf)

    def array_directory(self, directory: str, metadata: str, *, limit: int, leaf: str | None = None) -> ArrayDirectory:
        with self._walk(directory, leaf) as (fd, last, path):
            found = os.fstat(fd) if last is None else os.stat(last, dir_fd=fd, follow_symlinks=False)
            files = self.snapshot([directory], metadata, leaf=leaf)
            data = _read_plain(fd, metadata, limit) if last is None else None
        if data is None:
            # A link, or something that is wrong: the walk down the whole name follows it, or raises the error.
            data = self.read_whole(f"{directory}/{metadata}", limit=limit, leaf=leaf, bound="Limits.json_bytes")
        return ArrayDirectory(path, (found.st_dev, found.st_ino), _file_kvstore(path), data, files)

    def checked(self, what: str, name: str, check: Callable[[], None]) -> None:
        check()

    def known_metadata(self, kvstore: Mapping[str, Any]) -> Any:
        return None

    def note_array(self, array: Any) -> None:
        """Does nothing: no other process opens the array."""


def _look_at(opened: Descriptor, found: os.stat_result, path: str, head: int, tail: int) -> Look:
    """Reads the first and last bytes of an open file, and closes it."""
    try:
        if not stat.S_ISREG(found.st_mode):
            return Look("special")
        first = os.pread(opened.number, head, 0)
        last = os.pread(opened.number, tail, max(0, found.st_size - tail))
        return Look("file", first, last, found.st_size)
    except OSError as error:
        raise io_error(error, "reading its first bytes", path=path) from error
    finally:
        opened.close()


def _file_kvstore(path: str) -> dict[str, Any]:
    return {"driver": "file", "path": path}


def _read_plain(directory: int, name: str, limit: int) -> bytes | None:
    """Reads all bytes of a regular file in an open directory; None for anything else, and on failure."""
    try:
        fd = os.open(name, FILE_FLAGS, dir_fd=directory)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
                return None
            data = os.pread(fd, found.st_size, 0)
        finally:
            os.close(fd)
    except OSError:
        return None
    return data if len(data) == found.st_size else None
