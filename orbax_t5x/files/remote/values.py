"""The files below a web server's directory as values by key.

Each is read with a bound.
"""

from __future__ import annotations

from orbax_t5x.files.paths import split_name
from orbax_t5x.files.remote.connection import Connection
from orbax_t5x.files.values import ANYONE, BoundedRange, ReadContext, Values


class DirectoryValues(Values):
    """The files below a directory; keys are their names."""

    def __init__(self, connection: Connection, directory: str):
        self._connection = connection
        self._prefix = f"{directory}/" if directory else ""
        self.path: str = connection.url(directory)

    def below(self, name: str) -> DirectoryValues:
        """Returns the files below a directory inside this directory."""
        return DirectoryValues(self._connection, f"{self._prefix}{name}") if name else self

    def read(self, key: str, wanted: BoundedRange, context: ReadContext = ANYONE) -> bytes | None:
        key = self._prefix + "/".join(split_name(key, path=self.path, leaf=context.leaf))
        return self._connection.read(key, wanted, context)
