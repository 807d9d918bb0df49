"""Finds leaves that Orbax cannot store.

By their types and dtypes, before Orbax tries. There is no list of types here: TensorStore decides about dtypes, and the
table of type handlers about types.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from orbax_t5x.errors import Fix, UnsupportedCheckpointError
from orbax_t5x.lazy import LazyArray
from orbax_t5x.text.wording import listed

# More names than this in one error hide the first.
_SHOWN_LEAVES = 10
# Without shape and dtype of their own; NumPy knows which they would have.
_PYTHON_VALUES = (bool, int, float, complex, bytes)


def check_leaves(
    names: Sequence[str], leaves: Sequence[Any], registry: Any, *, skip: bool | None
) -> dict[str, tuple[Any, str]]:
    """Lists the leaves to leave out, with shape and dtype.

    A single error for all is raised unless `skip` allows it.

    `skip` is None where the save has no such option.
    """
    reasons: dict[str, str] = {}
    skipped: dict[str, tuple[Any, str]] = {}
    has = functools.cache(registry.has)  # few types, many leaves
    for name, leaf in zip(names, leaves, strict=True):
        reason = _unsupported_reason(leaf, has)
        if reason is None:
            continue
        reasons[name] = reason
        shape, dtype = _array_like(leaf)
        skipped[name] = shape, str(dtype)
    if not reasons or (skip and len(reasons) < len(names)):
        return skipped
    shown = listed([f"{name!r} {reason}" for name, reason in reasons.items()], _SHOWN_LEAVES, separator="; ")
    if skip is None:
        fix = Fix("leave them out of the tree")
    elif len(reasons) == len(names):
        fix = Fix("leave the save out: without them there is nothing to save")
    else:
        fix = Fix.any_of(Fix("leave them out of the tree"), Fix.setting("pass {}", on_unsupported="skip"))
    first = next(iter(reasons))
    raise UnsupportedCheckpointError(
        f"{len(reasons)} of {len(names)} leaves cannot be stored by Orbax: {shown}; nothing was written",
        leaf=first if len(reasons) == 1 else None,
        fix=fix,
    )


def _unsupported_reason(leaf: Any, has: Callable[[type], bool]) -> str | None:
    """Returns why Orbax cannot store a leaf, or None.

    `has(type)` is True for types with a handler.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return "is abstract: it has no values"
    if leaf is Ellipsis or isinstance(leaf, str):
        return None
    if not isinstance(leaf, LazyArray) and not has(type(leaf)):
        fix = ": make it an array with np.asarray" if isinstance(leaf, np.generic | complex) else ""
        return f"is of type {type(leaf).__name__}, which Orbax does not store{fix}"
    if not hasattr(leaf, "dtype") and not isinstance(leaf, _PYTHON_VALUES):
        return None
    shape, dtype = _array_like(leaf)
    if 0 in shape:
        return f"has no elements (shape {shape})"
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended) or is_storable(np.dtype(dtype)):
        return None
    return _unsupported_dtype_reason(leaf, np.dtype(dtype))


def _array_like(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Returns the shape and dtype of a leaf's array.

    The leaf is an array, a Python value or any object.
    """
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        return shape, dtype
    return (), np.asarray(leaf).dtype if isinstance(leaf, _PYTHON_VALUES) else np.dtype(object)


def _unsupported_dtype_reason(leaf: Any, dtype: np.dtype) -> str:
    """Returns why Orbax cannot store a leaf's dtype, or None.

    Its array formats lack the dtype.
    """
    if isinstance(leaf, int):
        return "is an integer that does not fit into 64 bits"
    if dtype.kind == "S":
        return f"holds bytes ({dtype.name})"
    # The strings of an opened checkpoint have dtype object.
    if dtype.kind == "U" or (dtype.kind == "O" and isinstance(leaf, LazyArray)):
        return f"holds text ({dtype.name})"
    if dtype.kind == "O":
        return f"holds Python objects ({dtype.name})"
    return f"has a dtype that Orbax does not store ({dtype.name if dtype.names is None else dtype})"


@functools.cache
def is_storable(dtype: np.dtype) -> bool:
    """Tests if Orbax's array formats take this dtype.

    TensorStore writes it.
    """
    name = dtype.newbyteorder("=").name
    spec = {"driver": "zarr", "kvstore": "memory://", "dtype": name, "schema": {"domain": {"shape": [1]}}}
    try:
        ts.open(spec, create=True).result()
    except ValueError:
        return False
    return True
