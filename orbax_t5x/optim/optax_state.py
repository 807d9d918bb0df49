"""State dicts of pytrees, named as `flax.serialization` does, and back.

Optimizer states hold more kinds of nodes than Flax registers: ordered dicts, data classes, nodes of other packages.
Every node that JAX can flatten has a state dict here, with the names of JAX's key paths: dict keys, field names,
sequence indices as text. Leaves of any type pass through untouched: arrays, abstract leaves, partition specs, typed
PRNG keys, None. Going back, a reference gives the structure; its leaves are not used. Entries without leaves may be
absent; other absent entries are an error that names them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from orbax_t5x.trees.pytree_names import key_text, leaf_name


class OpenNode(NamedTuple):
    """A pytree's level: named children, and a function that replaces them."""

    names: tuple[str, ...]
    children: tuple[Any, ...]
    rebuild: Callable[[Sequence[Any]], Any]


def open_node(node: Any) -> OpenNode | None:
    """Lists the children of a node; None for a leaf."""
    if node is None:
        return None
    if type(node) is dict:
        # JAX would sort the keys, and refuse keys that cannot be compared.
        keys = tuple(node)
        opened = OpenNode(
            tuple(str(key) for key in keys),
            tuple(node.values()),
            lambda children: dict(zip(keys, children, strict=True)),
        )
    else:
        paths, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
        if len(paths) == 1 and not paths[0][0]:
            return None
        names = tuple(key_text(path[0]) for path, _ in paths)
        opened = OpenNode(names, tuple(child for _, child in paths), treedef.unflatten)
    if len(set(opened.names)) != len(opened.names):
        raise ValueError(f"Keys do not have a unique string representation: {sorted(opened.names)}")
    return opened


def flatten_by_name(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[str], list[Any], Any]:
    """Returns '/'-joined names, leaves and the tree's definition."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [leaf_name(path) for path, _ in paths], [leaf for _, leaf in paths], treedef


def to_state_dict(tree: Any, *, keep_empty: bool = True) -> Any:
    """Returns the state dict of a tree; a leaf is its own.

    Nodes without leaves stay as empty dicts with `keep_empty`; the outermost node always stays.
    """
    opened = open_node(tree)
    if opened is None:
        return tree
    result = {}
    for name, child in zip(opened.names, opened.children, strict=True):
        value = to_state_dict(child, keep_empty=keep_empty)
        if keep_empty or open_node(child) is None or value:
            result[name] = value
    return result


def from_state_dict(reference: Any, state_dict: Any, *, what: str = "state") -> Any:
    """Builds a tree like `reference` with a state dict's leaves.

    As in Flax, a dict in the reference ignores entries that it does not have; a tuple, list or record with other
    entries is a ValueError. Entries that hold nothing (empty nodes, None) may be absent. Errors call the tree `what`.
    """
    missing: list[str] = []
    result = _restore(reference, state_dict, (), missing, what)
    if missing:
        paths = missing[0] if len(missing) == 1 else f"{missing}"
        verb = "is" if len(missing) == 1 else "are"
        raise ValueError(f"Failed to restore {what}, path {paths} {verb} not present in the input {what} dict.")
    return result


def _restore(reference: Any, state_dict: Any, path: tuple[str, ...], missing: list[str], what: str) -> Any:
    opened = open_node(reference)
    if opened is None:
        return state_dict
    where = "/".join(path) or "the root"
    if not isinstance(state_dict, Mapping):
        raise ValueError(
            f"Failed to restore {what}: {where} is a {type(state_dict).__name__}, not a dict of {list(opened.names)}."
        )
    extra = set(map(str, state_dict)).difference(opened.names)
    if extra and not isinstance(reference, Mapping):
        kind = type(reference).__name__
        raise ValueError(
            f"Failed to restore {what}: {where} is a {kind} of {list(opened.names)}, which has no {sorted(extra)}."
        )
    children = []
    for name, child in zip(opened.names, opened.children, strict=True):
        if name in state_dict:
            child = _restore(child, state_dict[name], (*path, name), missing, what)
        else:
            missing.extend("/".join((*path, name, *rest)) for rest in _leaf_paths(child))
        children.append(child)
    return opened.rebuild(children)


def _leaf_paths(tree: Any) -> list[tuple[str, ...]]:
    """Lists the paths of the leaves below a node.

    None holds nothing.
    """
    return [tuple(map(key_text, path)) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
