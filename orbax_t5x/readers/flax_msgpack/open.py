"""Flax msgpack files: state dicts of `flax.serialization`.

Hugging Face's Flax models are among them. Opening walks over the headers of the files; the bytes of arrays are read by
range when they are wanted. The format keeps no checksum.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from orbax_t5x.errors import CheckpointNotFoundError, CorruptCheckpointError, Fix, UnsupportedCheckpointError
from orbax_t5x.files.interface import Files, StoredFile
from orbax_t5x.files.places import files_at, open_directory_of, within_limits
from orbax_t5x.readers.checkpoint import Checkpoint
from orbax_t5x.readers.detect import PathProbe
from orbax_t5x.readers.flax_msgpack.leaves import is_early_item, is_empty, msgpack_leaf, named_nodes
from orbax_t5x.readers.flax_msgpack.root import newest_file
from orbax_t5x.readers.flax_msgpack.walk import Node, walk
from orbax_t5x.readers.hub_files import LFS_POINTER, ModelFiles, parts_of, refuse_lfs_pointer

SUFFIX = ".msgpack"
INDEX_SUFFIX = ".msgpack.index.json"
# Hugging Face's names for a model in one file, and for the index of several.
HUB_FILE = "flax_model.msgpack"
INDEX_FILE = "flax_model.msgpack.index.json"
# How Flax names the files of steps, and the Hugging Face trainer its directories.
_STEP_NAME = re.compile(r"(?:.*[._-])?checkpoint[-_](?P<step>[0-9]{1,18})", re.ASCII | re.DOTALL)


class StateFile(NamedTuple):
    """Open msgpack file and its tree; the walk read `index_bytes`."""

    file: StoredFile
    files: Files
    tree: dict[str, Node]
    index_bytes: int


def open_state_file(files: Files, name: str) -> StateFile:
    """Walks over a msgpack file with a map on top."""
    file = files.file(name)
    refuse_lfs_pointer(bytes(file.read(0, min(file.size, len(LFS_POINTER)))), file.path)
    tree, bytes_read = walk(file)
    if not isinstance(tree, dict):
        raise CorruptCheckpointError("the msgpack file holds no map at its top, so it is no state dict", path=file.path)
    return StateFile(file, files, tree, bytes_read)


@within_limits
def open_flax_msgpack(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a file, an index, a model's directory or a root."""
    given = files_at(os.fspath(path))
    path = given.named
    match = _STEP_NAME.fullmatch(os.path.basename(path))
    step = int(match["step"]) if match else None
    if not given.is_directory():
        directory, name = os.path.split(path)
        if name.endswith(INDEX_SUFFIX):
            return _open_model(path, directory, name, step)
        if "-of-" in name:
            parts_of(name, files_at(directory))
        files, file = open_directory_of(path)
        opened = _FlaxFiles(files)
        opened.add_file(file)
        if name == HUB_FILE:
            opened.add_config(files_at(directory))
        return opened.checkpoint(path, step)
    names = given.names()
    if model := next((name for name in (HUB_FILE, INDEX_FILE) if name in names), None):
        return _open_model(path, path, model, step)
    newest = newest_file(PathProbe(given))
    if newest is None:
        raise CheckpointNotFoundError(f"neither {HUB_FILE!r}, nor its index, nor files of steps", path=path)
    opened = _FlaxFiles(given)
    opened.add_file(newest.name)
    return opened.checkpoint(os.path.join(path, newest.name), newest.step)


def _open_model(path: str, directory: str, name: str, step: int | None) -> Checkpoint:
    """Opens a model's only file or its index, with its configuration."""
    files = files_at(directory)
    opened = _FlaxFiles(files)
    if name.endswith(INDEX_SUFFIX):
        opened.add_index(name)
    else:
        opened.add_file(name)
    opened.add_config(files)
    return opened.checkpoint(path, step)


class _FlaxFiles(ModelFiles):
    """Msgpack files of a model."""

    format = "flax_msgpack"
    suffix = SUFFIX

    def add_file(self, name: str) -> None:
        opened = open_state_file(self._root, name)
        if is_early_item(opened.tree):
            raise UnsupportedCheckpointError(
                "the arrays of this file are beside it, as early Orbax wrote them",
                path=opened.file.path,
                fix=Fix("open the directory that holds the file"),
            )
        self._bytes += opened.index_bytes
        self._metadata["files"].append(name)
        for leaf, node in named_nodes(opened.tree, opened.file):
            self._claim((leaf,), name)
            if is_empty(node):
                self._empties[leaf] = node
            else:
                self._leaves[leaf] = msgpack_leaf(leaf, node, opened.file)
