"""Views made of several arrays, and the nodes that compute with them.

Nothing is read when they are made: stack, concatenate, average, pad, scale, add a product, require equality. Each input
is read once, box by box: the first of equals, and a kernel to which a low-rank product is added, into the buffer, all
others into memory of their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from orbax_t5x.errors import LeafMismatchError
from orbax_t5x.lazy.assemble import ConcatNode, concatenated, padded, stacked
from orbax_t5x.lazy.box import Box, IndexMap, full_box, normalize_axis
from orbax_t5x.lazy.cast import cast_into
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.lazy.node import Lowering, Node
from orbax_t5x.lazy.strided import strided
from orbax_t5x.lazy.view import View, as_view, broadcast_to, repeat
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


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class AllEqualNode(Node):
    """The first of arrays that must be equal; `advice` ends errors."""

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


# Rows are summed in blocks of this size, which stay in a processor's cache over all ranks. Larger: every rank goes
# through memory. Smaller: more calls, about a microsecond each.
_BLOCK_BYTES = 128 << 10


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class LowRankNode(Node):
    """`kernel + scale * tensordot(down, up, 1)` of the inputs; make it with `add_low_rank`.

    Sums are made in `sum_dtype`, and rounded to the kernel's dtype once. Products are summed one rank after the other,
    elements by themselves: a matrix product of BLAS sums in an order that depends on the shape, and then the same
    element would differ from shard to shard.
    """

    scale: float
    sum_dtype: np.dtype

    @property
    def rank(self) -> int:
        """The size of the dimension that is summed over."""
        return self.inputs[1].shape[-1]

    def describe_step(self) -> str:
        return f"plus {self.scale:g} times a product of rank {self.rank}"

    def _factor_boxes(self, box: Box) -> tuple[Box, Box]:
        """Returns the boxes of `down` and `up` that a box needs."""
        rows = len(self.inputs[1].shape) - 1
        ranks = (0, self.rank)
        return (*box[:rows], ranks), (ranks, *box[rows:])

    def add_requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        for node, part in zip(self.inputs, (box, *self._factor_boxes(box)), strict=True):
            node.add_requests(part, found)

    def add_work(self, box: Box, out: np.ndarray, lowered: Lowering) -> None:
        self.input.add_work(box, out, lowered)
        factors = list(map(lowered.read, self.inputs[1:], self._factor_boxes(box)))
        widened = sum(factor.size for factor in factors) + 2 * math.prod(self._block(out)[1:])
        lowered.add_step(partial(self._add, *factors, out), widened * self.sum_dtype.itemsize)

    def _block(self, out: np.ndarray) -> tuple[int, ...]:
        """Returns the rows summed at a time, and their elements."""
        row = math.prod(out.shape[1:])
        return min(out.shape[0], max(1, _BLOCK_BYTES // (row * self.sum_dtype.itemsize))), *out.shape[1:]

    def _add(self, down: np.ndarray, up: np.ndarray, out: np.ndarray) -> None:
        count, *rest = self._block(out)
        left, right = (np.empty(factor.shape, self.sum_dtype) for factor in (down, up))
        cast_into(left, down)
        cast_into(right, up)
        right = right.reshape(self.rank, -1)
        total, term = (np.empty((count, *rest), self.sum_dtype) for _ in range(2))
        with np.errstate(all="ignore"):
            for first in range(0, len(out), count):
                rows = out[first : first + count]
                columns = left[first : first + count].reshape(-1, self.rank)
                part, one = total[: len(rows)], term[: len(rows)]
                flat_part, flat_one = (array.reshape(len(columns), -1) for array in (part, one))
                flat_part[...] = 0
                for k in range(self.rank):
                    np.multiply(columns[:, k, None], right[k], out=flat_one)
                    flat_part += flat_one
                part *= self.sum_dtype.type(self.scale)
                cast_into(one, rows)
                part += one
                cast_into(rows, part)


def stack(views: Iterable[Any], axis: int = 0) -> View:
    """Stacks arrays of the same shape on a new axis.

    Raises:
      ValueError: no array, or shapes or dtypes differ; the text names both.

    Example:
      >>> ot.stack([np.zeros(2), np.ones(2)], axis=1).get()
      array([[0., 1.],
             [0., 1.]])
    """
    inputs = _inputs("stack", views)
    _check_shapes("stack", inputs)
    _check_dtypes("stack", inputs)
    first = inputs[0]
    at = normalize_axis(axis, first.ndim + 1)
    return View(stacked(_nodes(inputs), at)) if len(inputs) > 1 else repeat(first, 1, at)


def concatenate(views: Iterable[Any], axis: int = 0) -> View:
    """Concatenates arrays along an axis.

    Raises:
      ValueError: no array, rank 0, or shapes (other than along the axis) or dtypes differ; the text names both.

    Example:
      >>> ot.concatenate([np.zeros((1, 2)), np.ones((2, 2))]).get()
      array([[0., 0.],
             [1., 1.],
             [1., 1.]])
    """
    inputs = _inputs("concatenate", views)
    first = inputs[0]
    if not first.ndim:
        raise ValueError("arrays of rank 0 cannot be concatenated: stack them")
    at = normalize_axis(axis, first.ndim)
    for position, view in enumerate(inputs):
        if (
            view.ndim != first.ndim
            or view.shape[:at] + view.shape[at + 1 :] != first.shape[:at] + first.shape[at + 1 :]
        ):
            raise ValueError(
                f"concatenate on axis {at} of shapes that differ elsewhere: {first!r}, as number {position} {view!r}"
            )
    _check_dtypes("concatenate", inputs)
    flat: list[Node] = []
    for view in inputs:
        node = view.node
        flat.extend(node.inputs if isinstance(node, ConcatNode) and node.axis == at else (node,))
    return View(concatenated(tuple(flat), at)) if len(flat) > 1 else first


def average(views: Iterable[Any], weights: Sequence[float]) -> View:
    """Averages arrays with weights, as `numpy.average` does.

    They have the same shape; computed box by box. Weights are divided by their sum. The result has the arrays' common
    dtype by JAX's promotion and is computed in float32 or wider; integers are rounded to the nearest even, and one that
    would leave its range raises `LeafMismatchError` when it is read.

    Raises:
      ValueError: no array, shapes that differ, weights that do not fit, or dtypes without a common one.
      TypeError: what holds no numbers.
    """
    inputs = _inputs("average", views)
    _check_shapes("average", inputs)
    if len(weights) != len(inputs):
        raise ValueError(f"average of {len(inputs)} arrays with {len(weights)} weights")
    total = float(sum(weights))
    if total == 0 or not np.isfinite(total):
        raise ValueError(f"average with weights {tuple(weights)}: their sum must be finite and not zero")
    for view in inputs:
        if kind_of(view.dtype) in ("bool", "object"):
            raise TypeError(f"average of dtype {view.dtype.name}: {view.node.summary()} holds no numbers")
    dtypes = [view.dtype for view in inputs]
    dtype = common_dtype(dtypes)
    if dtype is None:
        names = ", ".join(dict.fromkeys(dtype.name for dtype in dtypes))
        raise ValueError(f"average of dtypes {names}: JAX has no common dtype for them; cast them first")
    is_wide = any(kind_of(one) == "int" or one.name in ("float64", "complex128") for one in (dtype, *dtypes))
    name = ("complex128" if is_wide else "complex64") if dtype.kind == "c" else ("float64" if is_wide else "float32")
    shares = tuple(float(weight) / total for weight in weights)
    return View(AverageNode(inputs[0].shape, dtype, _nodes(inputs), shares, np.dtype(name)))


def pad(view: Any, filler: Any, filling: str) -> View:
    """Places an array at the origin of a larger array."""
    old, new = _inputs("pad", [view, filler])
    _check_dtypes("pad", [old, new])
    if old.ndim != new.ndim or any(size > wanted for size, wanted in zip(old.shape, new.shape, strict=True)):
        raise ValueError(f"cannot pad an array of shape {old.shape} to shape {new.shape}")
    return View(padded(old.node, new.node, filling))


def add_low_rank(kernel: Any, down: Any, up: Any, scale: float) -> View:
    """Computes `kernel + scale * tensordot(down, up, 1)`, rounded once."""
    nodes = tuple(as_view(one).node for one in (kernel, down, up))
    for node in nodes:
        if kind_of(node.dtype) != "float":
            raise TypeError(f"a low-rank product is of floating-point numbers, not {node.dtype.name}: {node.summary()}")
    whole, left, right = (node.shape for node in nodes)
    fits = len(left) > 1 and len(right) > 1 and left[-1] == right[0]
    if not fits or (*left[:-1], *right[1:]) != whole:
        raise ValueError(
            f"the product of shapes {left} and {right} has not the kernel's shape {whole}: down is [in, rank], up is "
            "[rank, out]"
        )
    if 0 in right[:1]:
        return View(nodes[0])
    is_wide = any(node.dtype.name == "float64" for node in nodes)
    return View(LowRankNode(whole, nodes[0].dtype, nodes, scale, np.dtype("float64" if is_wide else "float32")))


def scaled(view: Any, scale: Any) -> View:
    """Multiplies an array by a number, or rows by numbers.

    In float32, or in float64 for 64-bit inputs.
    """
    node, by = as_view(view).node, as_view(scale).node
    if math.prod(by.shape) != 1 and not (len(node.shape) > 1 and by.shape == node.shape):
        if len(node.shape) < 2 or by.shape != (node.shape[0], *(1 for _ in node.shape[1:])):
            raise ValueError(
                f"a scale is one number, one for each row (rows, 1) or element, not an array of shape {by.shape}"
            )
        # NumPy's rule: a flat scale of as many numbers would be of columns.
        by = broadcast_to(scale, node.shape).node
    for one, kinds in ((node, ("float", "int")), (by, ("float",))):
        if kind_of(one.dtype) not in kinds:
            raise TypeError(f"a scale and what it scales are real numbers, not {one.dtype.name}: {one.summary()}")
    is_wide = any(one.dtype.itemsize == 8 for one in (node, by))
    return View(ScaledNode(node.shape, np.dtype("float64" if is_wide else "float32"), (node, by)))


def all_equal(views: Iterable[Any], *, advice: str = "") -> View:
    """Returns the first of arrays that must be equal.

    They are compared bit for bit; if they differ, reading raises `LeafMismatchError`.
    """
    inputs = _inputs("all_equal", views)
    _check_shapes("all_equal", inputs)
    _check_dtypes("all_equal", inputs)
    return View(AllEqualNode(inputs[0].shape, inputs[0].dtype, _nodes(inputs), advice))


def _inputs(function: str, views: Iterable[Any]) -> tuple[View, ...]:
    inputs = tuple(as_view(view) for view in views)
    if not inputs:
        raise ValueError(f"{function} needs at least one array")
    return inputs


def _nodes(views: Sequence[View]) -> tuple[Node, ...]:
    return tuple(view.node for view in views)


def _check_shapes(function: str, views: Sequence[View]) -> None:
    first = views[0]
    for position, view in enumerate(views):
        if view.shape != first.shape:
            raise ValueError(f"{function} of different shapes: {first!r}, and as number {position} {view!r}")


def _check_dtypes(function: str, views: Sequence[View]) -> None:
    first = views[0]
    for position, view in enumerate(views):
        if view.dtype != first.dtype:
            raise ValueError(
                f"{function} of different dtypes: {first!r}, and as number {position} {view!r}; cast them first"
            )
