"""State dicts as flat mappings from '/'-joined names to leaves.

Everything here works on names; leaves are never looked into, so nothing is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from orbax_t5x.trees.narrow import is_mapping

FlatState = Mapping[str, Any]
"""Leaves by '/'-joined name."""

StateDict = Mapping[str, Any]
"""Nested mappings with text as keys; the leaves are a user's values."""

_SPEC_KEYS = frozenset(("driver", "kvstore", "metadata"))


class EndlessTreeError(ValueError):
    """A tree that contains itself or is too deep; a predicate."""


class NameClashError(ValueError):
    """Two leaves with equal names, or one below the other."""

    def __init__(self, first: str, second: str):
        self.names: tuple[str, str] = (first, second)
        what = "two leaves have this name" if first == second else f"is a leaf, and so is {second!r}, which is below it"
        super().__init__(f"{first!r}: {what}" if first == second else f"{first!r} {what}")


def is_tensorstore_spec(value: Any) -> bool:
    """Tests for a serialized TensorStore spec, a leaf to T5X."""
    return isinstance(value, Mapping) and _SPEC_KEYS <= value.keys()


def _walk_nested(tree: Mapping[Any, Any], keep_empty_nodes: bool) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a finite tree by name, in order."""
    pending: list[tuple[str, Any, Iterator[tuple[Any, Any]]]] = [("", tree, iter(tree.items()))]
    above = {id(tree)}
    while pending:
        prefix, node, items = pending[-1]
        for key, value in items:
            name = f"{prefix}{key}"
            if not is_mapping(value) or is_tensorstore_spec(value):
                yield name, value
            elif value:
                if id(value) in above:
                    raise EndlessTreeError(f"contains itself, at {name[:40]!r}")
                above.add(id(value))
                pending.append((f"{name}/", value, iter(value.items())))
                break
            elif keep_empty_nodes:
                yield name, value
        else:
            above.remove(id(node))
            pending.pop()


def flatten(state_dict: StateDict, keep_empty_nodes: bool = False) -> dict[str, Any]:
    """Flattens a nested dict to leaves by '/'-joined name.

    None is a leaf, and so is a serialized TensorStore spec. Keys that hold '/' give the same joined name; other keys
    than text are written as text. `keep_empty_nodes` keeps empty mappings, as themselves.

    Raises:
      NameClashError: two leaves have the same name.
    """
    flat: dict[str, Any] = {}
    for name, value in _walk_nested(state_dict, keep_empty_nodes):
        if name in flat:
            raise NameClashError(name, name)
        flat[name] = value
    return flat


def unflatten(flat: FlatState, *, join_clashes: bool = False) -> dict[str, Any]:
    """Builds the nested dict that `flatten` makes `flat` of.

    Where a leaf's name runs through another (`a` and `a/b`), that is a NameClashError, or with `join_clashes` the
    longer name's rest stays joined as one key; `flatten` undoes that, too.
    """
    root: dict[str, Any] = {}
    # What was made here is a node; a mapping that came in as a leaf is not.
    nodes: set[str] = set()
    for name, value in flat.items():
        node, path = root, ""
        parts = name.split("/")
        for depth, part in enumerate(parts[:-1]):
            path = f"{path}/{part}" if depth else part
            if part not in node:
                node[part] = {}
                nodes.add(path)
            elif path not in nodes:
                if not join_clashes:
                    raise NameClashError(path, name)
                part = "/".join(parts[depth:])
                break
            node = node[part]
        else:
            part = parts[-1]
            if part in node:
                if not join_clashes:
                    below = next((other for other in flat if other.startswith(f"{name}/")), name)
                    raise NameClashError(name, below)
                _rejoin(node, part, nodes, name)
        node[part] = value
    return root


def unwrapped(tree: dict[str, Any]) -> Any:
    """Converts a nested dict to the tree that was saved.

    An array that is the whole tree has an empty name, and is no dict.
    """
    has_names = isinstance(tree.get(""), dict) and tree[""] != {}
    return tree[""] if tree.keys() == {""} and not has_names else tree


def prefixed(prefix: str, name: str) -> str:
    """Puts a leaf's name below a prefix.

    An empty name, that of an array without a tree, gives the prefix.
    """
    return f"{prefix}/{name}" if prefix and name else prefix or name


def parents(name: str) -> tuple[str, ...]:
    """Returns the containers of a leaf, outermost first, without the root."""
    parts = name.split("/")
    return tuple(["/".join(parts[:end]) for end in range(1, len(parts))])


def _rejoin(node: dict[str, Any], part: str, nodes: set[str], name: str) -> None:
    """Joins the keys below `part` to make room for a leaf."""
    below = node.pop(part)
    for rest, value in flatten(below).items():
        node[f"{part}/{rest}"] = value
    nodes -= {path for path in nodes if path == name or path.startswith(f"{name}/")}
