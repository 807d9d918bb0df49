"""Transforms and keyword arguments as Python code, with `ot` for this package."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

import numpy as np

# Columns of code that is shown; a literal that is longer stays whole.
_WIDTH = 100
_INDENT = "    "
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def _is_tuple(value: Any) -> TypeGuard[tuple[Any, ...]]:
    return isinstance(value, tuple)


def code_of(value: Any) -> str:
    """Returns the code that makes a value."""
    if not isinstance(value, type) and hasattr(value, "as_code"):
        return value.as_code()
    if _is_tuple(value) and not hasattr(value, "_fields"):  # tuples inside, such as rules, stay tuples
        return f"[{', '.join(repr(item) if _is_tuple(item) else code_of(item) for item in value)}]"
    if inspect.isfunction(value) and value.__qualname__.isidentifier():
        return value.__qualname__
    return repr(value.name if isinstance(value, np.dtype) else value)


def dataclass_call(value: Any, name: str) -> str:
    """Returns the call `name(…)` that makes a dataclass."""
    fields = [
        field
        for field in sorted(dataclasses.fields(value), key=lambda field: field.kw_only)
        if field.init and not field.name.startswith("_")
    ]
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


def code_lines(code: str, indent: str = "") -> list[str]:
    """Lays code out over lines as Black does, with no line break inside a literal."""
    call = _outer_call(code) if len(indent) + len(code) > _WIDTH else None
    if call is None:
        return [indent + code]
    items = [line for item in call.items for line in code_lines(f"{item},", indent + _INDENT)]
    return [indent + call.head, *items, indent + call.tail]


class _Bracketed(NamedTuple):
    """Code around the items of a bracket, and the items."""

    head: str
    items: list[str]
    tail: str


def _outer_call(code: str) -> _Bracketed | None:
    """Splits code at its first bracket; brackets around a single bracket stay with it."""
    signs = list(_signs_outside_literals(code))
    if not signs:
        return None
    start = signs[0][0]
    depth, cuts = 0, [start]
    for at, sign in signs:
        depth += (sign in _CLOSING) - (sign in _CLOSING.values())
        if depth == 0 or (sign == "," and depth == 1):
            cuts.append(at)
        if depth == 0:
            break
    items = [code[begin + 1 : end].strip() for begin, end in itertools.pairwise(cuts)]
    call = _Bracketed(code[: start + 1], [item for item in items if item], code[cuts[-1] :])
    inner = _outer_call(call.items[0]) if len(call.items) == 1 else None
    if inner is None:
        return call if call.items else None
    return _Bracketed(call.head + inner.head, inner.items, inner.tail + call.tail)


def _signs_outside_literals(code: str) -> Iterator[tuple[int, str]]:
    """Yields the places of brackets, and of the commas between them."""
    quote, at = "", 0
    while at < len(code):
        sign = code[at]
        if quote:
            at += sign == "\\"
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign in "()[]{},":
            yield at, sign
        at += 1


class Code(tuple[Any, ...]):
    """Transforms that are printed as the code that makes them."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(code_lines(f"[{calls_code(self)}]"))
