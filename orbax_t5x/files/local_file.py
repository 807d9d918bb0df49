"""Files of this machine, opened on their first read and kept open.

This is the only code that reads array bytes from local files.

A `File` is checked and measured when the checkpoint is opened (`stat`, no read). Its size, modification time and inode
are compared with those measured whenever it is opened, and by `File.check_unchanged` after reads, so that bytes of
another file are never returned. A file that is replaced by rename while it is open here is read on: the open one has
not changed. Reads are `preadv` into the caller's buffers, never a mapping (a truncated mapping kills the process): a
short read is retried, the end of the file is damage, an error of the operating system names file and leaf. Nothing here
allocates by what a file claims.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from orbax_t5x.errors import (
    CheckpointGoneError,
    CheckpointIOError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    for_caller,
)
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.paths import Descriptor, Root, io_error
from orbax_t5x.files.windows import fill_held, is_held

# The most buffers that one preadv takes.
_MAX_BUFFERS = 1024


class FileIdentity(NamedTuple):
    """Size, modification time and inode of a file."""

    size: int
    modified_ns: int
    inode: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileIdentity:
        """Returns the identity of the file of a stat result."""
        return cls(found.st_size, found.st_mtime_ns, found.st_ino)


class OpenFiles:
    """Open descriptors of a root's files.

    There are at most `most` beyond those in use. They are closed by `close`, or when neither this nor a file of theirs
    is referred to any more. By name: a file refers to them, and a cycle would keep descriptors until a garbage
    collection.
    """

    def __init__(self, most: int):
        self._most = most
        self._lock = threading.Lock()
        self._open: OrderedDict[str, Descriptor] = OrderedDict()
        self._users: dict[str, int] = {}
        self._closed = False

    def require_open(self, root: Root) -> None:
        """Raises ValueError after `close`."""
        if self._closed:
            raise for_caller(ValueError(f"{root.path}: the checkpoint is closed; its leaves can no longer be read"))

    def acquire(self, file: File, leaf: str | None) -> int:
        """Returns the descriptor of a file, kept open until `release`."""
        with self._lock:
            if self._closed:
                file.require_open()
            opened = self._open.get(file.name)
            if opened is None:
                opened = self._open[file.name] = self._open_file(file, leaf)
            else:
                self._open.move_to_end(file.name)
            self._users[file.name] = self._users.get(file.name, 0) + 1
            if len(self._open) > self._most:
                self._close_idle(keep=self._most)
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


class File:
    """Regular file inside a root; reads may come from any thread.

    Attributes:
      name: relative to the root.
      path: for messages.
      size: in bytes, when the checkpoint was opened.
      limits: those of its root.
      is_remote: see `StoredFile`.
    """

    __slots__ = ("_identity", "_opened", "_root", "limits", "name", "path", "size")
    is_remote = False

    def __init__(self, root: Root, opened: OpenFiles, name: str, found: os.stat_result, limits: Limits):
        self._root = root
        self.limits = limits
        self._opened = opened
        self._identity = FileIdentity.of(found)
        self.name: str = name
        self.path: str = root.join(name)
        self.size: int = found.st_size

    def read_into(self, offset: int, buffers: Sequence[np.ndarray], *, leaf: str | None = None) -> None:
        """Fills buffers in order with the bytes from `offset` on."""
        if is_held(self) and fill_held(self, offset, buffers):
            self.require_open()
            return
        fd = self._opened.acquire(self, leaf)
        try:
            for first in range(0, len(buffers), _MAX_BUFFERS):
                offset = self._fill(fd, offset, buffers[first : first + _MAX_BUFFERS], leaf)
        finally:
            self._opened.release(self)

    def ahead(self, ranges: Iterable[tuple[int, int]]) -> File:
        """Implements `StoredBytes.ahead`: each range is read when it is requested."""
        return self

    def check_unchanged(self, *, leaf: str | None = None) -> None:
        """Proves that the file is unchanged since the opening."""
        if is_held(self):
            return
        fd = self._opened.acquire(self, leaf)
        try:
            found = os.fstat(fd)
        except OSError as error:
            raise io_error(error, "reading its status", path=self.path, leaf=leaf) from error
        finally:
            self._opened.release(self)
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
        self._opened.require_open(self._root)

    def open(self, leaf: str | None) -> Descriptor:
        """Opens the file that was measured."""
        try:
            opened, found = self._root.open(self.name, leaf=leaf)
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
