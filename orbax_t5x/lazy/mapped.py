"""Node of an elementwise function, lazily, box by box."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from orbax_t5x.concurrency.carried import call_of_user
from orbax_t5x.lazy.box import Box
from orbax_t5x.lazy.geometry import IndexMap
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.lazy.node import Lowering, Node
from orbax_t5x.lazy.strided import strided

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

    def add_requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        self.input.add_requests(box, found)

    def add_work(self, box: Box, out: np.ndarray, lowered: Lowering) -> None:
        values = lowered.allocate(out.shape, self.input.dtype)
        self.input.add_work(box, values, lowered)
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
