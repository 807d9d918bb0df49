"""The zarr arrays of a T5X checkpoint.

A spec's directory becomes a leaf, or a broken leaf with its error. Opening looks at the array's directory, at any
depth, and reads `.zarray` through the root's resolver: TensorStore follows links and waits on FIFOs, so every file that
it may open must be a plain file inside the checkpoint. TensorStore gets our own spec and our own metadata, and reads
nothing before a box is wanted; then the files are looked at once more.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Hashable, Sequence
from functools import partial

import numpy as np

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LeafMismatchError,
    UnsupportedCheckpointError,
    error_at,
)
from orbax_t5x.files.interface import ArrayDirectory, Files
from orbax_t5x.files.limits import Limits
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.readers.array_kind import ArrayKind
from orbax_t5x.readers.fetched_array import FetchedArray
from orbax_t5x.readers.flax_msgpack.walk import Node
from orbax_t5x.readers.leaves import BrokenLeaf
from orbax_t5x.readers.small_arrays import chunked_leaf
from orbax_t5x.readers.t5x.specs import ArraySpec, parse_spec
from orbax_t5x.readers.t5x.zarr_metadata import METADATA_FILE, ZarrMetadata, parse_zarr_metadata
from orbax_t5x.readers.tensorstore_errors import typed_error
from orbax_t5x.readers.tensorstore_specs import array_spec, make_context

# The newest version whose uint16 arrays are the bits of bfloat16; later ones store bfloat16 as itself.
_LAST_UINT16_VERSION = 2


class SharedDirectoryError(CorruptCheckpointError):
    """Error of two leaves in one directory."""


class ZarrArrays:
    """The arrays of a checkpoint."""

    def __init__(self, root: Files, file: str, version: int, limits: Limits):
        """Holds the settings of a checkpoint."""
        self._root = root
        self._file = file
        self._version = version
        self._limits = limits
        self._context = make_context()
        self._leaf_of: dict[Hashable, str] = {}
        self._kinds: dict[bytes, ArrayKind] = {}
        # Layers are alike: thousands of arrays have a few metadata.
        self._parsed: dict[bytes, ZarrMetadata] = {}
        self.index_bytes: int = 0

    def read_ahead(self, nodes: Sequence[dict[str, Node]]) -> None:
        """Announces the specs that will become leaves."""
        if not self._root.is_remote:
            return
        names: list[str] = []
        for node in nodes:
            with contextlib.suppress(CheckpointError):
                names.append(f"{parse_spec(node).directory}/{METADATA_FILE}")
        self._root.read_ahead(names, limit=self._limits.index_bytes)

    def leaf(self, name: str, node: dict[str, Node]) -> Leaf:
        """Makes the leaf of a spec."""
        try:
            spec = parse_spec(node)
        except CheckpointError as error:
            return BrokenLeaf(name, error_at(error, path=self._file, leaf=name))
        try:
            limit = self._limits.json_bytes
            found = self._root.array_directory(spec.directory, METADATA_FILE, limit=limit, leaf=name)
            self._claim(found, spec, name)
            return self._open(name, spec, found, self._metadata(found, spec, name))
        except (CheckpointNotFoundError, CheckpointGoneError):
            error = CorruptCheckpointError(
                "the directory of its array, or the metadata in it, is missing",
                path=self._root.join(spec.directory),
                leaf=name,
            )
            return BrokenLeaf(name, error)
        except SharedDirectoryError:
            raise
        except CheckpointError as error:
            return BrokenLeaf(name, error_at(error, path=error.path or self._file, leaf=name))

    def _claim(self, found: ArrayDirectory, spec: ArraySpec, name: str) -> None:
        """Records the owner of a directory, by identity."""
        other = self._leaf_of.setdefault(found.identity, name)
        if other != name:
            raise SharedDirectoryError(
                f"is stored in {spec.directory!r}, and so is {other!r}: one was written over the other",
                path=self._file,
                leaf=name,
            )

    def _metadata(self, found: ArrayDirectory, spec: ArraySpec, name: str) -> ZarrMetadata:
        """Reads `.zarray` and compares it with the spec."""
        self.index_bytes += len(found.metadata)
        file = self._root.join(f"{spec.directory}/{METADATA_FILE}")
        metadata = self._parsed.get(found.metadata)
        if metadata is None:
            metadata = self._parsed[found.metadata] = parse_zarr_metadata(found.metadata, file, name, self._limits)
        if spec.shape not in (None, metadata.shape):
            raise LeafMismatchError(
                f"the msgpack file has the shape {list(spec.shape or ())}, {METADATA_FILE} has {list(metadata.shape)}",
                path=file,
                leaf=name,
            )
        for dtype in spec.dtypes:
            if dtype not in (metadata.stored_dtype, metadata.dtype.name):
                raise LeafMismatchError(
                    f"the msgpack file has the dtype {dtype[:200]!r}, {METADATA_FILE} has {metadata.stored_dtype!r}",
                    path=file,
                    leaf=name,
                )
        return metadata

    def _open(self, name: str, spec: ArraySpec, found: ArrayDirectory, metadata: ZarrMetadata) -> Leaf:
        as_bfloat16 = metadata.dtype == np.uint16
        if as_bfloat16 and self._version > _LAST_UINT16_VERSION:
            raise UnsupportedCheckpointError(
                f"its dtype is uint16, which T5X writes for bfloat16 up to version {_LAST_UINT16_VERSION} and never in "
                f"version {self._version}",
                path=found.path,
                leaf=name,
            )
        kind = self._kinds.get(found.metadata)
        try:
            if kind is None:
                data, fills = (
                    json.dumps(metadata.spec(as_bfloat16=as_bfloat16)).encode(),
                    metadata.fill_value is not None,
                )
                kind = ArrayKind(data, zarr3=False, absent_is_fill=fills, context=self._context)
                self._kinds[found.metadata] = kind
        except (ValueError, NotImplementedError, OverflowError) as error:
            doing, is_remote = "opening it", self._root.is_remote
            raise typed_error(error, path=found.path, leaf=name, doing=doing, is_remote=is_remote) from error
        ours = None
        if found.kvstore is not None:
            fills = metadata.fill_value is not None
            ours = partial(array_spec, found.kvstore, "", ocdbt=False, zarr3=False, absent_is_fill=fills)
        array = FetchedArray(kind, self._root, spec.directory)
        return chunked_leaf(name, found.path, array, ours, root=self._root, files=found.files, limits=self._limits)
