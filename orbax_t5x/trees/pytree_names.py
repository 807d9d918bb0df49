"""Names of a pytree's leaves, as `flax.serialization.to_state_dict` gives them.

Dict keys, field names and sequence indices, as text, joined by '/'.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

# The attribute that holds the key, in each kind of key of a JAX key path.
_KEY_ATTRIBUTES = ("key", "name", "idx")
_KEY = operator.attrgetter("key")


def key_text(key: Any) -> str:
    """Returns the name of a step in a JAX key path.

    It is a dict key (`None` is "None"), a field's name, or an index.
    """
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
