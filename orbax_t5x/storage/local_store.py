"""A directory of this machine as a `Store`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orbax_t5x.errors import CheckpointError
from orbax_t5x.storage.files import FileSet
from orbax_t5x.storage.paths import Root
from orbax_t5x.storage.strict_json import read_small
from orbax_t5x.storage.tree_checks import TreeSnapshot


class LocalStore(Root):
    """A directory that the caller named; see `Store` and `Root`."""

    is_remote = False

    def open_files(self) -> FileSet:
        """See `Store.open_files`."""
        return FileSet(self)

    def read_whole(self, name: str, *, limit: int, leaf: str | None = None) -> bytes:
        """See `Store.read_whole`."""
        return read_small(self, name, limit=limit, leaf=leaf)

    def look_ahead(self, names: Sequence[str]) -> None:
        """Does nothing: a look costs no wait here."""

    def read_ahead(self, names: Sequence[str], *, limit: int) -> None:
        """Does nothing, likewise."""

    def require_file(self, name: str) -> None:
        """See `Store.require_file`."""
        self.stat(name)

    def has_file(self, name: str) -> bool:
        """See `Store.has_file`."""
        try:
            self.stat(name)
        except CheckpointError:
            return False
        return True

    def has_files(self, names: Sequence[str]) -> list[bool]:
        """See `Store.has_files`."""
        return [self.has_file(name) for name in names]

    def kvstore(self, name: str) -> dict[str, Any]:
        """See `Store.kvstore`."""
        return {"driver": "file", "path": self.locate(name) if name else self.path}

    def array_files(self, directory: str, metadata: str, *, leaf: str | None = None) -> TreeSnapshot:
        """See `Store.array_files`: all files of the directory, proven plain."""
        return TreeSnapshot(self, [directory], leaf=leaf)
