"""Transforms as text: one line for people, and a digest that tells equal transforms in every process."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

# A transform with hundreds of rules is still one line of a table.
_SHOWN_ITEMS = 3


def _is_transform(value: Any) -> bool:
    """Whether a value is one of our transforms; their class stands above this module."""
    return not isinstance(value, type) and hasattr(value, "describe") and hasattr(value, "digest")


def describe_fields(transform: Any) -> str:
    """A dataclass by its class and the fields that differ from their defaults."""
    fields = []
    for field in dataclasses.fields(transform):
        value = getattr(transform, field.name)
        if field.repr and (field.default is dataclasses.MISSING or value != field.default):
            named = field.default is not dataclasses.MISSING
            fields.append(f"{field.name}={_short(value)}" if named else _short(value))
    return f"{type(transform).__name__}({', '.join(fields)})"


def _short(value: Any) -> str:
    if isinstance(value, re.Pattern):
        return repr(value.pattern)
    if isinstance(value, tuple) and len(value) > _SHOWN_ITEMS:
        return f"({', '.join(_short(item) for item in value[:_SHOWN_ITEMS])}, … {len(value)} in all)"
    if isinstance(value, tuple):
        return f"({', '.join(_short(item) for item in value)}{',' if len(value) == 1 else ''})"
    if isinstance(value, np.dtype):
        return value.name
    if _is_transform(value):
        return value.describe()
    if callable(value):
        return qualified_name(value)
    return repr(value)


def digest_fields(transform: Any) -> str:
    """The digest of a dataclass by its class and fields; 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(_encode(transform), sort_keys=True).encode()).hexdigest()[:32]


def _encode(value: Any) -> Any:
    """A value of a transform as JSON. Arrays count by shape and dtype: a digest tells rules apart, not data."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if _is_transform(value):
        # A field with a leading underscore is worked out from the others.
        names = [field.name for field in dataclasses.fields(value) if not field.name.startswith("_")]
        return {"transform": type(value).__name__, **{name: _encode(getattr(value, name)) for name in names}}
    if isinstance(value, re.Pattern):
        # str patterns are always UNICODE; an uncompiled one and a compiled one without flags are the same rule.
        flags = value.flags & ~re.UNICODE
        return {"pattern": value.pattern, "flags": flags} if flags else value.pattern
    if isinstance(value, Mapping):
        return {"mapping": {str(key): _encode(item) for key, item in value.items()}}
    if isinstance(value, (tuple, list)):
        return [_encode(item) for item in value]
    if isinstance(value, (frozenset, set)):
        return sorted((_encode(item) for item in value), key=json.dumps)
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if isinstance(value, enum.Enum):
        return {"enum": value.name}
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return {"array": [int(size) for size in value.shape], "dtype": str(value.dtype)}
    if value is ...:
        return {"ellipsis": True}
    return {"function": qualified_name(value)}


def qualified_name(function: Any) -> str:
    """How a plain function is called in plans and digests; a partial counts as its function."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def digest_of(transform: Any) -> str:
    """The digest of a transform, or of a plain function by its qualified name."""
    if _is_transform(transform):
        return transform.digest()
    return hashlib.sha256(qualified_name(transform).encode()).hexdigest()[:32]


def describe_transform(transform: Any) -> str:
    """One line for people; plain functions are opaque."""
    return transform.describe() if _is_transform(transform) else f"{qualified_name(transform)} (opaque)"
