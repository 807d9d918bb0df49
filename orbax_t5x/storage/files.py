"""Ranged reads on the files of a checkpoint: the only code that reads array bytes from local files.

A `File` is checked and measured when the checkpoint is opened (`stat`, no read), opened on the first read and kept
open. Its size, modification time and inode are compared with what was measured whenever it is opened, and by
`File.check_unchanged` after reads, so that bytes of another file are never returned. A file
that is replaced by rename while it is open here is read on: the open one has not changed. Reads are `preadv` into the
caller's buffers, never a mapping (a truncated mapping kills the process): a short read is retried, the end of the file
is damage, an error of the operating system names file and leaf. Nothing here allocates by what a file claims.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from orbax_t5x.errors import (
    CheckpointGoneError,
    CheckpointIOError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    for_caller,
)
from orbax_t5x.storage.descriptor import Descriptor
from orbax_t5x.storage.paths import FileIdentity, Root, io_error
from orbax_t5x.storage.store import OpenFiles
from orbax_t5x.storage.transcript import Viewpoint, current_transcript, observed
from orbax_t5x.storage.windows import fill_held, is_held

# Enough for any real bundle's shards, far below the usual limit of 1,024 descriptors and workable below one of 256.
_MAX_OPEN_FILES = 64
# The most buffers that one preadv takes.
_MAX_BUFFERS = 1024


class File:
    """A regular file inside a root. Made by `FileSet.file`; reads may come from any thread.

    Attributes:
      name: relative to the root.
      path: for messages.
      size: in bytes, when the checkpoint was opened.
    """

    __slots__ = ("_files", "_identity", "_viewpoint", "name", "path", "size")

    def __init__(self, files: FileSet, name: str, found: os.stat_result):
        self._files = files
        self._identity = FileIdentity.of(found)
        transcript = current_transcript()
        # Of a file that another process has measured, until this one has opened it.
        self._viewpoint: Viewpoint | None = None if transcript is None else transcript.viewpoint
        self.name: str = name
        self.path: str = files.root.join(name)
        self.size: int = found.st_size

    def read_into(self, offset: int, buffers: Sequence[np.ndarray], *, leaf: str | None = None) -> None:
        """Fills buffers (contiguous, of any dtype) with bytes as they are, one after the other, from `offset`."""
        if is_held(self) and fill_held(self, offset, buffers):
            self.require_open()
            return
        fd = self._files.acquire(self, leaf)
        try:
            if len(buffers) <= _MAX_BUFFERS:
                self._fill(fd, offset, buffers, leaf)
                return
            for first in range(0, len(buffers), _MAX_BUFFERS):
                offset = self._fill(fd, offset, buffers[first : first + _MAX_BUFFERS], leaf)
        finally:
            self._files.release(self)

    @property
    def known_size(self) -> int:
        """Implements `StoredFile.known_size`."""
        return self.size

    def require_size(self, size: int) -> bool:
        """Implements `StoredFile.require_size`."""
        return self.size == size

    def load(self, limit: int) -> None:
        """Does nothing: local reads need no prefetch; see `StoredFile.load`."""

    def ahead(self, ranges: Iterable[tuple[int, int]], into: Iterable[Sequence[np.ndarray]] = ()) -> File:
        """Implements `StoredFile.ahead`: each range is read when it is requested."""
        return self

    def check_unchanged(self, *, leaf: str | None = None) -> None:
        """Proves that the file is what it was when the checkpoint was opened; to be called after reading.

        It costs one `fstat`. A file that is the same then was the same before.
        """
        if not is_held(self):
            observed(["unchanged", self.path, leaf], lambda: self._check_unchanged(leaf))

    def _check_unchanged(self, leaf: str | None) -> None:
        fd = self._files.acquire(self, leaf)
        try:
            if FileIdentity.of(os.fstat(fd)) != self._identity:
                raise CheckpointGoneError("changed after the checkpoint was opened", path=self.path, leaf=leaf)
        except OSError as error:
            if isinstance(error, CheckpointGoneError):
                raise
            raise io_error(error, "reading its status", path=self.path, leaf=leaf) from error
        finally:
            self._files.release(self)

    def _fill(self, fd: int, offset: int, buffers: Sequence[np.ndarray], leaf: str | None) -> int:
        missing = sum([buffer.nbytes for buffer in buffers])
        while missing:
            got = self._preadv(fd, offset, buffers, leaf)
            if not got:
                raise CorruptCheckpointError(
                    f"ends at byte {offset}, {missing} bytes early; it was {self.size} bytes long when it was opened",
                    path=self.path,
                    leaf=leaf,
                )
            offset += got
            missing -= got
            if missing:
                buffers = _after(buffers, got)
        return offset

    def _preadv(self, fd: int, offset: int, buffers: Sequence[Any], leaf: str | None) -> int:
        # Any: to type checkers arrays are buffers from Python 3.12 on.
        try:
            return os.preadv(fd, buffers, offset)
        except OSError as error:
            if error.errno == errno.ESTALE:
                raise CheckpointGoneError("vanished while it was read", path=self.path, leaf=leaf) from error
            raise io_error(error, f"reading at byte {offset}", path=self.path, leaf=leaf) from error

    def read(self, offset: int, size: int, *, leaf: str | None = None) -> bytearray:
        """Reads `size` bytes from `offset`; the caller has compared `size` with limits."""
        if offset < 0 or size < 0 or offset + size > self.size:
            raise CorruptCheckpointError(
                f"bytes {offset} to {offset + size} requested of a file of {self.size} bytes", path=self.path, leaf=leaf
            )
        request = ["bytes", self.path, offset, size]
        return observed(request, lambda: self._read(offset, size, leaf), unpack=bytearray)

    def _read(self, offset: int, size: int, leaf: str | None) -> bytearray:
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
            opened, found = self._files.root.open(self.name, leaf=leaf)
        except CheckpointNotFoundError as error:
            if self._viewpoint is not None:
                raise self._difference(self._viewpoint, "missing", leaf) from error
            raise CheckpointGoneError("vanished after the checkpoint was opened", path=self.path, leaf=leaf) from error
        if self._viewpoint is not None:
            self._compare(self._viewpoint, FileIdentity.of(found), leaf)
        if FileIdentity.of(found) != self._identity:
            opened.close()
            raise CheckpointGoneError("was replaced after the checkpoint was opened", path=self.path, leaf=leaf)
        return opened

    def _compare(self, viewpoint: Viewpoint, own: FileIdentity, leaf: str | None) -> None:
        """Compares the file with what another process has measured, and keeps this process's measurement.

        Each host may have the files on a disk of its own, where inodes and modification times are others.
        """
        there = self._identity
        if own.size != there.size:
            raise self._difference(viewpoint, own.size, leaf)
        if own.inode == there.inode and own.modified_ns != there.modified_ns:
            raise CheckpointGoneError("changed after the checkpoint was opened", path=self.path, leaf=leaf)
        self._identity = own
        self._viewpoint = None

    def _difference(self, viewpoint: Viewpoint, here: object, leaf: str | None) -> CheckpointGoneError:
        message, fix = viewpoint.difference("its size in bytes", here, self._identity.size)
        return CheckpointGoneError(message, path=self.path, leaf=leaf, fix=fix)


def _after(buffers: Sequence[np.ndarray], done: int) -> list[np.ndarray]:
    """Returns views of the buffers that are still to fill after their first `done` bytes."""
    rest: list[np.ndarray] = []
    for buffer in buffers:
        if done < buffer.nbytes:
            rest.append(buffer.reshape(-1).view(np.uint8)[done:] if done else buffer)
            done = 0
        else:
            done -= buffer.nbytes
    return rest


class FileSet(OpenFiles):
    """The open files of one checkpoint: at most `max_open` descriptors beyond those in use at the moment.

    They are closed by `close`, or when neither the set nor one of its files is referred to any more.
    """

    def __init__(self, root: Root, *, max_open: int = _MAX_OPEN_FILES):
        self.root = root
        self._max_open = max_open
        self._lock = threading.Lock()
        # By name: a file refers to its set, and a cycle would keep descriptors until a garbage collection.
        self._open: OrderedDict[str, Descriptor] = OrderedDict()
        self._users: dict[str, int] = {}
        self._closed = False

    def file(self, name: str, *, leaf: str | None = None) -> File:
        return File(self, name, self.root.stat(name, leaf=leaf))

    def require_open(self) -> None:
        if self._closed:
            raise for_caller(
                ValueError(f"{self.root.path}: the checkpoint is closed; its leaves can no longer be read")
            )

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
        """Ends one use of a descriptor."""
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
        """Closes the files unused for longest, until at most `keep` are open or all the others are in use."""
        idle = [name for name in self._open if name not in self._users]
        for name in idle[: max(0, len(self._open) - keep)]:
            self._open.pop(name).close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._close_idle(keep=0)
