"""Writes transforms as the Python code that makes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from orbax_t5x.rules import RulePack
from orbax_t5x.transforms import Transform

_INVERSE = "inverse of "


def calls_text(transforms: Iterable[Any]) -> str:
    """Returns the calls that make transforms, separated by commas, with `ot` for this package."""
    return ", ".join(map(_call_text, transforms))


def _call_text(transform: Any) -> str:
    if isinstance(transform, RulePack):
        is_inverse = transform.name.startswith(_INVERSE)
        return f"ot.rules.{transform.name.removeprefix(_INVERSE)}{'.inverse()' if is_inverse else ''}"
    if not isinstance(transform, Transform) or not dataclasses.is_dataclass(transform):
        return repr(transform)
    return f"ot.transforms.{type(transform).__name__}({', '.join(_arguments(transform))})"


def _arguments(transform: Any) -> Iterable[str]:
    for field in dataclasses.fields(transform):
        value = getattr(transform, field.name)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            yield _value_text(value)
        elif field.init and value != field.default:
            yield f"{field.name}={_value_text(value)}"


def _value_text(value: Any) -> str:
    if isinstance(value, Transform):
        return _call_text(value)
    if isinstance(value, np.dtype):
        return repr(value.name)
    return f"[{', '.join(map(repr, value))}]" if isinstance(value, tuple) else repr(value)
