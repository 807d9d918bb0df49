"""Elementwise functions, and casts as NumPy's `astype`.

A cast reads into memory of its own and converts from there into the buffer. It gives no warnings: the
caller of a cast accepts its losses.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np

from orbax_t5x.concurrency.carried import call_of_user
from orbax_t5x.errors import CheckpointError, LeafMismatchError
from orbax_t5x.lazy.box import Box, IndexMap
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.lazy.node import Lowering, Node
from orbax_t5x.lazy.strided import strided

Mismatch = Callable[[str, Leaf], CheckpointError]
"""Makes the error of a value that does not survive a cast, from the text and the leaf that has it."""

# What comparing two arrays takes for each element: the answer, and those to its parts.
_COMPARED_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class CastNode(Node):
    """Elements in another dtype, as by NumPy's `astype`.

    With `mismatch`, reading raises that where a value does not survive the way there and back.
    """

    mismatch: Mismatch | None

    def describe_step(self) -> str:
        return f"{'checked ' if self.mismatch else ''}cast {self.dtype.name}"

    def select(self, index_map: IndexMap) -> Node | None:
        if any(dim < 0 for dim, _ in index_map.maps):
            return None
        return cast_node(strided(self.input, index_map), self.dtype, self.mismatch)

    def add_work(self, box: Box, out: np.ndarray, lowered: Lowering) -> None:
        values = lowered.read(self.input, box)
        size = math.prod(out.shape)
        carried = size * _carrier_itemsize(self.input.dtype, self.dtype)
        if self.mismatch is None:
            lowered.add_step(partial(cast_into, out, values), carried)
            return
        back = size * (self.input.dtype.itemsize + max(_COMPARED_BYTES, _carrier_itemsize(self.dtype, values.dtype)))
        lowered.add_step(partial(self._cast_and_check, values, out, self.mismatch), max(carried, back))

    def _cast_and_check(self, values: np.ndarray, out: np.ndarray, mismatch: Mismatch) -> None:
        cast_into(out, values)
        # A wide float tells an integer at the end of its range from the next float.
        is_float = _is_integer(out.dtype) and not _is_integer(values.dtype)
        back = np.empty(values.shape, np.float64 if is_float else values.dtype)
        cast_into(back, out)
        same = back == values
        same |= (back != back) & (values != values)
        if _is_integer(values.dtype) and _is_integer(out.dtype):
            # -1 becomes the largest unsigned integer, and -1 again on the way back.
            same &= (values < values.dtype.type(0)) == (out < out.dtype.type(0))
        if not same.all():
            lost = values[~same][0]
            leaf = self.leaves()[0]
            message = f"the value {lost} does not fit {self.dtype.name} (it is stored as {values.dtype.name})"
            raise mismatch(message, leaf)


def leaf_mismatch(message: str, leaf: Leaf) -> CheckpointError:
    """Makes the error of a value that its leaf may not hold."""
    return LeafMismatchError(message, path=leaf.path or None, leaf=leaf.name)


def cast_node(node: Node, dtype: np.dtype, mismatch: Mismatch | None = None) -> Node:
    """Casts the elements of a node."""
    if dtype == node.dtype:
        return node
    cast_carrier(node.dtype, dtype)
    return CastNode(node.shape, dtype, (node,), mismatch)


def _carrier_itemsize(from_dtype: np.dtype, to_dtype: np.dtype) -> int:
    carrier = cast_carrier(from_dtype, to_dtype)
    return carrier.itemsize if carrier is not None else 0


@lru_cache(maxsize=1024)
def cast_carrier(from_dtype: np.dtype, to_dtype: np.dtype) -> np.dtype | None:
    """Returns the dtype between two dtypes, or None.

    Small integers go through int8 and small floats through float32, which hold each of their values.
    """
    if from_dtype != to_dtype and (from_dtype.kind in "OSU" or to_dtype.kind in "OSU"):
        raise TypeError(f"cannot cast a lazy array of dtype {from_dtype.name} to {to_dtype.name}")
    if _casts(from_dtype, to_dtype):
        return None
    for name in ("int8", "float32"):
        carrier = np.dtype(name)
        if (
            (name == "float32" or (_is_small_int(from_dtype) and _is_small_int(to_dtype)))
            and _casts(from_dtype, carrier)
            and _casts(carrier, to_dtype)
        ):
            return carrier
    raise TypeError(f"cannot cast a lazy array of dtype {from_dtype.name} to {to_dtype.name}")


def _casts(from_dtype: np.dtype, to_dtype: np.dtype) -> bool:
    return np.can_cast(from_dtype, to_dtype, casting="unsafe")


def _is_integer(dtype: np.dtype) -> bool:
    return dtype.name.lstrip("u").startswith("int")


def _is_small_int(dtype: np.dtype) -> bool:
    return _is_integer(dtype) and dtype.itemsize == 1


def cast_into(out: np.ndarray, values: np.ndarray) -> None:
    """Does `out[...] = values.astype(out.dtype)` without warnings."""
    if values.dtype.kind == "c" and out.dtype.kind not in "cb":
        values = np.real(values)
    carrier = cast_carrier(values.dtype, out.dtype)
    with np.errstate(all="ignore"):
        np.copyto(out, values if carrier is None else values.astype(carrier), casting="unsafe")


Elementwise = Callable[[np.ndarray], Any]


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class MappedNode(Node):
    """The elements after an elementwise function; make it with `mapped_node`."""

    function: Elementwise
    text: str

    def describe_step(self) -> str:
        return self.text

    def select(self, index_map: IndexMap) -> Node | None:
        if any(dim < 0 for dim, _ in index_map.maps):
            return None
        selected = strided(self.input, index_map)
        return MappedNode(selected.shape, self.dtype, (selected,), self.function, self.text)

    def add_work(self, box: Box, out: np.ndarray, lowered: Lowering) -> None:
        values = lowered.read(self.input, box)
        # What the function returns, at least.
        lowered.add_step(partial(self._fill, values, out), math.prod(out.shape) * self.dtype.itemsize)

    def _fill(self, values: np.ndarray, out: np.ndarray) -> None:
        out[...] = call_of_user(_applied, self.function, values, self.dtype, self.text)


@dataclasses.dataclass(frozen=True)
class AffineFunction:
    """The function `array * scale + offset`.

    It is computed in float32 or float64, and rounded to the array's dtype once.
    """

    scale: float
    offset: float

    def __call__(self, array: np.ndarray) -> np.ndarray:
        wide = np.float64 if array.dtype.itemsize == 8 else np.float32
        return (array.astype(wide) * wide(self.scale) + wide(self.offset)).astype(array.dtype)


def mapped_node(node: Node, function: Elementwise, text: str) -> Node:
    """Applies a function to the elements of a node."""
    empty = np.zeros((0, *node.shape[1:]) if node.shape else (), node.dtype)
    result = call_of_user(_applied, function, empty, None, text)
    return MappedNode(node.shape, np.dtype(result.dtype), (node,), function, text)


def _applied(function: Elementwise, values: np.ndarray, dtype: np.dtype | None, text: str) -> np.ndarray:
    """Calls a function; refuses a result of another shape or dtype."""
    result = function(values)
    if getattr(result, "dtype", None) is None:
        raise TypeError(f"{text}: the function returned {type(result).__name__}, not an array")
    if result.shape != values.shape:
        raise ValueError(f"{text}: the function is not elementwise: shape {values.shape} became {result.shape}")
    if dtype is not None and result.dtype != dtype:
        raise TypeError(f"{text}: the function returned {result.dtype} after {dtype}")
    return result
