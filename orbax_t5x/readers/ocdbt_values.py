"""The values of an OCDBT database, local or remote.

The nodes of its tree are read by us, and decoded by TensorStore. TensorStore would read them itself, value by value,
and take whatever a web server sends. So each node is read once, each value with its length, as the node above it
records that, and names of data files stay below the database.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import threading
import urllib.parse
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorstore as ts

from orbax_t5x.concurrency import OnceEach
from orbax_t5x.errors import (
    CheckpointError,
    CorruptCheckpointError,
    LimitExceededError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
    error_at,
)
from orbax_t5x.files.interface import Files, StoredFile
from orbax_t5x.files.paths import split_name
from orbax_t5x.files.ranges import ANYONE, BoundedRange, ReadContext
from orbax_t5x.lazy.leaf import FileExtent
from orbax_t5x.readers.tensorstore_specs import typed_error

_MANIFEST = "manifest.ocdbt"
_FETCHED = "node"
_DOING = "opening its OCDBT database"


class ValueLocation(NamedTuple):
    """Range of a data file, named relative to the database."""

    file: str
    offset: int
    size: int


class _TreeNode(NamedTuple):
    """A tree node: its sorted keys with values or child nodes.

    A child holds the keys from its key on.

    Attributes:
      prefixes: of the keys below each entry, which these do not repeat; none in a leaf node.
    """

    keys: list[bytes]
    entries: list[bytes | ValueLocation]
    prefixes: list[bytes]


class OcdbtValues:
    """The values of a database, by key; implements `Named`."""

    def __init__(self, files: Files, directory: str):
        """Reads the manifest and the root node.

        Raises:
          CheckpointError: they cannot be read.
        """
        self.path: str = files.join(directory) if directory else files.path
        self._files = files
        self._prefix = f"{directory}/" if directory else ""
        self._limit = files.limits.index_bytes
        self._left = self._limit
        self._lock = threading.Lock()
        self._opened: OnceEach[str, StoredFile] = OnceEach()
        self._nodes: OnceEach[ValueLocation, _TreeNode] = OnceEach()
        self._read_nodes: dict[ValueLocation, _TreeNode] = {}
        found = files.read_range(self._prefix + _MANIFEST, BoundedRange.whole(self._limit))
        if found is None:
            raise CorruptCheckpointError(f"{_MANIFEST} is missing, so the arrays cannot be found", path=self.path)
        versions = self._decoded(_MANIFEST, found, None).get("versions")
        if not versions:
            raise UnsupportedCheckpointError("an OCDBT database of numbered manifests is not read", path=self.path)
        root = versions[-1]["root"]
        self._height: int = versions[-1]["root_height"]
        self._root = self._location(root["location"]) if "location" in root else None
        if self._root is not None:
            self._node(self._root, self._height, ANYONE)

    @functools.cached_property
    def in_tree(self) -> FileExtent:
        """The extent of values in the tree: no bytes of the manifest."""
        return FileExtent(self.file(_MANIFEST), 0, 0)

    def file(self, name: str) -> StoredFile:
        """Returns a file of the database, statted once."""
        return self._opened.get(name, lambda: self._files.file(self._prefix + name))

    def read_range(self, name: str, wanted: BoundedRange, context: ReadContext = ANYONE) -> bytes | None:
        """Implements `Named.read_range`."""
        try:
            found = self.find(name, context)
        except CheckpointError as error:
            raise error_at(error, path=error.path, leaf=context.leaf) from error
        if found is None:
            return None
        size = len(found) if isinstance(found, bytes) else found.size
        place = wanted.within(size, f"the value {name!r}", path=self.path, leaf=context.leaf)
        if isinstance(found, bytes):
            return found[place]
        return self._read(found.file, found.offset + place.start, found.offset + place.stop, context)

    def _read(self, file: str, start: int, stop: int, context: ReadContext) -> bytes:
        if start == stop:
            return b""
        data = self._files.read_range(self._prefix + file, BoundedRange.between(start, stop), context)
        if data is None:
            raise CorruptCheckpointError("the data file is missing", path=f"{self.path}/{file}", leaf=context.leaf)
        return data

    def find(self, name: str, context: ReadContext = ANYONE) -> bytes | ValueLocation | None:
        """Finds a value, or its place in a data file."""
        key, location, height = name.encode(), self._root, self._height
        while location is not None:
            node = self._read_nodes.get(location) or self._node(location, height, context)
            number = bisect.bisect_right(node.keys, key) - 1
            if number < 0:
                return None
            entry = node.entries[number]
            if not height:
                return entry if node.keys[number] == key else None
            prefix = node.prefixes[number]
            if not key.startswith(prefix):
                return None
            assert isinstance(entry, ValueLocation)
            location, height, key = entry, height - 1, key[len(prefix) :]
        return None

    def names(self, prefix: str) -> list[str]:
        """Lists the keys that begin with a prefix, without it."""
        start = prefix.encode()
        found: list[bytes] = []
        pending = [] if self._root is None else [(self._root, self._height, b"")]
        while pending:
            location, height, before = pending.pop()
            node = self._node(location, height, ANYONE)
            if not height:
                found += [before + key for key in node.keys]
                continue
            # A node holds the keys from its own to that of the next one.
            last = [*[before + key for key in node.keys[1:]], None]
            for key, stop, entry, more in zip(node.keys, last, node.entries, node.prefixes, strict=True):
                is_before = stop is not None and stop <= start
                is_behind = before + key > start and not (before + key).startswith(start)
                if not is_before and not is_behind:
                    assert isinstance(entry, ValueLocation)
                    pending.append((entry, height - 1, before + more))
        return [key[len(start) :].decode("utf-8", "replace") for key in found if key.startswith(start)]

    def _node(self, location: ValueLocation, height: int, context: ReadContext) -> _TreeNode:
        node = self._nodes.get(location, lambda: self._read_node(location, height, context))
        self._read_nodes[location] = node
        return node

    def _read_node(self, location: ValueLocation, height: int, context: ReadContext) -> _TreeNode:
        with self._lock:
            self._left -= location.size
            if self._left < 0:
                raise LimitExceededError(f"nodes of more than Limits.index_bytes = {self._limit} bytes", path=self.path)
        data = self._read(location.file, location.offset, location.offset + location.size, context._replace(leaf=None))
        decoded = self._decoded(_FETCHED, data, f"btreenode::{_FETCHED}:0:{location.size}")
        if decoded["height"] != height:
            raise CorruptCheckpointError(f"{_DOING}: a node of another height", path=self.path)
        entries: list[Mapping[str, Any]] = decoded["entries"]
        keys = [entry["key"] for entry in entries]
        if any(one >= other for one, other in itertools.pairwise(keys)):
            raise CorruptCheckpointError(f"{_DOING}: the keys of a node are not sorted", path=self.path)
        if height:
            prefixes = [entry["subtree_common_prefix"] for entry in entries]
            return _TreeNode(keys, [self._location(entry["location"]) for entry in entries], prefixes)
        values = [
            self._location(entry["indirect_value"]) if "indirect_value" in entry else entry["inline_value"]
            for entry in entries
        ]
        return _TreeNode(keys, values, [])

    def _decoded(self, key: str, data: bytes, node: str | None) -> dict[str, Any]:
        """Decodes a manifest or a node from bytes that were fetched."""
        memory = ts.KvStore.open("memory://").result()
        memory.write(key, data).result()
        try:
            return ts.ocdbt.dump(memory, node).result()
        except (ValueError, NotImplementedError) as error:
            raise typed_error(error, path=self.path, leaf=None, doing=_DOING, is_remote=True) from error

    def _location(self, text: str) -> ValueLocation:
        """Parses a location: kind, file's base and name, offset, size."""
        _, base, name, offset, size = text.split(":")
        file = urllib.parse.unquote(base) + urllib.parse.unquote(name)
        if "/".join(split_name(file, path=self.path)) != file:
            raise UnsafeCheckpointError(f"the file name {file!r} is not in its shortest form", path=self.path)
        return ValueLocation(file, int(offset), int(size))
