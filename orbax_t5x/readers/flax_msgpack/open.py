"""Flax msgpack files: any state dict that `flax.serialization` wrote, Hugging Face's `flax_model.msgpack` among them.

Opening walks over the headers of the file; the bytes of arrays are read by range when they are wanted. The format keeps
no checksum.
"""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple

from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.readers.checkpoint import Checkpoint
from orbax_t5x.readers.flax_msgpack.leaves import is_empty, leaf_of, named_nodes
from orbax_t5x.readers.flax_msgpack.walk import Node, walk
from orbax_t5x.readers.hub_files import LFS_POINTER, read_config, refuse_lfs_pointer
from orbax_t5x.storage import locations
from orbax_t5x.storage.limits import Limits
from orbax_t5x.storage.store import OpenFiles, Store, StoredFile

HUB_FILE = "flax_model.msgpack"
# How Flax names the files of steps, and the Hugging Face trainer its directories.
_STEP_NAME = re.compile(r"(?:.*[._-])?checkpoint[-_](?P<step>[0-9]{1,18})", re.ASCII | re.DOTALL)
# A file up to this size is fetched whole from a remote store: its headers and small arrays are all over it.
_LOADED_BYTES = 1 << 24


class StateFile(NamedTuple):
    """An open msgpack file and its tree; the walk read `index_bytes`."""

    file: StoredFile
    files: OpenFiles
    tree: dict[str, Node]
    index_bytes: int


def open_state_file(root: Store, name: str, limits: Limits) -> StateFile:
    """Walks over a msgpack file whose top is a map."""
    files = root.open_files()
    file = files.file(name)
    file.load(_LOADED_BYTES)
    refuse_lfs_pointer(bytes(file.read(0, min(file.size, len(LFS_POINTER)))), file.path)
    tree, bytes_read = walk(file, limits)
    if not isinstance(tree, dict):
        raise CorruptCheckpointError("the msgpack file holds no map at its top, so it is no state dict", path=file.path)
    return StateFile(file, files, tree, bytes_read)


def named_by_caller(path: str) -> tuple[Store, str]:
    """Opens the directory of a file that the caller named, and returns its name; the caller's symlink is followed."""
    directory, name = os.path.split(locations.resolved(path) if locations.is_link(path) else path)
    return locations.open_store(directory), name


def open_flax_msgpack(path: str | os.PathLike[str], *, limits: Limits) -> Checkpoint:
    """Opens a local file, or a directory that holds `flax_model.msgpack`."""
    path = locations.absolute(os.fspath(path))
    is_directory = locations.is_directory(path)
    root, name = (locations.open_store(path), HUB_FILE) if is_directory else named_by_caller(path)
    opened = open_state_file(root, name, limits)
    nodes = dict(named_nodes(opened.tree, opened.file, limits))
    metadata: dict[str, Any] = {"files": [name]}
    if os.path.basename(path) == HUB_FILE or is_directory:
        metadata |= read_config(root if is_directory else locations.open_store(os.path.dirname(path)), limits)
    return Checkpoint(
        path=path,
        format="flax_msgpack",
        step=int(match["step"]) if (match := _STEP_NAME.fullmatch(os.path.basename(path))) else None,
        leaves={key: leaf_of(key, node, opened.file, limits) for key, node in nodes.items() if not is_empty(node)},
        empties={key: node for key, node in nodes.items() if is_empty(node)},
        metadata=metadata,
        close=opened.files.close,
        index_bytes=opened.index_bytes,
    )
