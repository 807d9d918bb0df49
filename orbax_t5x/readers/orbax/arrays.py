"""The files and the arrays of an Orbax item.

An item is listed, and of a local one what TensorStore will open is proven to be plain files inside the root. Web
servers list nothing: there the files that Orbax may have written are asked for.

Each array becomes a leaf, or a broken leaf with its error. Opening gives shape and dtype and reads some hundred bytes
per array. Before TensorStore sees an array, the files that hold it (its own directory, or the database of the whole
item) are proven plain and remembered, so that a later read notices when they have changed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from orbax_t5x.concurrency import OnceEach, waiting_pool
from orbax_t5x.errors import CheckpointError, CheckpointGoneError, CheckpointNotFoundError, CorruptCheckpointError
from orbax_t5x.files.interface import Files, Snapshot
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.readers.array_kind import ArrayKind
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
    read_prng_impls,
)
from orbax_t5x.readers.orbax.steps import MANIFEST_FILE, PROCESS_PREFIX
from orbax_t5x.readers.small_arrays import ArrayPlace, chunked_leaf
from orbax_t5x.readers.tensorstore_specs import TensorStoreValues, array_spec, typed_error

# Files of an OCDBT database: its manifest, its tables, and those of single processes.
_DATABASE = frozenset({MANIFEST_FILE, "d"})


class ItemFiles(NamedTuple):
    """Files and subdirectories of an item."""

    manifest: bool
    strings: bool
    checksums: bool
    database: Sequence[str]


def find_item_files(store: Files, item: str, *, has_strings: bool) -> ItemFiles:
    """Finds the files of an item; that of strings only if it has strings."""
    if store.can_list:
        entries = store.entries(item)
        manifest = MANIFEST_FILE in entries and store.has_file(inside(item, MANIFEST_FILE))
        database = sorted(name for name in entries if name in _DATABASE or name.startswith(PROCESS_PREFIX))
        return ItemFiles(manifest, has_strings and STRINGS_FILE in entries, CHECKSUMS_FILE in entries, database)
    names = [MANIFEST_FILE, CHECKSUMS_FILE, *([STRINGS_FILE] if has_strings else [])]
    manifest, checksums, *strings = store.has_files([inside(item, name) for name in names])
    return ItemFiles(manifest, any(strings), checksums, [MANIFEST_FILE])


def find_array_metadatas(store: Files, item: str) -> list[str]:
    """Lists the files in which the processes of a save have described their arrays."""
    directory = inside(item, ARRAY_METADATAS)
    if store.can_list:
        if ARRAY_METADATAS not in store.entries(item):
            return []
        store.require_plain(directory)
        return sorted(store.entries(directory))
    found: list[str] = []
    count = 1
    while len(found) == count - 1:  # twice as many each time
        names = [f"process_{number}" for number in range(len(found), 2 * count - 1)]
        exist = store.has_files([inside(directory, name) for name in names])
        found += names[: exist.index(False) if False in exist else None]
        count *= 2
    return found


def database_files(store: Files, item: str, found: ItemFiles) -> Snapshot:
    """Returns the files of an item's database."""
    store.require_plain(item)
    return Snapshot(store, [inside(item, name) for name in found.database], inside(item, MANIFEST_FILE))


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
    sums: Mapping[str, Any]
    values: OcdbtValues | TensorStoreValues | None
    context: ts.Context
    kinds: OnceEach[bytes, ArrayKind] = dataclasses.field(default_factory=OnceEach[bytes, ArrayKind])
    impls: OnceEach[str, dict[str, str]] = dataclasses.field(default_factory=OnceEach[str, dict[str, str]])

    @property
    def array_metadata(self) -> str:
        """The name of the metadata file in an array's directory."""
        return "zarr.json" if self.metadata.use_zarr3 else ".zarray"

    def prng_impls(self) -> dict[str, str]:
        """Returns the implementations of typed PRNG keys, by their arrays' stored keys."""

        def read() -> dict[str, str]:
            return read_prng_impls(self.root, self.name, find_array_metadatas(self.root, self.name))

        return self.impls.get("", read)

    @functools.cached_property
    def database_kvstore(self) -> dict[str, Any]:
        """TensorStore's spec of the item's directory, which holds its database."""
        values = self.values
        files = values.data_files if isinstance(values, OcdbtValues) else list[str]
        return self.root.kvstore(self.name, MANIFEST_FILE, files)

    @functools.cached_property
    def absent_is_fill(self) -> bool:
        """True if a chunk may be absent; never in zarr v2."""
        return self.metadata.absent_is_fill and self.metadata.use_zarr3

    def open(self, nodes: Sequence[NodeMetadata]) -> Iterator[Leaf]:
        """Yields the leaves of all nodes, in their order."""
        return waiting_pool().map(self._leaf, nodes) if self.root.is_remote else map(self._leaf, nodes)

    def _leaf(self, node: NodeMetadata) -> Leaf:
        """Makes the leaf of an array, broken if it cannot be read."""
        try:
            kind, place, files = self._array(node)
            self.root.limits.require_shape(kind.shape, kind.dtype)
            return chunked_leaf(
                node.name,
                self.directory,
                kind,
                place,
                root=self.root,
                # Keys are stored as their data.
                prng_impl=self.prng_impls().get(node.param) if kind.dtype == np.uint32 else None,
                sums=self.sums.get(node.param),
                files=files,
                can_list=self.root.can_list or self.database is not None,
            )
        except CheckpointError as error:
            return BrokenLeaf(node.name, error, self.directory)
        except (ValueError, NotImplementedError) as error:
            doing, is_remote = "opening it", self.root.is_remote
            typed = typed_error(error, path=self.directory, leaf=node.name, doing=doing, is_remote=is_remote)
            return BrokenLeaf(node.name, typed)

    def _array(self, node: NodeMetadata) -> tuple[ArrayKind, ArrayPlace, Snapshot]:
        """Finds an array and its files; they are seen before its metadata."""
        key, limit = array_key(node.param), self.root.limits.json_bytes
        if self.database is None or self.values is None:
            return self._array_directory(node, key)
        name = inside(key, self.array_metadata)
        try:
            data = self.values.read_whole(name, limit=limit, leaf=node.name, bound="Limits.json_bytes")
        except CheckpointNotFoundError:
            raise CorruptCheckpointError(f"opening it: {name} is missing", path=self.directory) from None
        return (
            self._kind(data),
            ArrayPlace(self.values, key, lambda: self._spec(self.database_kvstore, key)),
            self.database,
        )

    def _array_directory(self, node: NodeMetadata, key: str) -> tuple[ArrayKind, ArrayPlace, Snapshot]:
        """Finds an array in a directory of its own; of a tree that is one array, the item itself."""
        directory = inside(self.name, key)
        try:
            limit = self.root.limits.json_bytes
            found = self.root.array_directory(directory, self.array_metadata, limit=limit, leaf=node.name)
        except (CheckpointNotFoundError, CheckpointGoneError):
            path = self.root.join(directory)
            message = f"the directory of its array, or {self.array_metadata} in it, is missing"
            raise CorruptCheckpointError(message, path=path) from None
        kind = self._kind(found.metadata)

        def spec() -> dict[str, Any]:
            return self._spec(self.root.kvstore(directory, self.array_metadata, kind.all_keys), "")

        return kind, ArrayPlace(self.root, directory, spec), found.files

    def _kind(self, data: bytes) -> ArrayKind:
        zarr3, absent_is_fill = self.metadata.use_zarr3, self.absent_is_fill
        make = functools.partial(ArrayKind, data, zarr3=zarr3, absent_is_fill=absent_is_fill, context=self.context)
        return self.kinds.get(data, make)

    def _spec(self, kvstore: Mapping[str, Any], key: str) -> dict[str, Any]:
        is_ocdbt, zarr3 = self.database is not None, self.metadata.use_zarr3
        return array_spec(kvstore, key, ocdbt=is_ocdbt, zarr3=zarr3, absent_is_fill=self.absent_is_fill)
