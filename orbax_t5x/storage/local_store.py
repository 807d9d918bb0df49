"""A directory of this machine as a `Store`."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import Any, cast

from orbax_t5x.errors import CheckpointError
from orbax_t5x.storage.files import FileSet
from orbax_t5x.storage.paths import FILE_FLAGS, Root
from orbax_t5x.storage.store import ArrayDirectory, Store
from orbax_t5x.storage.strict_json import read_small
from orbax_t5x.storage.transcript import observed
from orbax_t5x.storage.tree_checks import TreeSnapshot


class LocalStore(Root, Store):
    """A directory that the caller named; see `Store` and `Root`."""

    is_remote = False

    def open_files(self) -> FileSet:
        return FileSet(self)

    def read_whole(self, name: str, *, limit: int, leaf: str | None = None) -> bytes:
        return read_small(self, name, limit=limit, leaf=leaf)

    def stat_ahead(self, names: Sequence[str]) -> None:
        """Does nothing: a local stat does not wait."""

    def read_ahead(self, names: Sequence[str], *, limit: int) -> None:
        """Does nothing, likewise."""

    def require_file(self, name: str) -> None:
        self.stat(name)

    def has_file(self, name: str) -> bool:
        try:
            self.stat(name)
        except CheckpointError:
            return False
        return True

    def has_files(self, names: Sequence[str]) -> list[bool]:
        return [self.has_file(name) for name in names]

    def kvstore(self, name: str) -> dict[str, Any]:
        return _file_kvstore(self.locate(name) if name else self.path)

    def array_files(self, directory: str, metadata: str, *, leaf: str | None = None) -> TreeSnapshot:
        return TreeSnapshot(self, [directory], leaf=leaf)

    def array_directory(self, directory: str, metadata: str, *, limit: int, leaf: str | None = None) -> ArrayDirectory:
        def received(data: list[Any]) -> ArrayDirectory:
            path, device, inode, text = data
            files = self.array_files(directory, metadata, leaf=leaf)
            return ArrayDirectory(path, (device, inode), _file_kvstore(path), text.encode("latin-1"), files)

        return observed(
            ["array", self.path, directory, metadata, limit, leaf],
            lambda: self._array_directory(directory, metadata, limit, leaf),
            lambda found: [found.path, *_numbers(found), found.metadata.decode("latin-1")],
            received,
        )

    def _array_directory(self, directory: str, metadata: str, limit: int, leaf: str | None) -> ArrayDirectory:
        with self._walk(directory, leaf) as (fd, last, path):
            found = os.fstat(fd) if last is None else os.stat(last, dir_fd=fd, follow_symlinks=False)
            files = self.array_files(directory, metadata, leaf=leaf)
            data = _read_plain(fd, metadata, limit) if last is None else None
        if data is None:
            # A link, or something that is wrong: the walk down the whole name follows it, or raises the error.
            data = read_small(self, f"{directory}/{metadata}", limit=limit, leaf=leaf, bound="Limits.json_bytes")
        return ArrayDirectory(path, (found.st_dev, found.st_ino), _file_kvstore(path), data, files)


def _numbers(found: ArrayDirectory) -> list[int]:
    """Returns device and inode."""
    return list(cast("tuple[int, int]", found.identity))


def _file_kvstore(path: str) -> dict[str, Any]:
    return {"driver": "file", "path": path}


def _read_plain(directory: int, name: str, limit: int) -> bytes | None:
    """Reads all bytes of a regular file in an open directory; None for anything else, and where it cannot be read."""
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
