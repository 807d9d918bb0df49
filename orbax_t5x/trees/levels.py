"""Refusal of trees that are nested too deep or contain themselves.

Such a tree would be walked without end, or end in a RecursionError; after one of those JAX's flattening takes no deep
tree in that thread any more. So the check comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from orbax_t5x.trees.flat import EndlessTreeError
from orbax_t5x.trees.named_leaves import names_itself
from orbax_t5x.trees.narrow import is_mapping

# Python's own recursion ends at 1,000 calls, and a level of a tree may take several.
MOST_LEVELS = 200
_SHOWN_LEVELS = 8
_SHOWN_CHARACTERS = 200
_LEAVES = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, str, bytes, int, float, complex, type(None))

# Those whose exact type shows it, as nearly always.
_PLAIN_LEAVES = frozenset(_LEAVES[1:])


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
            raise _error([name for name, _ in above[1:]], _repeats(node for _, node in above))


def _error(names: Sequence[Any], repeats: int | None) -> EndlessTreeError:
    """Makes the error for a node below these names."""
    path = "/".join(map(str, names[: repeats or _SHOWN_LEVELS]))[:_SHOWN_CHARACTERS]
    if repeats is None:
        return EndlessTreeError(f"has {MOST_LEVELS} levels or more, at {path!r}; does it contain itself?")
    return EndlessTreeError(f"contains itself, at {path!r}")


def _repeats(nodes: Iterable[Any]) -> int | None:
    """Returns the index of the first node that occurs above itself."""
    seen: set[int] = set()
    for number, node in enumerate(nodes):
        if id(node) in seen:
            return number
        seen.add(id(node))
    return None


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
