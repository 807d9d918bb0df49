"""Leaves of any tree by the names that a restore gives them.

T5X's train states and `flax.nnx` states and modules name their own leaves, anywhere in the tree; all others
have the names of `flax.serialization.to_state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from orbax_t5x.trees.flat import flatten, is_tensorstore_spec
from orbax_t5x.trees.narrow import is_mapping
from orbax_t5x.trees.nnx_states import flatten_node, is_nnx_node
from orbax_t5x.trees.pytree_names import leaf_name

_LEAF_TYPES = (jax.Array, jax.ShapeDtypeStruct)
_PLAIN_TYPES = frozenset({dict, list, tuple, int, float, jax.ShapeDtypeStruct})


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
    return not isinstance(node, _LEAF_TYPES) and (is_train_state(node) or is_nnx_node(node))


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves by '/'-joined name.

    Of two leaves with the same name, the last counts.
    """
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
