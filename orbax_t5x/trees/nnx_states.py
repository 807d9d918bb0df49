"""Parts of a target that are `flax.nnx` states or modules.

Leaves are by path, and put back with their types and metadata.

A leaf's name is its path, '/'-joined, integers as text, without the trailing `value` that a stock Orbax save of an
`nnx.State` adds. What comes back has the integer paths, `Variable` types and metadata of the target; nothing is derived
from the names in a file. An `nnx.State` can only be met where `flax.nnx` is loaded, so nothing here imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flax import nnx

NamedLeaf = tuple[str, Any, bool]
"""Name, value, and whether it is an `nnx.Param`."""


def is_nnx_node(node: Any) -> bool:
    """Tests if a node is an object of `flax.nnx` with variables."""
    loaded = sys.modules.get("flax.nnx")
    return loaded is not None and isinstance(node, (loaded.State, loaded.Pytree))


def flatten_node(node: Any) -> tuple[list[NamedLeaf], Callable[[Mapping[str, Any]], Any]]:
    """Flattens an `nnx.State` or an `nnx.Module`, concrete or abstract.

    Returns the leaves, and a function that puts values in their places.
    """
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
