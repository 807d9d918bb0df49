"""Transforms and keyword arguments as Python code, with `ot` for this package."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import numpy as np


def _is_tuple(value: Any) -> TypeGuard[tuple[Any, ...]]:
    return isinstance(value, tuple)


def code_of(value: Any) -> str:
    """Returns the code that makes a value."""
    if not isinstance(value, type) and hasattr(value, "as_code"):
        return value.as_code()
    if _is_tuple(value) and not hasattr(value, "_fields"):  # tuples inside, such as rules, stay tuples
        return f"[{', '.join(repr(item) if _is_tuple(item) else code_of(item) for item in value)}]"
    return repr(value.name if isinstance(value, np.dtype) else value)


def dataclass_call(value: Any, name: str) -> str:
    """Returns the call `name(…)` that makes a dataclass."""
    fields = [field for field in dataclasses.fields(value) if field.init and not field.name.startswith("_")]
    arguments: list[str] = []
    for field in fields:
        given = getattr(value, field.name)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            arguments.append(code_of(given))
        elif given != field.default:
            arguments.append(f"{field.name}={code_of(given)}")
    return f"{name}({', '.join(arguments)})"


def calls_code(values: Iterable[Any]) -> str:
    """Returns the code of several values, separated by commas."""
    return ", ".join(map(code_of, values))


def arguments_code(arguments: Mapping[str, Any]) -> str:
    """Returns keyword arguments as `a=1, b=True`."""
    return ", ".join(f"{name}={'' if value is ... else code_of(value)}" for name, value in arguments.items())
