"""Leaves of any tree by the names that a restore gives them.

T5X's train states and `flax.nnx` states and modules name their own leaves, anywhere in the tree; all others
have the names of `flax.serialization.to_state_dict`.

A leaf's name in an `nnx.State` is its path, '/'-joined, integers as text, without the trailing `value` that a stock
Orbax save adds. What comes back has the integer paths, `Variable` types and metadata of the target; nothing is derived
from the names in a file. An `nnx.State` can only be met where `flax.nnx` is loaded, so nothing here imports it.

A tree that contains itself, or is nested too deep, would be walked without end, or end in a RecursionError; after one
of those JAX's flattening takes no deep tree in that thread any more. So `require_levels` comes first.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from orbax_t5x.trees.flat import EndlessTreeError, flatten, is_tensorstore_spec
from orbax_t5x.trees.narrow import is_mapping
from orbax_t5x.trees.pytree_names import leaf_name

if TYPE_CHECKING:
    from flax import nnx

NamedLeaf = tuple[str, Any, bool]
"""Name, value, and whether it is an `nnx.Param`."""

_PLAIN_TYPES = frozenset({dict, list, tuple, int, float, jax.ShapeDtypeStruct})
# Python's own recursion ends at 1,000 calls, and a level of a tree may take several.
MOST_LEVELS = 200
_SHOWN_LEVELS = 8
_SHOWN_CHARACTERS = 200
_LEAVES = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, str, bytes, int, float, complex, type(None))
# Those whose exact type shows it, as nearly always.
_PLAIN_LEAVES = frozenset(_LEAVES[1:])


def is_nnx_node(node: Any) -> bool:
    """Tests if a node is an object of `flax.nnx` with variables."""
    loaded = sys.modules.get("flax.nnx")
    return loaded is not None and isinstance(node, (loaded.State, loaded.Pytree))


def flatten_node(node: Any) -> tuple[list[NamedLeaf], Callable[[Mapping[str, Any]], Any]]:
    """Returns the leaves of a node, and its rebuilder."""
    loaded = sys.modules["flax.nnx"]
    if isinstance(node, loaded.State):
        return flatten_target(node)
    graph, state = loaded.split(node)
    named, rebuild = flatten_target(state)
    return named, lambda values: loaded.merge(graph, rebuild(values))


def flatten_target(state: nnx.State) -> tuple[list[NamedLeaf], Callable[[Mapping[str, Any]], nnx.State]]:
    """Flattens an `nnx.State` to names, values and their kinds.

    A leaf is (name, value, True for an `nnx.Param`); the second result rebuilds the state. The function puts values by
    name into a new State: each `Variable` with its type and metadata.
    """
    loaded = sys.modules["flax.nnx"]
    flat = list(loaded.to_flat_state(state))
    names = ["/".join(map(str, path)) for path, _ in flat]

    def value_of(leaf: Any) -> Any:
        return leaf.get_value() if isinstance(leaf, loaded.Variable) else leaf

    def with_value(leaf: Any, value: Any) -> Any:
        return leaf.replace(value) if isinstance(leaf, loaded.Variable) else value

    def rebuild(values: Mapping[str, Any]) -> nnx.State:
        return loaded.from_flat_state(
            [(path, with_value(leaf, values[name])) for name, (path, leaf) in zip(names, flat, strict=True)]
        )

    leaves = zip(names, flat, strict=True)
    return [(name, value_of(leaf), isinstance(leaf, loaded.Param)) for name, (_, leaf) in leaves], rebuild


def is_train_state(node: Any) -> bool:
    """Tests if a node is a train state, which names its leaves."""
    if isinstance(node, type):
        return False
    return callable(getattr(node, "state_dict", None)) and callable(getattr(node, "restore_state", None))


def names_itself(node: Any) -> bool:
    """Tests if a node is T5X's train state or of `flax.nnx`."""
    # Asked for every node and leaf of a target.
    if type(node) in _PLAIN_TYPES:
        return False
    return not isinstance(node, jax.Array | jax.ShapeDtypeStruct) and (is_train_state(node) or is_nnx_node(node))


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves by name; the last of equal names."""
    return dict(_walk_named("", tree))


def _walk_named(name: str, node: Any) -> Iterator[tuple[str, Any]]:
    start = f"{name}/" if name else ""
    if names_itself(node):
        own = (
            flatten(node.state_dict()) if is_train_state(node) else {leaf[0]: leaf[1] for leaf in flatten_node(node)[0]}
        )
        yield from ((start + leaf, value) for leaf, value in own.items())
    elif is_mapping(node) and not is_tensorstore_spec(node):
        for key, child in node.items():
            yield from _walk_named(f"{start}{key}", child)
    else:
        paths = jax.tree_util.tree_leaves_with_path(
            node, is_leaf=lambda child: child is not node and (is_mapping(child) or names_itself(child))
        )
        for path, child in paths:
            if path:
                yield from _walk_named(start + leaf_name(path), child)
            else:
                yield name, child


def require_levels(tree: Any) -> None:
    """Checks that a tree ends.

    Raises:
      EndlessTreeError: it contains itself, or has `MOST_LEVELS` levels or more.
    """
    pending: list[Iterator[tuple[Any, Any]]] = [iter([("", tree)])]
    above: list[tuple[Any, Any]] = []
    while pending:
        for name, node in pending[-1]:
            kind = type(node)
            if kind in _PLAIN_LEAVES:
                continue
            below = node.items() if kind is dict else _children(node)
            if below is not None:
                above.append((name, node))
                pending.append(iter(below))
                break
        else:
            pending.pop()
            if above:
                above.pop()
        if len(above) >= MOST_LEVELS:
            raise _error(above)


def _error(above: Sequence[tuple[Any, Any]]) -> EndlessTreeError:
    """Makes the error for a node below these names and nodes."""

    def path(most: int) -> str:
        return "/".join([str(name) for name, _ in above[1 : most + 1]])[:_SHOWN_CHARACTERS]

    seen: set[int] = set()
    for number, (_, node) in enumerate(above):
        if id(node) in seen:
            return EndlessTreeError(f"contains itself, at {path(number)!r}")
        seen.add(id(node))
    return EndlessTreeError(f"has {MOST_LEVELS} levels or more, at {path(_SHOWN_LEVELS)!r}; does it contain itself?")


def _children(node: Any) -> Iterable[tuple[Any, Any]] | None:
    """Returns a node's children by name, or None for a leaf."""
    if isinstance(node, _LEAVES):
        return None
    if is_mapping(node):
        return node.items()
    if isinstance(node, list | tuple):
        return enumerate(node)
    if names_itself(node):
        return None
    one_level = jax.tree_util.default_registry.flatten_one_level(node)
    return None if one_level is None else enumerate(one_level[0])


def leaves_digest(tree: Any) -> str:
    """Returns a digest of a tree's names, shapes and dtypes; "" for a tree that contains itself."""
    try:
        require_levels(tree)
    except EndlessTreeError:
        return ""
    leaves = [
        f"{name}: {getattr(leaf, 'dtype', type(leaf).__name__)}{list(getattr(leaf, 'shape', ()))}"
        for name, leaf in named_leaves(tree).items()
        if leaf is not None
    ]
    return hashlib.sha256("\n".join(sorted(leaves)).encode()).hexdigest()
