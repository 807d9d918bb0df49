"""Checkpoints that T5X's own Checkpointer wrote.

A root, a step, its `checkpoint` file, or a single file with all.

The msgpack file `checkpoint` of a step holds small leaves as arrays and large ones as specs of zarr arrays beside it.
Versions 1 to 3 have the tree under `optimizer`, which is no part of the names; version 0 is older than the field, and
its tree is the whole file. A save is written under a temporary name and renamed when it is done, so a directory called
`checkpoint_<step>` that holds the file is a finished step. TensorStore follows links and waits on FIFOs, so every file
that it may open must be a plain file inside the checkpoint. It gets our own spec and our own metadata, and reads
nothing before a box is wanted; then the files are looked at once more. The format keeps no checksum.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable
from typing import Any

from orbax_t5x import on_demand
from orbax_t5x.concurrency import waiting_pool
from orbax_t5x.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LeafMismatchError,
    UnsupportedCheckpointError,
)
from orbax_t5x.files.interface import ArrayDirectory, Files
from orbax_t5x.files.paths import is_hub_blob
from orbax_t5x.files.places import files_at, open_directory_of, within_limits
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.readers.array_kind import ArrayKind
from orbax_t5x.readers.checkpoint import Checkpoint
from orbax_t5x.readers.flax_msgpack.leaves import is_early_item, is_empty, msgpack_leaf, named_nodes
from orbax_t5x.readers.flax_msgpack.open import StateFile, open_state_file
from orbax_t5x.readers.flax_msgpack.walk import Node
from orbax_t5x.readers.leaves import BrokenLeaf
from orbax_t5x.readers.orbax.steps import MSGPACK_FILE, finished_steps, newest_step, step_of_name
from orbax_t5x.readers.small_arrays import ArrayPlace, chunked_leaf
from orbax_t5x.readers.t5x.specs import (
    METADATA_FILE,
    ZARR_DTYPES,
    ArraySpec,
    as_bfloat16,
    is_spec,
    parse_spec,
    parse_zarr_metadata,
)
from orbax_t5x.readers.tensorstore_specs import array_spec, make_context, typed_error

# Of items that early Orbax wrote only.
_open_orbax: Callable[..., Checkpoint] = on_demand.function("orbax_t5x.readers.orbax.open", "open_orbax")
# The newest version whose uint16 arrays are the bits of bfloat16; later ones store bfloat16 as itself.
_LAST_UINT16_VERSION = 2
_UINT16 = "<u2"


class ZarrArrays:
    """The arrays of a checkpoint."""

    def __init__(self, root: Files, file: str, version: int):
        self._root = root
        self._file = file
        self._version = version
        self._context = make_context()
        self._leaf_of: dict[Hashable, str] = {}
        # Layers are alike: thousands of arrays have a few metadata.
        self._parsed: dict[bytes, dict[str, Any]] = {}
        self._kinds: dict[bytes, ArrayKind] = {}
        self.index_bytes: int = 0

    def leaf(self, name: str, node: dict[str, Node]) -> Leaf:
        """Makes the leaf of a spec."""
        try:
            spec = parse_spec(node)
        except CheckpointError as error:
            return BrokenLeaf(name, error, self._file)
        try:
            limit = self._root.limits.json_bytes
            found = self._root.array_directory(spec.directory, METADATA_FILE, limit=limit, leaf=name)
        except (CheckpointNotFoundError, CheckpointGoneError):
            error = CorruptCheckpointError("the directory of its array, or the metadata in it, is missing")
            return BrokenLeaf(name, error, self._root.join(spec.directory))
        except CheckpointError as error:
            return BrokenLeaf(name, error, self._file)
        other = self._leaf_of.setdefault(found.identity, name)
        if other != name:
            raise CorruptCheckpointError(
                f"is stored in {spec.directory!r}, and so is {other!r}: one was written over the other",
                path=self._file,
                leaf=name,
            )
        file = self._root.join(f"{spec.directory}/{METADATA_FILE}")
        try:
            return self._open(name, spec, found, self._metadata(found, spec, file))
        except CheckpointError as error:
            return BrokenLeaf(name, error, file)

    def _metadata(self, found: ArrayDirectory, spec: ArraySpec, file: str) -> dict[str, Any]:
        """Parses `.zarray` and compares it with the spec."""
        self.index_bytes += len(found.metadata)
        metadata = self._parsed.get(found.metadata)
        if metadata is None:
            metadata = self._parsed[found.metadata] = parse_zarr_metadata(found.metadata, file, self._root.limits)
        if spec.shape not in (None, tuple(metadata["shape"])):
            raise LeafMismatchError(
                f"the msgpack file has the shape {list(spec.shape or ())}, {METADATA_FILE} has {metadata['shape']}"
            )
        stored = metadata["dtype"]
        for dtype in spec.dtypes:
            if dtype not in (stored, ZARR_DTYPES[stored].name):
                raise LeafMismatchError(
                    f"the msgpack file has the dtype {dtype[:200]!r}, {METADATA_FILE} has {stored!r}"
                )
        return metadata

    def _open(self, name: str, spec: ArraySpec, found: ArrayDirectory, metadata: dict[str, Any]) -> Leaf:
        if metadata["dtype"] == _UINT16:
            if self._version > _LAST_UINT16_VERSION:
                raise UnsupportedCheckpointError(
                    f"its dtype is uint16, which T5X writes for bfloat16 up to version {_LAST_UINT16_VERSION} and "
                    f"never in version {self._version}",
                    path=found.path,
                )
            metadata = as_bfloat16(metadata)
        fills = metadata["fill_value"] is not None
        try:
            kind = self._kinds.get(found.metadata)
            if kind is None:
                data = json.dumps(metadata).encode()
                kind = ArrayKind(data, zarr3=False, absent_is_fill=fills, context=self._context)
                self._kinds[found.metadata] = kind
        except (ValueError, NotImplementedError, OverflowError) as error:
            doing, is_remote = "opening it", self._root.is_remote
            raise typed_error(error, path=found.path, leaf=name, doing=doing, is_remote=is_remote) from error
        directory, root = spec.directory, self._root

        def array() -> dict[str, Any]:
            kvstore = root.kvstore(directory, METADATA_FILE, kind.all_keys)
            return array_spec(kvstore, "", ocdbt=False, zarr3=False, absent_is_fill=fills)

        return chunked_leaf(
            name,
            found.path,
            kind,
            ArrayPlace(root, directory, array),
            root=root,
            files=found.files,
            can_list=root.can_list,
        )


_VERSIONS = range(4)


@within_limits
def open_t5x(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a root, a step or a `checkpoint` file."""
    given = files_at(os.fspath(path))
    path = given.named
    if not given.is_directory():
        root, name = open_directory_of(path)
        beside, own = files_at(os.path.dirname(path)), os.path.basename(path)
        if is_hub_blob(root.join(name)) and beside.has_files([own])[0]:
            root, name = beside, own  # its arrays are beside the link to the blob
        step = step_of_name(os.path.basename(os.path.dirname(path)) if own == MSGPACK_FILE else own)
        return _open(path, root, name, step)
    if not given.exists(MSGPACK_FILE):
        steps = (step for step in finished_steps(given) if given.exists(f"{step.name}/{MSGPACK_FILE}"))
        newest = newest_step(given, steps)
        if newest is None:
            raise CheckpointNotFoundError(
                f"neither a T5X step with a file {MSGPACK_FILE!r} nor a root with such steps", path=path
            )
        path = given.locate(newest.name)
    return _open(path, files_at(path), MSGPACK_FILE, step_of_name(os.path.basename(path)))


def _open(path: str, root: Files, name: str, step: int | None) -> Checkpoint:
    opened = open_state_file(root, name)
    version, tree = _tree_of(opened)
    if version == 0 and name == MSGPACK_FILE and is_early_item(opened.tree):
        opened.files.close()
        return _open_orbax(root.path)
    nodes = list(named_nodes(tree, opened.file, is_spec))
    specs = {name: node for name, node in nodes if isinstance(node, dict) and is_spec(node)}
    arrays = ZarrArrays(root, opened.file.path, version)
    open_all = waiting_pool().map if root.is_remote else map
    leaves: dict[str, Leaf] = {leaf.name: leaf for leaf in open_all(arrays.leaf, specs, specs.values())}
    empties: dict[str, Any] = {}
    for leaf_name, node in nodes:
        if leaf_name in specs:
            continue
        if is_empty(node):
            empties[leaf_name] = node
        else:
            leaves[leaf_name] = msgpack_leaf(leaf_name, node, opened.file)
    return Checkpoint(
        path=path,
        format="t5x",
        step=step,
        leaves=leaves,
        empties=empties,
        metadata=_metadata(version, opened),
        close=opened.files.close,
        index_bytes=opened.index_bytes + arrays.index_bytes,
    )


def _tree_of(opened: StateFile) -> tuple[int, Node]:
    """Returns the format's version and the train state's subtree."""
    version = opened.tree.get("version", 0)
    if type(version) is not int or version < 0:
        raise CorruptCheckpointError(f"the version is {str(version)[:200]}", path=opened.file.path)
    if version not in _VERSIONS:
        raise UnsupportedCheckpointError(
            f"version {version} of T5X's format; versions up to {_VERSIONS[-1]} are read", path=opened.file.path
        )
    if version == 0:
        return 0, {key: node for key, node in opened.tree.items() if key != "version"}
    if "optimizer" not in opened.tree:
        raise CorruptCheckpointError(f"version {version} of T5X's format without 'optimizer'", path=opened.file.path)
    return version, opened.tree["optimizer"]


def _metadata(version: int, opened: StateFile) -> dict[str, Any]:
    """Returns the file's metadata and the keys beside the train state."""
    others = sorted(opened.tree.keys() - {"version", "optimizer"}) if version else []
    return {"version": version, "file": opened.file.name, "other_keys": others}
