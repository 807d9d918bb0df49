"""The values of an OCDBT database, local or remote.

The nodes of its tree are read by us, each once, and decoded by TensorStore, which would read small values one by one.
Names of data files stay below the database.
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
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LimitExceededError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)
from orbax_t5x.files.interface import Files, StoredFile
from orbax_t5x.files.paths import split_name
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
        try:
            found = files.read_whole(self._prefix + _MANIFEST, limit=self._limit)
        except CheckpointNotFoundError:
            message = f"{_MANIFEST} is missing, so the arrays cannot be found"
            raise CorruptCheckpointError(message, path=self.path) from None
        versions = self._decoded(_MANIFEST, found, None).get("versions")
        if not versions:
            raise UnsupportedCheckpointError("an OCDBT database of numbered manifests is not read", path=self.path)
        root = versions[-1]["root"]
        self._height: int = versions[-1]["root_height"]
        self._root = self._location(root["location"]) if "location" in root else None
        if self._root is not None:
            self._node(self._root, self._height)

    @functools.cached_property
    def in_tree(self) -> FileExtent:
        """The extent of values in the tree: no bytes of the manifest."""
        return FileExtent(self.file(_MANIFEST), 0, 0)

    def file(self, name: str) -> StoredFile:
        """Returns a file of the database, statted once."""
        return self._opened.get(name, lambda: self._files.file(self._prefix + name))

    def read_whole(self, name: str, *, limit: int, leaf: str | None = None, bound: str = "Limits.index_bytes") -> bytes:
        """Implements `Named.read_whole`."""
        found = self.find(name)
        if found is None:
            raise CheckpointNotFoundError(f"there is no value {name!r}", path=self.path, leaf=leaf)
        size = len(found) if isinstance(found, bytes) else found.size
        if size > limit:
            message = f"the value {name!r} has {size} bytes, more than {bound} = {limit}"
            raise LimitExceededError(message, path=self.path, leaf=leaf)
        return found if isinstance(found, bytes) else self._read(found, leaf)

    def _read(self, place: ValueLocation, leaf: str | None = None) -> bytes:
        if not place.size:
            return b""
        try:
            return bytes(self.file(place.file).read(place.offset, place.size, leaf=leaf))
        except CheckpointNotFoundError:
            path = f"{self.path}/{place.file}"
            raise CorruptCheckpointError("the data file is missing", path=path, leaf=leaf) from None

    def find(self, name: str) -> bytes | ValueLocation | None:
        """Finds a value, or its place in a data file."""
        key, location, height = name.encode(), self._root, self._height
        while location is not None:
            node = self._read_nodes.get(location) or self._node(location, height)
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

    def data_files(self) -> list[str]:
        """Lists the names of all files of the database."""
        names = {_MANIFEST}
        pending = [] if self._root is None else [(self._root, self._height)]
        while pending:
            location, height = pending.pop()
            names.add(location.file)
            places = [entry for entry in self._node(location, height).entries if isinstance(entry, ValueLocation)]
            if height:
                pending += [(place, height - 1) for place in places]
            else:
                names.update(place.file for place in places)
        return sorted(names)

    def _node(self, location: ValueLocation, height: int) -> _TreeNode:
        node = self._nodes.get(location, lambda: self._read_node(location, height))
        self._read_nodes[location] = node
        return node

    def _read_node(self, location: ValueLocation, height: int) -> _TreeNode:
        with self._lock:
            self._left -= location.size
            if self._left < 0:
                raise LimitExceededError(f"nodes of more than Limits.index_bytes = {self._limit} bytes", path=self.path)
        data = self._read(location)
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
