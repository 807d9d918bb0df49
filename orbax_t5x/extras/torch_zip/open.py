"""PyTorch's files (`.bin`, `.pt`, `.pth`, `.ckpt`) by byte range.

A file is a ZIP archive: a pickle that describes the tree, and a member for each storage. Opening parses the pickle as
data, without PyTorch and without calling anything; the crc32 of each member is its checksum.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    Fix,
    UnsupportedCheckpointError,
)
from orbax_t5x.extras.torch_zip.opcodes import parse_pickle
from orbax_t5x.extras.torch_zip.values import WITHOUT_NUMPY, Name, Node, Opaque, TensorNode, Tuple, itemsize_of
from orbax_t5x.files.interface import StoredFile
from orbax_t5x.files.places import files_at, open_directory_of, within_limits
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.readers.checkpoint import Checkpoint
from orbax_t5x.readers.flax_msgpack.leaves import is_empty, named_nodes
from orbax_t5x.readers.format_table import OLD_TORCH
from orbax_t5x.readers.hub_files import ModelFiles, parts_of, trainer_step
from orbax_t5x.readers.leaves import BrokenLeaf, KnownLeaf
from orbax_t5x.readers.zip_leaf import ZipLeaf, has_overlaps, last_element
from orbax_t5x.readers.zip_members import STORED, Archive

_BEGIN_BYTES = 32
_MAX_INT = 2**63 - 1


class LeafMaker:
    """Maker of a file's leaves."""

    def __init__(self, archive: Archive, storages: str, *, swap: bool):
        self._archive = archive
        self._storages = storages
        self._swap = swap
        # By the identity of the text, which is held: a pickle names one object any number of times.
        self._texts: dict[int, tuple[str | bytes, bytes]] = {}

    def leaf(self, name: str, node: Node) -> Leaf:
        """Makes a leaf, or a broken leaf of an invalid node."""
        try:
            return self._leaf(name, node)
        except CheckpointError as error:
            return BrokenLeaf(name, error, self._archive.file.path)

    def _leaf(self, name: str, node: Node) -> Leaf:
        file = self._archive.file
        if isinstance(node, TensorNode):
            return self._tensor(name, node)
        if isinstance(node, Opaque):
            way = f"save {node.advice} in PyTorch, or " if node.advice else ""
            raise UnsupportedCheckpointError(
                f"it is {node.what}, which is not read; nothing was imported or called",
                fix=Fix(f"{way}leave it out with ot.transforms.Drop({re.escape(name)!r})"),
            )
        if isinstance(node, Name):
            node = node.text
        if isinstance(node, (str, bytes)):
            return KnownLeaf(name, file, np.array(self._bytes_of(node), object))
        if isinstance(node, (bool, int, float, complex)):
            return KnownLeaf(name, file, _pickled_number(node))
        raise UnsupportedCheckpointError("it is a storage without a tensor, which has no shape")

    def _bytes_of(self, text: str | bytes) -> bytes:
        """Returns the bytes of a text, made once."""
        found = self._texts.get(id(text))
        if found is None:
            found = self._texts[id(text)] = (text, text.encode() if isinstance(text, str) else text)
        return found[1]

    def _tensor(self, name: str, tensor: TensorNode) -> Leaf:
        if tensor.metadata:
            raise UnsupportedCheckpointError(
                "its values are stored to be conjugated or negated when they are used",
                fix=Fix("save tensor.resolve_conj().resolve_neg() in PyTorch"),
            )
        shape, strides = _checked_sizes("shape", tensor.shape), _checked_sizes("strides", tensor.strides)
        (offset,) = _checked_sizes("offset", [tensor.offset])
        if len(shape) != len(strides):
            raise CorruptCheckpointError(f"{len(strides)} strides for {len(shape)} dimensions")
        dtype = _storage_dtype(tensor.dtype)
        self._archive.file.limits.require_shape(shape, dtype)
        count = self._elements(tensor, dtype)
        end = 0 if 0 in shape else offset + last_element(shape, strides) + 1
        if end > count:
            raise CorruptCheckpointError(
                f"shape {list(shape)} at strides {list(strides)} ends at the element {end} of a storage of {count}"
            )
        if 0 not in shape and has_overlaps(shape, strides):
            raise CorruptCheckpointError(
                f"the strides {list(strides)} of shape {list(shape)} overlap: several indices share an element",
                fix=Fix("save tensor.contiguous() in PyTorch"),
            )
        member = self._storages + tensor.storage.key
        return ZipLeaf(name, self._archive, member, offset * dtype.itemsize, shape, strides, dtype, swap=self._swap)

    def _elements(self, tensor: TensorNode, dtype: np.dtype) -> int:
        """Returns the elements of a storage, proven to be there."""
        storage = tensor.storage
        nbytes = storage.elements * itemsize_of(storage.dtype)
        member = self._archive.members.get(self._storages + storage.key)
        if member is None:
            raise CorruptCheckpointError(f"its storage {storage.key[:100]!r} is missing")
        if member.method != STORED:
            raise CorruptCheckpointError(f"its storage {storage.key!r} is compressed, and PyTorch compresses none")
        if member.size < nbytes:
            raise CorruptCheckpointError(f"its storage {storage.key!r} has {member.size} bytes, and must have {nbytes}")
        return nbytes // dtype.itemsize


def _checked_sizes(what: str, value: Any) -> tuple[int, ...]:
    # `type`, because True is an int.
    if not isinstance(value, list) or not all(type(size) is int and 0 <= size <= _MAX_INT for size in value):
        shown = list(value)[:10] if type(value) is Tuple else value
        raise CorruptCheckpointError(f"its {what} is {str(shown)[:200]}, which are no sizes")
    return tuple(value)


def _storage_dtype(name: str | None) -> np.dtype:
    if name is None or name in WITHOUT_NUMPY:
        raise UnsupportedCheckpointError(f"NumPy has no type for torch.{name}")
    return np.dtype(getattr(ml_dtypes, name, name))


def _pickled_number(value: bool | int | float | complex) -> np.ndarray:
    """Returns a Python number as NumPy has it, integers in 64 bits."""
    if isinstance(value, (bool, float, complex)):
        return np.array(value)
    if not -_MAX_INT - 1 <= value <= 2 * _MAX_INT + 1:
        raise UnsupportedCheckpointError("an integer of more than 64 bits")
    return np.array(value, np.int64 if value <= _MAX_INT else np.uint64)


INDEX_SUFFIX = ".bin.index.json"
# Names for a model in one file, for the index of several, and PEFT's for an adapter.
MODEL_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.bin")
_PICKLE_BEGIN = b"\x80"
_PICKLE = "data.pkl"
_STORAGES = "data/"
_BYTE_ORDERS = {b"little": "little", b"big": "big"}


@within_limits
def open_torch(path: str | os.PathLike[str]) -> Checkpoint:
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
    opened = _TorchFiles(files)
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
        _require_zip(file)
        archive = Archive(file)
        top = _top_folder(archive)
        pickle = archive.read(top + _PICKLE, file.limits.index_bytes, "Limits.index_bytes")
        tree: Any = parse_pickle(pickle, file)
        maker = LeafMaker(archive, top + _STORAGES, swap=_is_swapped(archive, top))
        self._bytes += archive.index_bytes
        self._metadata["files"].append(name)
        nodes: Iterator[tuple[str, Any]] = named_nodes(tree, file)
        for leaf, node in nodes:
            self._claim((leaf,), name)
            if is_empty(node):
                self._empties[leaf] = node
            else:
                self._leaves[leaf] = maker.leaf(leaf, node)


def _require_zip(file: StoredFile) -> None:
    """Refuses files of torch before 1.6, and other programs' pickles."""
    head = bytes(file.read(0, min(file.size, _BEGIN_BYTES)))
    if re.match(OLD_TORCH, head, re.DOTALL):
        raise UnsupportedCheckpointError(
            "PyTorch's form before 1.6, pickles with the storages behind them, is not read",
            path=file.path,
            fix=Fix("save it again with torch 1.6 or newer, or as safetensors"),
        )
    if head.startswith(_PICKLE_BEGIN):
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
