"""`flax.nnx.State` as a target: leaves by path, put back with their types and metadata.

A leaf's name is its path, '/'-joined, integers as text, without the trailing `value` that a stock Orbax save of an
`nnx.State` adds. What comes back has the integer paths, `Variable` types and metadata of the target; nothing is derived
from the names in a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx


def flatten_target(state: nnx.State) -> tuple[list[tuple[str, Any, bool]], Callable[[Mapping[str, Any]], nnx.State]]:
    """Leaves of an `nnx.State`, concrete or abstract.

    Returns:
      (name, value, whether it is an `nnx.Param`) of each leaf, and the function that puts values by name into a new
      State: each `Variable` with its type and metadata, other leaves as they are. The given state is not changed.
    """
    flat = [(path, leaf) for path, leaf in nnx.to_flat_state(state)]
    named = [("/".join(str(part) for part in path), leaf) for path, leaf in flat]

    def rebuild(values: Mapping[str, Any]) -> nnx.State:
        return nnx.from_flat_state(
            [(path, _with_value(leaf, values[name])) for (path, leaf), (name, _) in zip(flat, named, strict=True)]
        )

    return [(name, _value(leaf), isinstance(leaf, nnx.Param)) for name, leaf in named], rebuild


def _value(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def _with_value(leaf: Any, value: Any) -> Any:
    return leaf.replace(value) if isinstance(leaf, nnx.Variable) else value
