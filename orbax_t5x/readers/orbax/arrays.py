"""The arrays of an Orbax item, opened many at a time.

Each becomes a leaf, or a broken leaf with its error. Opening gives shape and dtype and reads some hundred bytes per
array. Before TensorStore sees an array, the files that hold it (its own directory, or the database of the whole item)
are proven plain and remembered, so that a later read notices when they have changed.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorstore as ts

from orbax_t5x.concurrency import waiting_pool
from orbax_t5x.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    error_at,
)
from orbax_t5x.files.interface import Files, Snapshot
from orbax_t5x.files.limits import Limits
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.readers.chunk_grid import ArrayLayout
from orbax_t5x.readers.fetched_array import FetchedArray
from orbax_t5x.readers.leaves import BrokenLeaf
from orbax_t5x.readers.ocdbt_values import OcdbtValues
from orbax_t5x.readers.orbax.checksums import ItemSums
from orbax_t5x.readers.orbax.metadata import ItemMetadata, NodeMetadata, array_key, inside
from orbax_t5x.readers.small_arrays import SmallArray, SmallArrayLeaf, SmallArrays
from orbax_t5x.readers.tensorstore_errors import typed_error
from orbax_t5x.readers.tensorstore_leaf import TensorStoreLeaf
from orbax_t5x.readers.tensorstore_specs import array_spec

# Arrays being opened at one time: enough to keep the threads of TensorStore busy, and a bound on what is under way.
_OPENING_AT_ONCE = 4096
# As Orbax configures its databases: what is no larger, compressed, is stored in a node of the tree.
_INLINE_BYTES = 1024


class NamedNode(NamedTuple):
    """A node of an item, with the name that its leaf has."""

    name: str
    node: NodeMetadata


_Opening: TypeAlias = "SmallArray | ts.Future[ts.TensorStore] | concurrent.futures.Future[FetchedArray | SmallArray]"


@dataclasses.dataclass(frozen=True)
class ItemArrays:
    """The arrays of an item: their storage, and how they are opened.

    `name` is the item's directory relative to the root, `database` has the files of the database that holds them all,
    or is None where each array has a directory of its own. `values` are the database's, unless only TensorStore reads
    it.
    """

    root: Files
    name: str
    directory: str
    database: Snapshot | None
    metadata: ItemMetadata
    prng_impls: Mapping[str, str]
    plain_directories: frozenset[str]
    sums: ItemSums
    values: OcdbtValues | None
    context: ts.Context
    limits: Limits

    @property
    def array_metadata(self) -> str:
        """The name of the metadata file in an array's directory."""
        return "zarr.json" if self.metadata.use_zarr3 else ".zarray"

    @functools.cached_property
    def absent_is_fill(self) -> bool:
        """True if a chunk may be absent; never in zarr v2."""
        return self.metadata.absent_is_fill and self.metadata.use_zarr3

    def open(self, nodes: Sequence[NamedNode]) -> Iterator[Leaf]:
        """Yields the leaves of all nodes, in their order."""
        small: SmallArrays | None = None
        if self.values is not None:
            small = SmallArrays(self.values, self._fetched, self.array_metadata, self.limits)
        kvstore = self.root.kvstore(self.name)
        for start in range(0, len(nodes), _OPENING_AT_ONCE):
            some = nodes[start : start + _OPENING_AT_ONCE]
            if self.database is None:
                directories = [inside(self.name, array_key(named.node.param)) for named in some]
                self.root.stat_ahead([inside(directory, self.array_metadata) for directory in directories])
            opening = [self._start(named, kvstore, small) for named in some]
            for named, begun in zip(some, opening, strict=True):
                yield self._finish(named, begun)

    def _fetched(self, key: str, leaf: str) -> FetchedArray:
        """Opens an array with chunks fetched by us."""
        values, name = (self.root, inside(self.name, key)) if self.values is None else (self.values, key)
        zarr3, absent_is_fill = self.metadata.use_zarr3, self.absent_is_fill
        options: dict[str, Any] = {"zarr3": zarr3, "absent_is_fill": absent_is_fill, "limits": self.limits}
        return FetchedArray(values, name, context=self.context, leaf=leaf, **options)

    def _start(
        self, named: NamedNode, kvstore: Mapping[str, Any] | None, small: SmallArrays | None
    ) -> tuple[Snapshot, _Opening] | CheckpointError:
        """Begins to open an array; returns its files as they were before."""
        key = array_key(named.node.param)
        try:
            files = self._files(named) if self.database is None else self.database
            if kvstore is None:
                find = small.find if small else lambda key, leaf: None
                return files, waiting_pool().submit(lambda: find(key, named.name) or self._fetched(key, named.name))
            if small is not None and (found := small.find(key, named.name)) is not None:
                return files, found
            is_ocdbt, zarr3 = self.database is not None, self.metadata.use_zarr3
            spec = array_spec(kvstore, key, ocdbt=is_ocdbt, zarr3=zarr3, absent_is_fill=self.absent_is_fill)
            known = self.root.known_metadata(spec["kvstore"])
            if known is None:
                return files, ts.open(spec, open=True, read=True, context=self.context)
            spec["metadata"] = known
            return files, ts.open(spec, open=True, assume_metadata=True, read=True, context=self.context)
        except CheckpointError as error:
            return error
        except ValueError as error:
            return self._typed(error, named)

    def _typed(self, error: Exception, named: NamedNode) -> CheckpointError:
        return typed_error(
            error, path=self.directory, leaf=named.name, doing="opening it", is_remote=self.root.is_remote
        )

    def _files(self, named: NamedNode) -> Snapshot:
        """Returns the files in the directory of an array, proven plain."""
        own = array_key(named.node.param)
        inner = inside(self.name, own)  # of a tree that is one array, the item itself
        try:
            if own and own not in self.plain_directories:
                self.root.locate(inner, leaf=named.name)
            return Snapshot(self.root, [inner], inside(inner, self.array_metadata), leaf=named.name)
        except (CheckpointNotFoundError, CheckpointGoneError):
            raise CorruptCheckpointError(
                "the directory of its array is missing", path=self.root.join(inner), leaf=named.name
            ) from None

    def _finish(self, named: NamedNode, begun: tuple[Snapshot, _Opening] | CheckpointError) -> Leaf:
        """Returns the leaf of an opened array, broken if it failed."""
        if isinstance(begun, CheckpointError):
            return BrokenLeaf(named.name, begun)
        files, opening = begun
        make: Callable[..., TensorStoreLeaf]
        try:
            array = opening if isinstance(opening, SmallArray) else opening.result()
            if isinstance(array, SmallArray):
                make = functools.partial(SmallArrayLeaf, named.name, self.directory, array)
            else:
                if isinstance(array, ts.TensorStore):
                    self.root.note_array(array)
                layout = ArrayLayout.of(array) if isinstance(array, ts.TensorStore) else array.layout
                self.limits.require_shape(layout.shape, layout.dtype)
                make = functools.partial(TensorStoreLeaf, named.name, self.directory, layout, array)
        except CheckpointError as error:
            return BrokenLeaf(named.name, error_at(error, path=self.directory, leaf=named.name))
        except (ValueError, NotImplementedError) as error:
            return BrokenLeaf(named.name, self._typed(error, named))
        return make(
            self.root,
            prng_impl=self.prng_impls.get(named.node.param),
            sums=self.sums.of(named.node.param),
            absent_is_fill=self.absent_is_fill,
            inline_bytes=0 if self.database is None else _INLINE_BYTES,
            files=files,
            limits=self.limits,
        )
