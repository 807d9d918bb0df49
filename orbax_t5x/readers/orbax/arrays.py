"""The files and the arrays of an Orbax item.

A local item is listed, and what TensorStore will open is proven to be plain files inside the root. Of a remote one the
files that Orbax may have written are statted: web servers list nothing, and a list of a bucket names every chunk.

Each array becomes a leaf, or a broken leaf with its error. Opening gives shape and dtype and reads some hundred bytes
per array. Before TensorStore sees an array, the files that hold it (its own directory, or the database of the whole
item) are proven plain and remembered, so that a later read notices when they have changed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorstore as ts

from orbax_t5x.concurrency import OnceEach, waiting_pool
from orbax_t5x.errors import CheckpointError, CheckpointGoneError, CheckpointNotFoundError, CorruptCheckpointError
from orbax_t5x.files.interface import Files, Snapshot
from orbax_t5x.files.ranges import BoundedRange, ReadContext
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.readers.array_kind import ArrayKind
from orbax_t5x.readers.fetched_array import FetchedArray
from orbax_t5x.readers.leaves import BrokenLeaf
from orbax_t5x.readers.ocdbt_values import OcdbtValues
from orbax_t5x.readers.orbax.metadata import (
    ARRAY_METADATAS,
    CHECKSUMS_FILE,
    STRINGS_FILE,
    ItemMetadata,
    NodeMetadata,
    array_key,
    inside,
)
from orbax_t5x.readers.orbax.steps import MANIFEST_FILE, PROCESS_PREFIX
from orbax_t5x.readers.small_arrays import chunked_leaf
from orbax_t5x.readers.tensorstore_specs import TensorStoreValues, array_spec, typed_error

# Files of an OCDBT database: its manifest, its tables, and those of single processes.
_DATABASE = frozenset({MANIFEST_FILE, "d"})
# Each process of a save writes one file of metadata; so many are requested at once.
_METADATA_FILES_AT_ONCE = 16


class ItemFiles(NamedTuple):
    """Files and subdirectories of an item."""

    manifest: bool
    strings: bool
    checksums: bool
    array_metadatas: Sequence[str]
    database: Sequence[str]


def find_item_files(store: Files, item: str) -> ItemFiles:
    """Finds the files of an item."""
    if store.is_remote:
        return _find_remote(store, item)
    entries = store.entries(item)
    metadatas: list[str] = []
    if ARRAY_METADATAS in entries:
        inner = inside(item, ARRAY_METADATAS)
        store.require_plain(inner)
        metadatas = sorted(store.entries(inner))
    return ItemFiles(
        manifest=MANIFEST_FILE in entries and store.has_file(inside(item, MANIFEST_FILE)),
        strings=STRINGS_FILE in entries,
        checksums=CHECKSUMS_FILE in entries,
        array_metadatas=metadatas,
        database=sorted(name for name in entries if name in _DATABASE or name.startswith(PROCESS_PREFIX)),
    )


def stat_ahead(files: Files, beside: str) -> None:
    """Stats the files of a remote item in a batch."""
    if files.is_remote:
        files.stat_ahead(_first_names(), beside=[beside])


def _first_names() -> list[str]:
    return [MANIFEST_FILE, STRINGS_FILE, CHECKSUMS_FILE, *_metadata_names(0)]


def _find_remote(store: Files, item: str) -> ItemFiles:
    manifest, strings, checksums, *found = store.has_files([inside(item, name) for name in _first_names()])
    metadatas: list[str] = []
    while True:
        names = _metadata_names(len(metadatas))
        count = found.index(False) if False in found else len(found)
        metadatas += [name.partition("/")[2] for name in names[:count]]
        if count < len(names):
            break
        found = store.has_files([inside(item, name) for name in _metadata_names(len(metadatas))])
    return ItemFiles(manifest, strings, checksums, metadatas, [MANIFEST_FILE])


def _metadata_names(first: int) -> list[str]:
    return [f"{ARRAY_METADATAS}/process_{number}" for number in range(first, first + _METADATA_FILES_AT_ONCE)]


def database_files(store: Files, item: str, found: ItemFiles) -> Snapshot:
    """Returns the files of an item's database."""
    store.require_plain(item)
    return Snapshot(store, [inside(item, name) for name in found.database], inside(item, MANIFEST_FILE))


# Arrays being opened at one time: enough to keep the threads of TensorStore busy, and a bound on what is under way.
_OPENING_AT_ONCE = 4096
# As Orbax configures its databases: what is no larger, compressed, is stored in a node of the tree.
_INLINE_BYTES = 1024


# Names that a URL takes for `..`, which are none in TensorStore's files.
_ENCODED_DOTS = frozenset({"%2e%2e", "%2e.", ".%2e"})


@dataclasses.dataclass(frozen=True)
class ItemArrays:
    """The arrays of an item: their storage, and how they are opened.

    `name` is the item's directory relative to the root, `database` has the files of the database that holds them all,
    or is None where each array has a directory of its own. `values` are the database's.
    """

    root: Files
    name: str
    directory: str
    database: Snapshot | None
    metadata: ItemMetadata
    prng_impls: Mapping[str, str]
    sums: Mapping[str, Any]
    values: OcdbtValues | TensorStoreValues | None
    context: ts.Context
    kinds: OnceEach[bytes, ArrayKind] = dataclasses.field(default_factory=OnceEach[bytes, ArrayKind])

    @property
    def array_metadata(self) -> str:
        """The name of the metadata file in an array's directory."""
        return "zarr.json" if self.metadata.use_zarr3 else ".zarray"

    @functools.cached_property
    def kvstore(self) -> dict[str, Any] | None:
        """TensorStore's spec of the item, or None if it is remote."""
        return self.root.kvstore(self.name)

    @functools.cached_property
    def absent_is_fill(self) -> bool:
        """True if a chunk may be absent; never in zarr v2."""
        return self.metadata.absent_is_fill and self.metadata.use_zarr3

    def open(self, nodes: Sequence[NodeMetadata]) -> Iterator[Leaf]:
        """Yields the leaves of all nodes, in their order."""
        if not self.root.is_remote:
            yield from map(self._leaf, nodes)
            return
        for start in range(0, len(nodes), _OPENING_AT_ONCE):
            some = nodes[start : start + _OPENING_AT_ONCE]
            if self.database is None:
                directories = [inside(self.name, array_key(node.param)) for node in some]
                files = [inside(directory, self.array_metadata) for directory in directories]
                self.root.stat_ahead(files)
                self.root.read_ahead(files, limit=self.root.limits.json_bytes)
            yield from waiting_pool().map(self._leaf, some)

    def _leaf(self, node: NodeMetadata) -> Leaf:
        """Makes the leaf of an array, broken if it cannot be read."""
        try:
            array, files = self._array(node)
            self.root.limits.require_shape(array.kind.shape, array.kind.dtype)
            return chunked_leaf(
                node.name,
                self.directory,
                array,
                None if self.kvstore is None else functools.partial(self._spec, self.kvstore, array_key(node.param)),
                root=self.root,
                prng_impl=self.prng_impls.get(node.param),
                sums=self.sums.get(node.param),
                inline_bytes=0 if self.database is None else _INLINE_BYTES,
                files=files,
            )
        except CheckpointError as error:
            return BrokenLeaf(node.name, error, self.directory)
        except (ValueError, NotImplementedError) as error:
            doing, is_remote = "opening it", self.root.is_remote
            typed = typed_error(error, path=self.directory, leaf=node.name, doing=doing, is_remote=is_remote)
            return BrokenLeaf(node.name, typed)

    def _array(self, node: NodeMetadata) -> tuple[FetchedArray, Snapshot]:
        """Finds an array and its files; they are seen before its metadata."""
        key, limit = array_key(node.param), self.root.limits.json_bytes
        if self.database is not None and self.values is not None:
            values, files = self.values, self.database
        elif self.kvstore is not None and key.lower() in _ENCODED_DOTS:
            self.root.require_plain(self.name, leaf=node.name)
            values = TensorStoreValues(self.kvstore, self.directory, self.context, is_database=False)
            files = Snapshot(self.root, [self.name], self.array_metadata, leaf=node.name)
        else:
            directory = inside(self.name, key)  # of a tree that is one array, the item itself
            try:
                found = self.root.array_directory(directory, self.array_metadata, limit=limit, leaf=node.name)
            except (CheckpointNotFoundError, CheckpointGoneError):
                path = self.root.join(directory)
                message = f"the directory of its array, or {self.array_metadata} in it, is missing"
                raise CorruptCheckpointError(message, path=path) from None
            return FetchedArray(self._kind(found.metadata), self.root, directory), found.files
        name = inside(key, self.array_metadata)
        data = values.read_range(name, BoundedRange.whole(limit), ReadContext(node.name))
        if data is None:
            raise CorruptCheckpointError(f"opening it: {name} is missing", path=self.directory)
        return FetchedArray(self._kind(data), values, key), files

    def _kind(self, data: bytes) -> ArrayKind:
        zarr3, absent_is_fill = self.metadata.use_zarr3, self.absent_is_fill
        make = functools.partial(ArrayKind, data, zarr3=zarr3, absent_is_fill=absent_is_fill, context=self.context)
        return self.kinds.get(data, make)

    def _spec(self, kvstore: Mapping[str, Any], key: str) -> dict[str, Any]:
        is_ocdbt, zarr3 = self.database is not None, self.metadata.use_zarr3
        return array_spec(kvstore, key, ocdbt=is_ocdbt, zarr3=zarr3, absent_is_fill=self.absent_is_fill)
