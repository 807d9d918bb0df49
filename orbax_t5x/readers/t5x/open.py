"""Checkpoints that T5X's own Checkpointer wrote.

A root, a step, its `checkpoint` file, or a single file with all.

The msgpack file `checkpoint` of a step holds small leaves as arrays and large ones as specs of zarr arrays beside it.
Versions 1 to 3 have the tree under `optimizer`, which is no part of the names; version 0 is older than the field, and
its tree is the whole file. A save is written under a temporary name and renamed when it is done, so a directory called
`checkpoint_<step>` that holds the file is a finished step. The format keeps no checksum.
"""

from __future__ import annotations

import os
from typing import Any

from orbax_t5x.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsupportedCheckpointError
from orbax_t5x.files.interface import Files
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.paths import is_hub_blob
from orbax_t5x.files.places import files_at, open_directory_of
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.readers.checkpoint import Checkpoint
from orbax_t5x.readers.flax_msgpack.leaves import is_early_item, is_empty, msgpack_leaf, named_nodes
from orbax_t5x.readers.flax_msgpack.open import StateFile, open_state_file
from orbax_t5x.readers.flax_msgpack.walk import Node
from orbax_t5x.readers.orbax.open import open_orbax
from orbax_t5x.readers.orbax.steps import MSGPACK_FILE, newest_directory, newest_first, step_of_name
from orbax_t5x.readers.t5x.arrays import ZarrArrays
from orbax_t5x.readers.t5x.specs import is_spec

_VERSIONS = range(4)


def open_t5x(path: str | os.PathLike[str], *, limits: Limits) -> Checkpoint:
    """Opens a root, a step or a `checkpoint` file."""
    given = files_at(os.fspath(path))
    path = given.named
    if not given.is_directory():
        root, name = open_directory_of(path)
        beside, own = files_at(os.path.dirname(path)), os.path.basename(path)
        if is_hub_blob(root.join(name)) and beside.has_files([own])[0]:
            root, name = beside, own  # its arrays are beside the link to the blob
        step = step_of_name(os.path.basename(os.path.dirname(path)) if own == MSGPACK_FILE else own)
        return _open(path, root, name, step, limits)
    if not given.exists(MSGPACK_FILE):
        steps = (step for step in newest_first(path) if given.exists(f"{step.name}/{MSGPACK_FILE}"))
        newest = newest_directory(path, steps)
        if newest is None:
            raise CheckpointNotFoundError(
                f"neither a T5X step with a file {MSGPACK_FILE!r} nor a root with such steps", path=path
            )
        path = newest
    return _open(path, files_at(path), MSGPACK_FILE, step_of_name(os.path.basename(path)), limits)


def _open(path: str, root: Files, name: str, step: int | None, limits: Limits) -> Checkpoint:
    opened = open_state_file(root, name, limits)
    version, tree = _tree_of(opened)
    if version == 0 and name == MSGPACK_FILE and is_early_item(opened.tree):
        opened.files.close()
        return open_orbax(root.path, limits=limits)
    nodes = list(named_nodes(tree, opened.file, limits, is_spec))
    specs = [node for _, node in nodes if isinstance(node, dict) and is_spec(node)]
    arrays = ZarrArrays(root, opened.file.path, version, limits) if specs else None
    if arrays is not None:
        arrays.read_ahead(specs)
    leaves: dict[str, Leaf] = {}
    empties: dict[str, Any] = {}
    for leaf_name, node in nodes:
        if arrays is not None and isinstance(node, dict) and is_spec(node):
            leaves[leaf_name] = arrays.leaf(leaf_name, node)
        elif is_empty(node):
            empties[leaf_name] = node
        else:
            leaves[leaf_name] = msgpack_leaf(leaf_name, node, opened.file, limits)
    return Checkpoint(
        path=path,
        format="t5x",
        step=step,
        leaves=leaves,
        empties=empties,
        metadata=_metadata(version, opened),
        close=opened.files.close,
        index_bytes=opened.index_bytes + (arrays.index_bytes if arrays else 0),
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
