"""What Orbax cannot store, found before it tries: leaves of unknown types and dtypes.

Nothing here is a list of ours: TensorStore is asked for dtypes, and the table of type handlers for types.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.lazy import LazyArray
from orbax_t5x.text.wording import listed
from orbax_t5x.trees.dtypes import kind_of

# More names than this in one error hide the first.
_SHOWN_LEAVES = 10


def check_leaves(
    names: Sequence[str], leaves: Sequence[Any], registry: Any, *, skip: bool | None
) -> dict[str, tuple[Any, str]]:
    """The leaves to leave out, with shape and dtype; all of them together are one error unless they may be skipped.

    Args:
      names: of the leaves.
      leaves: of the tree.
      registry: the type handlers that will write.
      skip: whether arrays may be skipped; None where the save has no such option.
    """
    reasons: dict[str, str] = {}
    skipped: dict[str, tuple[Any, str]] = {}
    has = functools.cache(registry.has)  # few types, many leaves
    for name, leaf in zip(names, leaves, strict=True):
        reason = _why_not(leaf, has)
        if reason is None:
            continue
        reasons[name] = reason
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            skipped[name] = tuple(leaf.shape), str(leaf.dtype)
    may_be_skipped = len(skipped) == len(reasons) < len(names)
    if not reasons or (skip and may_be_skipped):
        return skipped
    shown = listed([f"{name!r} {reason}" for name, reason in reasons.items()], _SHOWN_LEAVES, separator="; ")
    fix = "" if skip else "; nothing was written. Leave them out of the tree"
    if may_be_skipped and skip is False:
        fix += ', or pass on_unsupported="skip"'
    first = next(iter(reasons))
    raise UnsupportedCheckpointError(
        f"{len(reasons)} of {len(names)} leaves cannot be stored by Orbax: {shown}{fix}",
        leaf=first if len(reasons) == 1 else None,
    )


def _why_not(leaf: Any, has: Callable[[type], bool]) -> str | None:
    """Why Orbax cannot store a leaf, or None if it can; `has` tells for which types there are handlers."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return "is abstract: it has no values"
    if leaf is Ellipsis or isinstance(leaf, str):
        return None
    if not isinstance(leaf, LazyArray) and not has(type(leaf)):
        fix = ": make it an array with np.asarray" if isinstance(leaf, np.generic | complex) else ""
        return f"is a {type(leaf).__name__}, which Orbax does not store{fix}"
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None:
        if not isinstance(leaf, bool | int | float | bytes):
            return None
        shape, dtype = (), np.asarray(leaf).dtype
        if dtype.hasobject:
            return "is an integer that does not fit into 64 bits"
    if 0 in shape:
        return f"has no elements (shape {tuple(shape)})"
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended) or storable(np.dtype(dtype)):
        return None
    what = "holds text" if kind_of(np.dtype(dtype)) == "object" else "has a dtype that Orbax does not store"
    return f"{what} ({np.dtype(dtype).name})"


@functools.cache
def storable(dtype: np.dtype) -> bool:
    """Whether the array formats that Orbax writes have this dtype; TensorStore is asked, which writes them."""
    name = dtype.newbyteorder("=").name
    spec = {"driver": "zarr", "kvstore": "memory://", "dtype": name, "schema": {"domain": {"shape": [1]}}}
    try:
        ts.open(spec, create=True).result()
    except ValueError:
        return False
    return True
