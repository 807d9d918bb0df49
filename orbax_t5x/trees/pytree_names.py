"""Names of a pytree's leaves, as `flax.serialization.to_state_dict` gives them.

Dict keys, field names and sequence indices, as text, joined by '/'.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

# The attribute that holds the key, in each kind of key of a JAX key path.
_KEY_ATTRIBUTES = ("key", "name", "idx")
_KEY = operator.attrgetter("key")


def key_text(key: Any) -> str:
    """Returns a dict key, field or index of a path."""
    for attribute in _KEY_ATTRIBUTES:
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def leaf_name(path: Sequence[Any]) -> str:
    """Returns a leaf's '/'-joined name from its JAX key path."""
    try:
        keys = list(map(_KEY, path))
    except AttributeError:
        keys = []
    if keys and set(map(type, keys)) == {str}:  # dicts with text as keys, as nearly all are
        return "/".join(keys)
    return "/".join([key_text(key) for key in path])


def names_in_dicts(tree: Any, start: str = "") -> list[str] | None:
    """Lists names of arrays in nested dicts in JAX's order.

    None: some key is no text, or some node is neither an array nor a dict. JAX's key paths are five objects for each
    leaf, which Python's cyclic collector goes through.
    """
    names: list[str] = []
    return names if type(tree) is dict and _add_names(tree, start, names) else None


def _add_names(tree: Any, start: str, names: list[str]) -> bool:
    children: dict[Any, Any] = tree
    if not set(map(type, children)) <= {str}:
        return False
    for key in sorted(children):
        node = children[key]
        if type(node) is dict:
            if not _add_names(node, f"{start}{key}/", names):
                return False
        elif type(node) is jax.ShapeDtypeStruct or isinstance(node, jax.Array | np.ndarray):
            names.append(start + key)
        else:
            return False
    return True
