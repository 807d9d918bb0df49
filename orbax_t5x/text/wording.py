"""Sizes, arrays and shardings as text for people, without JAX."""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size_text(count: int) -> str:
    """Returns bytes with three digits: `512 B`, `1.50 KiB`, `11.3 MiB`."""
    value, unit = float(count), 0
    # 1023.5 would be written with four digits.
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    if unit == 0:
        return f"{count} B"
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f} {_UNITS[unit]}"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Returns a count with its noun: `1 leaf`, `2 leaves`, with separated thousands."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def with_full_stop(text: str) -> str:
    """Adds a full stop to text that ends without a mark."""
    return text if text.endswith((".", "!", "?", ":", "…")) else f"{text}."


def listed(names: Iterable[str], shown: int, *, noun: str = "", separator: str = ", ") -> str:
    """Lists the first of several names: `a, b and 3 more`."""
    names = list(names)
    left = len(names) - shown
    text = separator.join(names[:shown])
    return f"{text} and {left:,} more{' ' + noun if noun else ''}" if left > 0 else text


def did_you_mean(word: object, choices: Iterable[str]) -> str:
    """Returns `; did you mean 'inspect'?` for the closest choice, or nothing."""
    near = difflib.get_close_matches(word, list(choices), 1) if isinstance(word, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""


def leaves_text(count: int) -> str:
    """Returns `1 leaf`, `12,000 leaves`."""
    return counted(count, "leaf", "leaves")


def dtype_text(dtype: Any) -> str:
    """Returns a dtype's name; strings, of dtype object, are `bytes`."""
    return "bytes" if np.dtype(dtype) == np.dtype(object) else np.dtype(dtype).name


@functools.lru_cache(maxsize=4096)
def array_text(dtype: Any, shape: tuple[int, ...]) -> str:
    """Returns `float32[768,2048]`, as JAX writes it."""
    return f"{dtype_text(dtype)}[{','.join(map(str, shape))}]"


def array_bytes(dtype: Any, shape: Sequence[int]) -> int:
    """Returns the bytes of an array in memory."""
    dtype = np.dtype(dtype)
    return 0 if dtype.hasobject else math.prod(shape) * dtype.itemsize


def sharding_text(sharding: Any) -> str:
    """Returns `P('data', None)` for a NamedSharding, else `1 device` or the class's name."""
    if sharding is None:
        return ""
    memory = getattr(sharding, "memory_kind", None)
    where = f" {memory}" if memory not in (None, "device", "unpinned_host") else ""
    spec = getattr(sharding, "spec", None)
    if spec is not None:
        return f"P({', '.join(_axis_text(axis) for axis in spec)}){where}"
    count = len(sharding.device_set)
    return (counted(count, "device") if count == 1 else f"{type(sharding).__name__}, {count} devices") + where


def _axis_text(axis: Any) -> str:
    if isinstance(axis, tuple):
        return f"({', '.join(map(repr, cast('tuple[Any, ...]', axis)))})"
    return repr(axis)


def mesh_text(sharding: Any) -> str:
    """Returns `data=2, model=4 (8 devices)` for a NamedSharding; empty otherwise."""
    mesh = getattr(sharding, "mesh", None)
    if mesh is None:
        return ""
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return f"{axes} ({counted(math.prod(mesh.shape.values()), 'device')})"


def plain(text: str) -> str:
    """Returns text from a file without control characters."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
