"""An opened checkpoint: names, shapes and dtypes of its leaves.

Nothing is read beyond the index.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

from orbax_t5x import on_demand
from orbax_t5x.lazy import View
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.lazy.node import leaf_nodes
from orbax_t5x.text.html import html_text
from orbax_t5x.text.wording import array_bytes, array_text, counted, leaves_text, size_text

# Notebooks and `inspect` only.
_page = on_demand.function("orbax_t5x.text.report", "Page")
_section = on_demand.function("orbax_t5x.text.report", "Section")
_row = on_demand.function("orbax_t5x.text.table", "TableRow")
_tree_leaf = on_demand.function("orbax_t5x.text.fold", "TreeLeaf")
_tree_rows = on_demand.function("orbax_t5x.text.fold", "tree_rows")
_empty_text = on_demand.function("orbax_t5x.text.fold", "empty_text")

# Rows shown in a notebook; repeated layers are one.
_SHOWN_ROWS = 200


def _insert(root: dict[str, Any], name: str, value: Any) -> None:
    """Puts a leaf under nested dicts.

    If a leaf is in the way (`a` and `a/b`), it goes under the joined rest.
    """
    node = root
    parts = name.split("/")
    for depth, part in enumerate(parts[:-1]):
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            node["/".join(parts[depth:])] = value
            return
        node = child
    node[parts[-1]] = value


class Checkpoint:
    """Metadata of a checkpoint of any format; made by `orbax_t5x.open_checkpoint`.

    A context manager; garbage collection closes it too, once its leaves are gone as well: a leaf can be
    read for as long as it is referenced. Opening and reading are thread-safe. Reading a leaf after `close()` is a
    ValueError.

    Attributes:
      path: what was opened, resolved.
      given_path: what the caller named: `path`, or a directory above it, such as a root with steps.
      format: "tf_bundle", "t5x", "orbax", "flax_msgpack", "safetensors", "torch", "npz" or "gguf".
      step: the training step in the name, or None; never read from an array.
      metadata: what the format records about itself.
      sequences: names of the containers that were lists or tuples when Orbax saved them; `tree()` has dicts there.
      index_bytes: how many bytes opening read.

    Example:
      >>> with ot.open_checkpoint(bundle) as checkpoint:
      ...     checkpoint.format, checkpoint.step, checkpoint.leaves["shared/embedding"].shape
      ('tf_bundle', 1000000, (128, 16))
    """

    def __init__(
        self,
        *,
        path: str,
        format: str,
        step: int | None,
        leaves: Mapping[str, Leaf],
        empties: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        sequences: Collection[str] = (),
        close: Callable[[], None] | None = None,
        index_bytes: int = 0,
    ):
        """Holds the result of a reader.

        `empties` and `sequences` are as in the properties.

        `close` releases files and makes later reads a ValueError; it may be called again. What it releases must also
        release itself when neither this object nor a leaf refers to it any more.
        """
        for kind in {type(leaf) for leaf in leaves.values()}:
            if not issubclass(kind, Leaf):
                raise TypeError(f"leaves of a Checkpoint are orbax_t5x.lazy.Leaf objects, not {kind.__name__}")
        self.path = path
        self.given_path = path
        self.format = format
        self.step = step
        self.metadata: dict[str, Any] = dict(metadata or {})
        self.index_bytes = index_bytes
        self.sequences: frozenset[str] = frozenset(sequences)
        self._empties = dict(empties or {})
        self._leaves: Mapping[str, View] = MappingProxyType(
            dict(zip(names := sorted(leaves), map(View, leaf_nodes([leaves[name] for name in names])), strict=True))
        )
        self._close = close

    @property
    def leaves(self) -> Mapping[str, View]:
        """The leaves by '/'-joined name, sorted.

        Each is a `LazyArray` that composes (indexing, reshape, …) unread.
        """
        return self._leaves

    @property
    def empties(self) -> Mapping[str, Any]:
        """The nodes without leaves by '/'-joined name.

        A node is None, an empty container, or `...`, as it was saved.
        """
        return MappingProxyType(self._empties)

    def tree(self) -> dict[str, Any]:
        """Returns the leaves as a nested dict.

        None, empty containers and `...` are in their places. An array that was saved by itself has the empty name, as
        in `leaves`.
        """
        root: dict[str, Any] = {}
        for name, value in self._leaves.items():
            _insert(root, name, value)
        for name, value in self._empties.items():
            if name or self._leaves or len(self._empties) > 1:  # else the whole is empty
                _insert(root, name, value)
        return root

    def close(self) -> None:
        """Releases files; leaves can no longer be read."""
        if self._close is not None:
            self._close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _repr_html_(self) -> str:
        rows = checkpoint_rows(self)
        step = "" if self.step is None else f", step {self.step}"
        size = size_text(sum(array_bytes(view.dtype, view.shape) for view in self._leaves.values()))
        title = f"{self.path}: {self.format}{step}, {leaves_text(len(self._leaves))}, {size}"
        left = counted(len(rows[_SHOWN_ROWS:]), "row")
        left_out = f"… and {left} more: see `leaves`" if rows[_SHOWN_ROWS:] else ""
        section = _section(rows=rows[:_SHOWN_ROWS], left_out=left_out)
        return html_text(_page(_row("leaf", "array", size="bytes"), title, sections=[section]).text())

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path!r}: {self.format}, {len(self._leaves)} leaves>"


def checkpoint_rows(checkpoint: Checkpoint, *, folded: bool = True) -> list[Any]:
    """Returns a tree's rows; `folded` shows repeated layers once."""
    leaves = {
        name: _tree_leaf(array_text(view.dtype, view.shape), array_bytes(view.dtype, view.shape))
        for name, view in checkpoint.leaves.items()
    }
    leaves |= {name: _tree_leaf(_empty_text(empty), 0) for name, empty in checkpoint.empties.items()}
    return _tree_rows(leaves, folded=folded)
