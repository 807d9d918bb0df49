"""Nodes of several arrays: averages, equal arrays, scaled arrays.

Each input is read once, box by box: the first of equals into the buffer, all others into memory of their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

import ml_dtypes
import numpy as np

from orbax_t5x.errors import LeafMismatchError
from orbax_t5x.lazy.box import Box, full_box
from orbax_t5x.lazy.cast import cast_into
from orbax_t5x.lazy.geometry import IndexMap
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.lazy.node import Lowering, Node
from orbax_t5x.lazy.strided import strided
from orbax_t5x.trees.dtypes import common_dtype, kind_of

# What comparing bits takes for each element: the answer, and two more for the two halves of wide elements.
_COMPARED_BYTES = 3


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class AverageNode(Node):
    """Weighted average of arrays of the same shape."""

    weights: tuple[float, ...]
    sum_dtype: np.dtype

    def describe_step(self) -> str:
        return f"average of {len(self.inputs)}"

    def add_work(self, box: Box, out: np.ndarray, lowered: Lowering) -> None:
        arrays = [lowered.read(node, box) for node in self.inputs]
        # The sum and a product; to compare integers with their range takes less than a product.
        lowered.add_step(partial(self._average, arrays, out), 2 * math.prod(out.shape) * self.sum_dtype.itemsize)

    def _average(self, arrays: list[np.ndarray], out: np.ndarray) -> None:
        total = np.zeros(out.shape, self.sum_dtype)
        term = np.empty(out.shape, self.sum_dtype)
        with np.errstate(all="ignore"):
            for weight, values in zip(self.weights, arrays, strict=True):
                cast_into(term, values)
                term *= self.sum_dtype.type(weight)
                total += term
        del term
        if kind_of(self.dtype) == "int":
            np.rint(total, out=total)
            self._check_range(total)
        cast_into(out, total)

    def _check_range(self, total: np.ndarray) -> None:
        """Raises if an integer would wrap around."""
        info = ml_dtypes.iinfo(self.dtype)
        # The next float above the largest 64-bit integer is the first that does not fit.
        fits = (total >= float(int(info.min))) & (total < float(int(info.max) + 1))
        if not fits.all():
            leaf = self.leaves()[0]
            raise LeafMismatchError(
                f"the average {total[~fits][0]:g} of {len(self.inputs)} arrays does not fit {self.dtype.name}",
                path=leaf.path or None,
                leaf=leaf.name,
            )


def average_node(inputs: Sequence[Node], weights: Sequence[float]) -> AverageNode:
    """Makes the weighted average as `numpy.average` does."""
    if len(weights) != len(inputs):
        raise ValueError(f"average of {len(inputs)} arrays with {len(weights)} weights")
    total = float(sum(weights))
    if total == 0 or not np.isfinite(total):
        raise ValueError(f"average with weights {tuple(weights)}: their sum must be finite and not zero")
    for node in inputs:
        if kind_of(node.dtype) in ("bool", "object"):
            raise TypeError(f"average of dtype {node.dtype.name}: {node.summary()} holds no numbers")
    dtypes = [node.dtype for node in inputs]
    dtype = common_dtype(dtypes)
    if dtype is None:
        names = ", ".join(dict.fromkeys(dtype.name for dtype in dtypes))
        raise ValueError(f"average of dtypes {names}: JAX has no common dtype for them; cast them first")
    is_wide = any(kind_of(one) == "int" or one.name in ("float64", "complex128") for one in (dtype, *dtypes))
    name = ("complex128" if is_wide else "complex64") if dtype.kind == "c" else ("float64" if is_wide else "float32")
    shares = tuple(float(weight) / total for weight in weights)
    return AverageNode(inputs[0].shape, dtype, tuple(inputs), shares, np.dtype(name))


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class AllEqualNode(Node):
    """The first of arrays that must be equal bit for bit.

    Attributes:
      advice: for people whose arrays differ, after the error's text.
    """

    advice: str = ""

    def describe_step(self) -> str:
        return f"one of {len(self.inputs)} that must be equal"

    def add_work(self, box: Box, out: np.ndarray, lowered: Lowering) -> None:
        self.input.add_work(box, out, lowered)
        for other in self.inputs[1:]:
            values = lowered.read(other, box)
            lowered.add_step(partial(self._compare, other, box, values, out), _COMPARED_BYTES * math.prod(out.shape))

    def _compare(self, other: Node, box: Box, values: np.ndarray, out: np.ndarray) -> None:
        same = _same_bits(values, out)
        if same.all():
            return
        at = np.unravel_index(int(np.argmin(same)), same.shape)
        index = tuple(int(i) + first for i, (first, _) in zip(at, box, strict=True))
        first_leaf, leaf = self.leaves()[0], other.leaves()[0]
        first = "another part of itself" if leaf.name == first_leaf.name else repr(first_leaf.name)
        raise LeafMismatchError(
            f"must equal {first}, but at {index} it holds {values[at]} and that holds {out[at]}"
            + (f"; {self.advice}" if self.advice else ""),
            path=leaf.path or None,
            leaf=leaf.name,
        )


def _same_bits(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Compares two arrays of the same dtype bit by bit."""
    if left.dtype.kind == "O":
        return left == right
    if left.dtype.kind == "c":
        return _same_bits(np.real(left), np.real(right)) & _same_bits(np.imag(left), np.imag(right))
    bits = f"u{left.dtype.itemsize}"
    return left.view(bits) == right.view(bits)


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class ScaledNode(Node):
    """Product of an input and a scale."""

    def describe_step(self) -> str:
        return f"times a scale, {self.dtype.name}"

    @property
    def described_inputs(self) -> tuple[Node, ...]:
        return (self.input,)

    def select(self, index_map: IndexMap) -> Node | None:
        if any(dim < 0 for dim, _ in index_map.maps):
            return None
        scale = strided(self.inputs[1], index_map) if self._is_by_element else self.inputs[1]
        return ScaledNode(index_map.shape, self.dtype, (strided(self.input, index_map), scale))

    @property
    def _is_by_element(self) -> bool:
        return self.inputs[1].shape == self.shape

    def _scale_box(self, box: Box) -> Box:
        return box if self._is_by_element else full_box(self.inputs[1].shape)

    def add_requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        self.input.add_requests(box, found)
        self.inputs[1].add_requests(self._scale_box(box), found)

    def add_work(self, box: Box, out: np.ndarray, lowered: Lowering) -> None:
        values = lowered.read(self.input, box)
        scale = lowered.read(self.inputs[1], self._scale_box(box))
        # What a cast through another dtype takes.
        lowered.add_step(partial(self._multiply, values, scale, out), math.prod(out.shape) * self.dtype.itemsize)

    def _multiply(self, values: np.ndarray, scale: np.ndarray, out: np.ndarray) -> None:
        cast_into(out, values)
        with np.errstate(all="ignore"):
            out *= scale.astype(self.dtype).reshape(out.shape if self._is_by_element else ())


def scaled_node(node: Node, scale: Node) -> Node:
    """Scales an array in float32, or float64 for 64-bit inputs."""
    if math.prod(scale.shape) != 1 and not (len(node.shape) > 1 and scale.shape == node.shape):
        if len(node.shape) > 1 and scale.shape == (node.shape[0], *(1 for _ in node.shape[1:])):
            # NumPy's rule: a flat scale of as many numbers would be of columns.
            maps = ((0, 1), *(((-1, 0),) * (len(node.shape) - 1)))
            scale = strided(scale, IndexMap((0,) * len(scale.shape), maps, node.shape))
        else:
            raise ValueError(
                f"a scale is one number, one for each row (rows, 1) or element, not an array of shape {scale.shape}"
            )
    for one, kinds in ((node, ("float", "int")), (scale, ("float",))):
        if kind_of(one.dtype) not in kinds:
            raise TypeError(f"a scale and what it scales are real numbers, not {one.dtype.name}: {one.summary()}")
    is_wide = any(one.dtype.itemsize == 8 for one in (node, scale))
    return ScaledNode(node.shape, np.dtype("float64" if is_wide else "float32"), (node, scale))
