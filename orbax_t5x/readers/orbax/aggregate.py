"""The msgpack file of an early Orbax item.

It is a tree, with values that later Orbax stores in arrays of their own. Early Orbax wrote small values, or all of
them, into one file `checkpoint`; a text `PLACEHOLDER://name` refers to an array in the directory of that name. The
first versions wrote no `_METADATA`, so that only this file names the leaves there are; later ones wrote both, and
values that `_METADATA` calls skipped are here.
"""

from __future__ import annotations

from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.files.interface import Files
from orbax_t5x.files.paths import split_name
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.readers.flax_msgpack.leaves import is_empty, msgpack_leaf, named_nodes, placeholder
from orbax_t5x.readers.flax_msgpack.open import open_state_file
from orbax_t5x.readers.flax_msgpack.walk import Node as WalkedNode
from orbax_t5x.readers.leaves import BrokenLeaf
from orbax_t5x.readers.orbax.metadata import UNTYPED, ItemMetadata, NodeMetadata
from orbax_t5x.readers.orbax.steps import MSGPACK_FILE

# What Orbax calls empty nodes.
_EMPTY_TYPES: dict[type, str] = {type(None): "None", dict: "Dict", list: "List"}


class Aggregate:
    """Opened msgpack file of an item."""

    def __init__(self, root: Files, item: str):
        name = f"{item}/{MSGPACK_FILE}" if item else MSGPACK_FILE
        opened = open_state_file(root, name)
        self.index_bytes: int = opened.index_bytes
        self._file = opened.file
        self._nodes: dict[str, WalkedNode] = dict(named_nodes(opened.tree, opened.file))

    def metadata(self) -> ItemMetadata:
        """Returns the metadata that a later writer would have put into `_METADATA`."""
        nodes: list[NodeMetadata] = []
        places: dict[str, str] = {}
        for name, node in self._nodes.items():
            kind = type(node)
            array = placeholder(node)
            if array is not None:
                split_name(array, path=self._file.path, leaf=name)
                if places.setdefault(array, name) != name:
                    raise CorruptCheckpointError(
                        f"is stored under {array!r}, and so is {places[array]!r}", path=self._file.path, leaf=name
                    )
            empty = _EMPTY_TYPES.get(kind) if not node else None
            nodes.append(NodeMetadata(name, array or name, empty or UNTYPED, skipped=array is None))
        return ItemMetadata(
            nodes=tuple(nodes), use_ocdbt=None, use_zarr3=False, absent_is_fill=False, custom_metadata=None, nbytes=0
        )

    def leaf(self, node: NodeMetadata, name: str) -> Leaf:
        """Returns the leaf of a value of the file."""
        value = self._nodes.get(node.name)
        if is_empty(value) or placeholder(value) is not None:
            error = CorruptCheckpointError("the value is missing in the msgpack file")
            return BrokenLeaf(name, error, self._file.path)
        return msgpack_leaf(name, value, self._file)
