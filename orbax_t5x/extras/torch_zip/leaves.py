"""Leaves of a PyTorch file: boxes of its storages."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np

from orbax_t5x.errors import CheckpointError, CorruptCheckpointError, Fix, UnsupportedCheckpointError, error_at
from orbax_t5x.extras.torch_zip.values import WITHOUT_NUMPY, Name, Node, Opaque, TensorNode, Tuple, itemsize_of
from orbax_t5x.files.limits import Limits, charge_metadata
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.readers.flax_msgpack.leaves import NumberLeaf
from orbax_t5x.readers.leaves import BrokenLeaf
from orbax_t5x.readers.ranges.strided import has_overlaps, last_element
from orbax_t5x.readers.string_leaf import StringLeaf
from orbax_t5x.readers.zip_leaf import ZipLeaf
from orbax_t5x.readers.zip_members import STORED, Archive

_MAX_INT = 2**63 - 1


class LeafMaker:
    """Maker of a file's leaves."""

    def __init__(self, archive: Archive, storages: str, *, swap: bool, limits: Limits):
        self._archive = archive
        self._storages = storages
        self._swap = swap
        self._limits = limits
        # By the identity of the text, which is held: a pickle names one object any number of times.
        self._texts: dict[int, tuple[str | bytes, bytes]] = {}

    def leaf(self, name: str, node: Node) -> Leaf:
        """Makes a leaf, or a broken leaf of an invalid node."""
        path = self._archive.file.path
        try:
            return self._leaf(name, node)
        except CheckpointError as error:
            return BrokenLeaf(name, error_at(error, path=path, leaf=name))

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
            return StringLeaf(name, file.path, self._bytes_of(node), file)
        if isinstance(node, (bool, int, float, complex)):
            return NumberLeaf(name, file, _pickled_number(node))
        raise UnsupportedCheckpointError("it is a storage without a tensor, which has no shape")

    def _bytes_of(self, text: str | bytes) -> bytes:
        """Returns the bytes of a text, made and charged once."""
        found = self._texts.get(id(text))
        if found is None:
            charge_metadata(2 * len(text), self._archive.file.path)
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
        self._limits.require_shape(shape, dtype)
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
