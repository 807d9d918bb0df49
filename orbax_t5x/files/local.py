"""A directory of this machine as `Files`.

This is the only code that reads array bytes from local files.

A `File` is checked and measured when the checkpoint is opened (`stat`, no read), opened on the first read and kept
open. Its size, modification time and inode are compared with those measured whenever it is opened, and by
`File.check_unchanged` after reads, so that bytes of another file are never returned. A file
that is replaced by rename while it is open here is read on: the open one has not changed. Reads are `preadv` into the
caller's buffers, never a mapping (a truncated mapping kills the process): a short read is retried, the end of the file
is damage, an error of the operating system names file and leaf. Nothing here allocates by what a file claims.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from orbax_t5x import on_demand
from orbax_t5x.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointIOError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LimitExceededError,
    UnsafeCheckpointError,
    for_caller,
)
from orbax_t5x.files.interface import ArrayDirectory, Files, Look, Snapshot, Subdirectories
from orbax_t5x.files.paths import FILE_FLAGS, Descriptor, FileIdentity, Root, io_error
from orbax_t5x.files.ranges import ANYONE, BoundedRange, ReadContext
from orbax_t5x.files.windows import fill_held, is_held

# Of chunked arrays only.
_tree_stamp: Callable[..., str] = on_demand.function("orbax_t5x.files.tree_checks", "tree_stamp")
_check_tree = on_demand.function("orbax_t5x.files.tree_checks", "check_tree")
_list_directory = on_demand.function("orbax_t5x.files.tree_checks", "list_directory")

_READ_CHUNK_BYTES = 1 << 24
# Of the root itself, which may be a symlink.
_OPEN_FLAGS = FILE_FLAGS & ~os.O_NOFOLLOW
# Enough for any real bundle's shards, far below the usual limit of 1,024 descriptors and workable below one of 256.
_MAX_OPEN_FILES = 64
# The most buffers that one preadv takes.
_MAX_BUFFERS = 1024


class File:
    """Regular file inside a root.

    `LocalFiles.file` makes it; reads may come from any thread.

    Attributes:
      name: relative to the root.
      path: for messages.
      size, known_size: in bytes, when the checkpoint was opened.
      is_remote: see `StoredFile`.
    """

    __slots__ = ("_files", "_identity", "known_size", "name", "path", "size")
    is_remote = False

    def __init__(self, files: LocalFiles, name: str, found: os.stat_result):
        self._files = files
        self._identity = FileIdentity.of(found)
        self.name: str = name
        self.path: str = files.join(name)
        self.size: int = found.st_size
        self.known_size: int = found.st_size

    def read_into(self, offset: int, buffers: Sequence[np.ndarray], *, leaf: str | None = None) -> None:
        """Fills buffers in order with the bytes from `offset` on."""
        if is_held(self) and fill_held(self, offset, buffers):
            self.require_open()
            return
        fd = self._files.acquire(self, leaf)
        try:
            for first in range(0, len(buffers), _MAX_BUFFERS):
                offset = self._fill(fd, offset, buffers[first : first + _MAX_BUFFERS], leaf)
        finally:
            self._files.release(self)

    def require_size(self, size: int) -> bool:
        """Implements `StoredFile.require_size`."""
        return self.size == size

    def load(self, limit: int) -> None:
        """Does nothing: local reads need no prefetch; see `StoredFile.load`."""

    def ahead(self, ranges: Iterable[tuple[int, int]], into: Iterable[Sequence[np.ndarray]] = ()) -> File:
        """Implements `StoredFile.ahead`: each range is read when it is requested."""
        return self

    def check_unchanged(self, *, leaf: str | None = None) -> None:
        """Proves that the file is unchanged since the opening."""
        if is_held(self):
            return
        fd = self._files.acquire(self, leaf)
        try:
            found = os.fstat(fd)
        except OSError as error:
            raise io_error(error, "reading its status", path=self.path, leaf=leaf) from error
        finally:
            self._files.release(self)
        if FileIdentity.of(found) != self._identity:
            raise CheckpointGoneError("changed after the checkpoint was opened", path=self.path, leaf=leaf)

    def _fill(self, fd: int, offset: int, buffers: Sequence[np.ndarray], leaf: str | None) -> int:
        missing = sum([buffer.nbytes for buffer in buffers])
        readable: Sequence[Any] = buffers  # to type checkers arrays are buffers from Python 3.12 on
        while missing:
            try:
                got = os.preadv(fd, readable, offset)
            except OSError as error:
                if error.errno == errno.ESTALE:
                    raise CheckpointGoneError("vanished while it was read", path=self.path, leaf=leaf) from error
                raise io_error(error, f"reading at byte {offset}", path=self.path, leaf=leaf) from error
            if not got:
                raise CorruptCheckpointError(
                    f"ends at byte {offset}, {missing} bytes early; it was {self.size} bytes long when it was opened",
                    path=self.path,
                    leaf=leaf,
                )
            offset += got
            missing -= got
            if missing:
                readable = _after(readable, got)
        return offset

    def read(self, offset: int, size: int, *, leaf: str | None = None) -> bytearray:
        """Reads `size` bytes from `offset`; the caller has compared `size` with limits."""
        if offset < 0 or size < 0 or offset + size > self.size:
            raise CorruptCheckpointError(
                f"bytes {offset} to {offset + size} requested of a file of {self.size} bytes", path=self.path, leaf=leaf
            )
        data = bytearray(size)
        if size:
            self.read_into(offset, [np.frombuffer(data, np.uint8)], leaf=leaf)
        return data

    def require_open(self) -> None:
        """Raises ValueError once the checkpoint was closed."""
        self._files.require_open()

    def open(self, leaf: str | None) -> Descriptor:
        """Opens the file that was measured."""
        try:
            opened, found = self._files.open(self.name, leaf=leaf)
        except CheckpointNotFoundError as error:
            raise CheckpointGoneError("vanished after the checkpoint was opened", path=self.path, leaf=leaf) from error
        if FileIdentity.of(found) != self._identity:
            opened.close()
            raise CheckpointGoneError("was replaced after the checkpoint was opened", path=self.path, leaf=leaf)
        return opened


def _after(buffers: Sequence[np.ndarray], done: int) -> list[np.ndarray]:
    """Returns the rest of the buffers after `done` bytes."""
    rest: list[np.ndarray] = []
    for buffer in buffers:
        if done < buffer.nbytes:
            rest.append(buffer.reshape(-1).view(np.uint8)[done:] if done else buffer)
            done = 0
        else:
            done -= buffer.nbytes
    return rest


class LocalFiles(Root, Files):
    """Directory or file that the caller named; see `Files` and `Root`.

    At most `max_open` descriptors are open beyond those in use at the moment. They are closed by `close`, or when
    neither this nor one of its files is referred to any more.
    """

    is_remote = False
    can_list = True

    def __init__(self, path: str | os.PathLike[str], *, max_open: int = _MAX_OPEN_FILES):
        super().__init__(path)
        self._max_open = max_open
        self._lock = threading.Lock()
        # By name: a file refers to its set, and a cycle would keep descriptors until a garbage collection.
        self._open: OrderedDict[str, Descriptor] = OrderedDict()
        self._users: dict[str, int] = {}
        # Of arrays: their snapshots prove, before each read, that no symlink leads to them.
        self._plain_directories: set[str] = set()
        self._closed = False

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
        for name, entry in _list_directory(self.named).items():
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
        return [self._has_inside(name) for name in names]

    def _has_inside(self, name: str) -> bool:
        try:
            self.stat(name)
        except CheckpointError:
            return False
        return True

    def look(self, name: str = "", *, head: int, tail: int) -> Look:
        if name:
            return self._look_inside(name, head, tail)
        try:
            mode = os.stat(self.named).st_mode
            if stat.S_ISDIR(mode):
                return Look("directory", names=frozenset(os.listdir(self.named)))
            if not stat.S_ISREG(mode):
                return Look("special")
            opened = Descriptor(self.named, _OPEN_FLAGS)
            found = os.fstat(opened.number)
        except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the path
            return Look("missing")
        except OSError as error:
            raise io_error(error, "reading its status", path=self.named) from error
        return _look_at(opened, found, self.named, head, tail)

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
        with opened:
            if found.st_size > limit:
                message = f"{found.st_size} bytes, more than {bound} = {limit}"
                raise LimitExceededError(message, path=self.join(name), leaf=leaf)
            return self._read(opened, name, slice(0, found.st_size), leaf)

    def read_end(self, name: str, size: int) -> bytes:
        opened, found = self.open(name)
        with opened:
            return self._read(opened, name, slice(max(0, found.st_size - size), found.st_size), None)

    def read_range(self, name: str, wanted: BoundedRange, context: ReadContext = ANYONE) -> bytes | None:
        self.require_open()
        leaf = context.leaf
        if name.rpartition("/")[0] in self._plain_directories:
            with contextlib.suppress(OSError):  # the walk below finds the reason
                opened = Descriptor(self.join(name), FILE_FLAGS)
                try:
                    found = os.fstat(opened.number)
                    if stat.S_ISREG(found.st_mode):
                        place = wanted.within(found.st_size, "the file", path=self.join(name), leaf=leaf)
                        data = os.pread(opened.number, place.stop - place.start, place.start)
                        if len(data) == place.stop - place.start:
                            return data
                finally:
                    opened.close()
        try:
            opened, found = self.open(name, leaf=context.leaf)
        except CheckpointNotFoundError:
            return None
        with opened:
            place = wanted.within(found.st_size, "the file", path=self.join(name), leaf=context.leaf)
            return self._read(opened, name, place, context.leaf)

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
        return File(self, name, self.stat(name, leaf=leaf))

    def require_open(self) -> None:
        """Raises ValueError after `close`."""
        if self._closed:
            raise for_caller(ValueError(f"{self.path}: the checkpoint is closed; its leaves can no longer be read"))

    def acquire(self, file: File, leaf: str | None) -> int:
        """Returns the descriptor of a file, kept open until `release`."""
        with self._lock:
            self.require_open()
            opened = self._open.get(file.name)
            if opened is None:
                opened = self._open[file.name] = self._open_file(file, leaf)
            else:
                self._open.move_to_end(file.name)
            self._users[file.name] = self._users.get(file.name, 0) + 1
            if len(self._open) > self._max_open:
                self._close_idle(keep=self._max_open)
            return opened.number

    def release(self, file: File) -> None:
        """Ends a use of a descriptor."""
        with self._lock:
            users = self._users[file.name] - 1
            if users:
                self._users[file.name] = users
                return
            del self._users[file.name]
            if self._closed:
                self._open.pop(file.name).close()

    def _open_file(self, file: File, leaf: str | None) -> Descriptor:
        try:
            return file.open(leaf)
        except CheckpointIOError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            # The process is short of descriptors: give back what this checkpoint can spare, then try once more.
            self._close_idle(keep=0)
            return file.open(leaf)

    def _close_idle(self, keep: int) -> None:
        """Closes the files unused for longest."""
        idle = [name for name in self._open if name not in self._users]
        for name in idle[: max(0, len(self._open) - keep)]:
            self._open.pop(name).close()

    def close(self) -> None:
        """Closes the files; later reads are a ValueError."""
        with self._lock:
            self._closed = True
            self._close_idle(keep=0)

    # -- what TensorStore reads by itself

    def kvstore(self, name: str) -> dict[str, Any]:
        return {"driver": "file", "path": self.locate(name) if name else self.path}

    def entries(self, name: str) -> dict[str, bool]:
        found = _list_directory(self.locate(name) if name else self.path)
        return {entry: there.is_dir(follow_symlinks=False) for entry, there in found.items()}

    def require_plain(self, name: str, *, leaf: str | None = None) -> None:
        _check_tree(self, name, leaf=leaf)

    def stamp(self, names: Sequence[str], metadata: str, *, leaf: str | None = None) -> Any:
        return _tree_stamp(self, names, leaf=leaf)

    def require_stamp(self, names: Sequence[str], metadata: str, stamp: Any, *, leaf: str | None = None) -> Any:
        if self.stamp(names, metadata, leaf=leaf) != stamp:
            raise CheckpointGoneError("changed after the checkpoint was opened", path=self.join(names[0]), leaf=leaf)
        return stamp

    def array_directory(self, directory: str, metadata: str, *, limit: int, leaf: str | None = None) -> ArrayDirectory:
        with self._walk(directory or ".", leaf) as (fd, last, path):
            found = os.fstat(fd) if last is None else os.stat(last, dir_fd=fd, follow_symlinks=False)
            files = Snapshot(self, [directory], metadata, leaf=leaf)
            data = _read_plain(fd, metadata, limit) if last is None else None
            if path == self.join(directory):
                self._plain_directories.add(directory)
        if data is None:
            # A link, or something that is wrong: the walk down the whole name follows it, or raises the error.
            data = self.read_whole(os.path.join(directory, metadata), limit=limit, leaf=leaf, bound="Limits.json_bytes")
        return ArrayDirectory(path, (found.st_dev, found.st_ino), {"driver": "file", "path": path}, data, files)


def _look_at(opened: Descriptor, found: os.stat_result, path: str, head: int, tail: int) -> Look:
    """Reads an open file's first and last bytes, and closes it."""
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


def _read_plain(directory: int, name: str, limit: int) -> bytes | None:
    """Reads a regular file in an open directory, or returns None."""
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
