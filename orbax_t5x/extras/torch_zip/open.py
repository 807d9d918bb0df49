"""PyTorch's files (`.bin`, `.pt`, `.pth`, `.ckpt`) by byte range.

A file is a ZIP archive: a pickle that describes the tree, and a member for each storage; `sequential` has the form
before 1.6. Opening parses the pickle as data, without PyTorch and without calling anything; the crc32 of each member is
its checksum.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

from orbax_t5x.errors import CheckpointNotFoundError, CorruptCheckpointError, Fix, UnsupportedCheckpointError
from orbax_t5x.extras.torch_zip.leaves import LeafMaker
from orbax_t5x.extras.torch_zip.opcodes import parse_pickle
from orbax_t5x.extras.torch_zip.sequential import SequentialFile, is_sequential
from orbax_t5x.files.interface import StoredFile
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.places import files_at, open_directory_of
from orbax_t5x.readers.checkpoint import Checkpoint
from orbax_t5x.readers.flax_msgpack.leaves import is_empty, named_nodes
from orbax_t5x.readers.hub_files import ModelFiles, parts_of, trainer_step
from orbax_t5x.readers.zip_members import Archive

INDEX_SUFFIX = ".bin.index.json"
# Names for a model in one file, for the index of several, and PEFT's for an adapter.
MODEL_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.bin")
_PICKLE_BEGIN = b"\x80"
_PICKLE = "data.pkl"
_STORAGES = "data/"
_BYTE_ORDERS = {b"little": "little", b"big": "big"}


def open_torch(path: str | os.PathLike[str], *, limits: Limits) -> Checkpoint:
    """Opens a file, an index of several, or a directory."""
    given = files_at(os.fspath(path))
    path, is_directory = given.named, given.is_directory()
    directory = given if is_directory else files_at(os.path.dirname(path))
    names = given.names() if is_directory else [os.path.basename(path)]
    name = next((name for name in MODEL_FILES if name in names), names[0]) if names else ""
    if is_directory and name not in MODEL_FILES:
        raise CheckpointNotFoundError(f"none of {', '.join(MODEL_FILES)} is in this directory", path=path)
    if is_directory or name.endswith(INDEX_SUFFIX):
        files = directory
    else:
        if "-of-" in name:
            parts_of(name, directory)
        files, name = open_directory_of(path)
    opened = _TorchFiles(files, limits)
    if name.endswith(INDEX_SUFFIX):
        opened.add_index(name)
    else:
        opened.add_file(name)
    opened.add_config(directory)
    return opened.checkpoint(path, trainer_step(directory.named))


class _TorchFiles(ModelFiles):
    """PyTorch's files of a model."""

    format = "torch"
    suffix = ".bin"

    def add_file(self, name: str) -> None:
        file = self._root.file(name)
        if is_sequential(file):
            archive = SequentialFile(file, self._limits)
            storages, swap = "", archive.is_swapped
            tree: Any = archive.tree
        else:
            _require_zip(file)
            archive = Archive(file, self._limits)
            top = _top_folder(archive)
            storages, swap = top + _STORAGES, _is_swapped(archive, top)
            pickle = archive.read(top + _PICKLE, self._limits.index_bytes, "Limits.index_bytes")
            tree = parse_pickle(pickle, file.path, file.size, self._limits)
        maker = LeafMaker(archive, storages, swap=swap, limits=self._limits)
        self._bytes += archive.index_bytes
        self._metadata["files"].append(name)
        nodes: Iterator[tuple[str, Any]] = named_nodes(tree, file, self._limits)
        for leaf, node in nodes:
            self._claim((leaf,), name)
            if is_empty(node):
                self._empties[leaf] = node
            else:
                self._leaves[leaf] = maker.leaf(leaf, node)


def _require_zip(file: StoredFile) -> None:
    """Refuses other programs' pickles."""
    if bytes(file.read(0, min(file.size, 1))) == _PICKLE_BEGIN:
        raise UnsupportedCheckpointError(
            "a pickle that torch.save did not write, which would run code to be read",
            path=file.path,
            fix=Fix("load it with its own program, and save the arrays as safetensors"),
        )


def _top_folder(archive: Archive) -> str:
    """Returns the folder that holds all members, with a slash."""
    tops = {name.partition("/")[0] for name in archive.members}
    top = f"{min(tops)}/" if len(tops) == 1 else ""
    if f"{top}constants.pkl" in archive.members or any(name.startswith(f"{top}code/") for name in archive.members):
        raise UnsupportedCheckpointError(
            "a TorchScript archive, which holds code besides tensors",
            path=archive.file.path,
            fix=Fix("in PyTorch, torch.save(torch.jit.load(path).state_dict(), new_path)"),
        )
    if not top or top + _PICKLE not in archive.members:
        raise archive.corrupt(f"a ZIP archive without {_PICKLE!r} in one folder that holds everything")
    return top


def _is_swapped(archive: Archive, top: str) -> bool:
    """Tests if elements are in the other byte order."""
    if f"{top}byteorder" not in archive.members:
        return sys.byteorder != "little"
    order = _BYTE_ORDERS.get(archive.read(f"{top}byteorder", 16, "what a byte order takes"))
    if order is None:
        raise CorruptCheckpointError("its byteorder is neither 'little' nor 'big'", path=archive.file.path)
    return order != sys.byteorder
