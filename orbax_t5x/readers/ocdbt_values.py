"""The values of an OCDBT database.

The nodes of its tree are read by us, and decoded by TensorStore.

TensorStore would read them itself, value by value, and take whatever a web server sends. So each node is read once,
each value with its length, as the node above it records that, and names of data files stay below the database.
"""

from __future__ import annotations

import bisect
import itertools
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorstore as ts

from orbax_t5x.concurrency import OnceEach
from orbax_t5x.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LimitExceededError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
    error_at,
)
from orbax_t5x.files.interface import StoredFile
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.paths import split_name
from orbax_t5x.files.values import ANYONE, BoundedRange, ReadContext, Values
from orbax_t5x.readers.tensorstore_errors import typed_error

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


class OcdbtValues(Values):
    """The values of a database."""

    def __init__(self, files: Values, limits: Limits, open_file: Callable[[str], StoredFile]):
        """Reads the manifest and the root node."""
        self.path: str = files.path
        self._files = files
        self._open_file = open_file
        self._opened: OnceEach[str, StoredFile] = OnceEach()
        self._limit = limits.index_bytes
        self._left = self._limit
        self._lock = threading.Lock()
        self._nodes: OnceEach[ValueLocation, _TreeNode] = OnceEach()
        found = files.read(_MANIFEST, BoundedRange.whole(self._limit))
        if found is None:
            raise CorruptCheckpointError(f"{_MANIFEST} is missing, so the arrays cannot be found", path=self.path)
        manifest = self._decoded(_MANIFEST, found, None)
        versions = manifest.get("versions")
        if not versions:
            raise UnsupportedCheckpointError("an OCDBT database of numbered manifests is not read", path=self.path)
        root = versions[-1]["root"]
        self._height: int = versions[-1]["root_height"]
        self._root = self._location(root["location"]) if "location" in root else None
        if self._root is not None:
            self._node(self._root, self._height, ANYONE)

    def find(self, key: str) -> bytes | ValueLocation | None:
        """Finds a value, or its place in a data file."""
        return self._find(key.encode(), ANYONE)

    @property
    def manifest(self) -> StoredFile:
        """The file that every value depends on."""
        return self.file(_MANIFEST)

    def file(self, name: str) -> StoredFile:
        """Returns a file of the database, statted once."""
        return self._opened.get(name, lambda: self._open_file(name))

    def read(self, key: str, wanted: BoundedRange, context: ReadContext = ANYONE) -> bytes | None:
        leaf = context.leaf
        try:
            found = self._find(key.encode(), context)
        except CheckpointError as error:
            raise error_at(error, path=error.path, leaf=leaf) from error
        if found is None:
            return None
        size = len(found) if isinstance(found, bytes) else found.size
        start = max(0, size + wanted.start) if wanted.start < 0 else wanted.start
        stop = size if wanted.stop is None else wanted.stop
        if stop > size or start > stop:
            raise CorruptCheckpointError(f"the value {key!r} ends at byte {size}", path=self.path, leaf=leaf)
        if stop - start > wanted.most:
            raise LimitExceededError(
                f"the value {key!r} has {stop - start} bytes, more than the {wanted.most} that it may have",
                path=self.path,
                leaf=leaf,
            )
        if isinstance(found, bytes):
            return found[start:stop]
        if start == stop:
            return b""
        data = self._files.read(found.file, BoundedRange.between(found.offset + start, found.offset + stop), context)
        if data is None:
            raise CorruptCheckpointError("the data file is missing", path=f"{self.path}/{found.file}", leaf=leaf)
        return data

    def _find(self, key: bytes, context: ReadContext) -> bytes | ValueLocation | None:
        """Finds the value of a key, or its place."""
        location, height = self._root, self._height
        while location is not None:
            node = self._node(location, height, context)
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
        return self._nodes.get(location, lambda: self._read_node(location, height, context))

    def _read_node(self, location: ValueLocation, height: int, context: ReadContext) -> _TreeNode:
        with self._lock:
            self._left -= location.size
            if self._left < 0:
                raise LimitExceededError(f"nodes of more than Limits.index_bytes = {self._limit} bytes", path=self.path)
        stored = BoundedRange.between(location.offset, location.offset + location.size)
        data = self._files.read(location.file, stored, context._replace(leaf=None))
        if data is None:
            raise CorruptCheckpointError("the data file is missing", path=f"{self.path}/{location.file}")
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


class LocalValues(Values):
    """The files of a local database, each a value."""

    def __init__(self, path: str, open_file: Callable[[str], StoredFile]):
        """Takes the directory, for errors, and a function that opens its files."""
        self.path: str = path
        self._open_file = open_file

    def read(self, key: str, wanted: BoundedRange, context: ReadContext = ANYONE) -> bytes | None:
        try:
            file = self._open_file(key)
        except CheckpointNotFoundError:
            return None
        stop = file.size if wanted.stop is None else wanted.stop
        if stop - wanted.start > wanted.most:
            raise LimitExceededError(
                f"more bytes than the limit of {wanted.most} permits", path=file.path, leaf=context.leaf
            )
        if stop > file.size:
            raise CorruptCheckpointError(f"ends before byte {stop}", path=file.path, leaf=context.leaf)
        # One process of a job opens for all: these bytes are recorded.
        return bytes(file.read(wanted.start, stop - wanted.start, leaf=context.leaf))
