"""Transforms as lines of text for people."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np

from orbax_t5x.provenance.digests import qualified_name

# A transform with hundreds of rules is still one line of a table.
_SHOWN_ITEMS = 3


def _is_transform(value: Any) -> bool:
    """Reports whether a value is an own transform."""
    return not isinstance(value, type) and hasattr(value, "describe") and hasattr(value, "digest")


def describe_fields(transform: Any) -> str:
    """Describes a dataclass by the fields that are set."""
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


def describe_transform(transform: Any) -> str:
    """Describes a transform in a line; functions are opaque."""
    return transform.describe() if _is_transform(transform) else f"{qualified_name(transform)} (opaque)"
