"""A directory of this machine as `Files`."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from typing import Any

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointIOError,
    CorruptCheckpointError,
    LimitExceededError,
    UnsafeCheckpointError,
)
from orbax_t5x.files.interface import ArrayDirectory, Files, Look, Snapshot, Subdirectories
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.local_file import File, OpenFiles
from orbax_t5x.files.paths import FILE_FLAGS, Descriptor, Root, io_error
from orbax_t5x.files.tree_checks import check_tree, list_directory, tree_stamp

_READ_CHUNK_BYTES = 1 << 24
# Enough for any real bundle's shards, far below the usual limit of 1,024 descriptors and workable below one of 256.
_MAX_OPEN_FILES = 64


class LocalFiles(Root, Files):
    """Directory or file that the caller named; see `Files` and `Root`."""

    is_remote = False
    can_list = True

    def __init__(self, path: str | os.PathLike[str], *, limits: Limits | None = None, max_open: int = _MAX_OPEN_FILES):
        super().__init__(path)
        self.limits: Limits = limits or Limits()
        self._opened = OpenFiles(max_open)

    # -- the root itself

    def is_link(self) -> bool:
        return os.path.islink(self.named)

    def is_directory(self) -> bool:
        return os.path.isdir(self.named)

    def names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.named))
        except OSError as error:
            raise io_error(error, "listing it", path=self.named) from error

    def subdirectories(self) -> Subdirectories:
        found = Subdirectories([], [])
        for name, entry in list_directory(self.named).items():
            try:
                if entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(self.locate(name))):
                    found.inside.append(name)
            except UnsafeCheckpointError:
                found.outside.append(name)
            except CheckpointError:  # a link to nothing, or in a circle
                continue
        return found

    # -- names below

    def exists(self, name: str = "") -> bool:
        return self._mode(name) is not None

    def _mode(self, name: str) -> int | None:
        """Returns the mode of a name without following a link, or None."""
        path = os.path.join(self.named, name) if name else self.named
        try:
            return os.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the path
            return None
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return None
            raise io_error(error, "reading its status", path=path) from error

    def has_file(self, name: str) -> bool:
        mode = self._mode(name)
        if mode is None or not stat.S_ISLNK(mode):
            return mode is not None and stat.S_ISREG(mode)
        try:
            self.stat(name)
        except CheckpointIOError:
            raise
        except CheckpointError as error:
            return isinstance(error, UnsafeCheckpointError)
        return True

    def has_files(self, names: Sequence[str]) -> list[bool]:
        found: list[bool] = []
        for name in names:
            try:
                self.stat(name)
                found.append(True)
            except CheckpointError:
                found.append(False)
        return found

    def look(self, name: str = "", *, head: int, tail: int) -> Look:
        path = os.path.join(self.named, name) if name else self.named
        try:
            if not name:
                mode = os.stat(path).st_mode
                if stat.S_ISDIR(mode):
                    return Look("directory", names=frozenset(os.listdir(path)))
                if not stat.S_ISREG(mode):
                    return Look("special")
            opened = self.open(name)[0] if name else Descriptor(path, FILE_FLAGS)
        except CheckpointIOError:
            raise
        except UnsafeCheckpointError:
            return Look("outside")
        except CorruptCheckpointError:
            return Look("special")
        except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the path
            return Look("missing")
        except OSError as error:
            raise io_error(error, "reading its status", path=path) from error
        try:
            return _look_at(opened.number, path, head, tail)
        finally:
            opened.close()

    def read_whole(self, name: str, *, limit: int, leaf: str | None = None, bound: str = "Limits.index_bytes") -> bytes:
        opened, found = self.open(name, leaf=leaf)
        with opened:
            if found.st_size > limit:
                message = f"{found.st_size} bytes, more than {bound} = {limit}"
                raise LimitExceededError(message, path=self.join(name), leaf=leaf)
            return self._read(opened, name, slice(0, found.st_size), leaf)

    def read_end(self, name: str, size: int) -> bytes:
        opened, found = self.open(name)
        with opened:
            return self._read(opened, name, slice(max(0, found.st_size - size), found.st_size), None)

    def _read(self, opened: Descriptor, name: str, place: slice, leaf: str | None) -> bytes:
        """Reads bytes of an open file."""
        pieces: list[bytes] = []
        at = place.start
        while at < place.stop:
            try:
                piece = os.pread(opened.number, min(place.stop - at, _READ_CHUNK_BYTES), at)
            except OSError as error:
                raise io_error(error, "reading it", path=self.join(name), leaf=leaf) from error
            if not piece:
                message = f"ends after {at} bytes; it had {place.stop} or more"
                raise CorruptCheckpointError(message, path=self.join(name), leaf=leaf)
            pieces.append(piece)
            at += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    # -- open files

    def file(self, name: str, *, leaf: str | None = None) -> File:
        """Stats a file without reading it."""
        return File(self, self._opened, name, self.stat(name, leaf=leaf), self.limits)

    def require_open(self) -> None:
        """Raises ValueError after `close`."""
        self._opened.require_open(self)

    def close(self) -> None:
        """Closes the files; later reads are a ValueError."""
        self._opened.close()

    # -- what TensorStore reads by itself

    def kvstore(self, name: str, metadata: str, files: Callable[[], Sequence[str]]) -> dict[str, Any]:
        return {"driver": "file", "path": self.locate(name) if name else self.path}

    def entries(self, name: str) -> dict[str, bool]:
        entries = list_directory(self.locate(name) if name else self.path)
        return {entry_name: entry.is_dir(follow_symlinks=False) for entry_name, entry in entries.items()}

    def require_plain(self, name: str, *, leaf: str | None = None) -> None:
        check_tree(self, name, leaf=leaf)

    def stamp(self, names: Sequence[str], metadata: str, *, leaf: str | None = None) -> Any:
        return tree_stamp(self, names, leaf=leaf)

    def require_stamp(self, names: Sequence[str], metadata: str, stamp: Any, *, leaf: str | None = None) -> Any:
        if self.stamp(names, metadata, leaf=leaf) != stamp:
            raise CheckpointGoneError("changed after the checkpoint was opened", path=self.join(names[0]), leaf=leaf)
        return stamp

    def array_directory(self, directory: str, metadata: str, *, limit: int, leaf: str | None = None) -> ArrayDirectory:
        path, found = self.resolve(directory or ".", leaf=leaf)
        files = Snapshot(self, [directory], metadata, leaf=leaf)
        name = os.path.join(directory, metadata)
        data = self.read_whole(name, limit=limit, leaf=leaf, bound="Limits.json_bytes")
        return ArrayDirectory(path, (found.st_dev, found.st_ino), data, files)


def _look_at(fd: int, path: str, head: int, tail: int) -> Look:
    """Reads an open file's first and last bytes."""
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return Look("special")
        last = os.pread(fd, tail, max(0, found.st_size - tail))
        return Look("file", os.pread(fd, head, 0), last, found.st_size)
    except OSError as error:
        raise io_error(error, "reading its first bytes", path=path) from error
