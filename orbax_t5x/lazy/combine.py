"""The node kinds that compute one array from several: a weighted average, and one of several that must all be the same.

Each input is read once into memory of its own, box by box; `temp_bytes` says how much that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from orbax_t5x.errors import LeafMismatchError
from orbax_t5x.lazy.box import Box, box_size
from orbax_t5x.lazy.cast import cast_into
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.lazy.view import Lowered, View, freeze


class _Combine(View):
    """Inputs of one shape, element by element."""

    __slots__ = ()

    def __init__(self, inputs: Sequence[View]):
        if not inputs:
            raise ValueError(f"{type(self).__name__} needs at least one array")
        first = inputs[0]
        for position, view in enumerate(inputs):
            if view.shape != first.shape:
                kind = type(self).__name__
                raise ValueError(f"{kind} of different shapes: {first!r}, and as number {position} {view!r}")
        super().__init__(first.shape, first.dtype, tuple(inputs))

    def _requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        for source in self.inputs:
            source._requests(box, found)


class Average(_Combine):
    """The weighted average of arrays of one shape, as `numpy.average` has it: the weights are divided by their sum.

    Sums are made in float32, or in float64 where an input is float64 or an integer (complex likewise); the result has
    the first input's dtype, integers rounded to the nearest even.
    """

    __slots__ = ("_sum_dtype", "weights")

    weights: tuple[float, ...]
    _sum_dtype: np.dtype

    def __init__(self, inputs: Sequence[View], weights: Sequence[float]):
        """Makes the view.

        Args:
          inputs: arrays of one shape; dtypes may differ.
          weights: one for each; their sum is not zero.
        """
        super().__init__(inputs)
        if len(weights) != len(inputs):
            raise ValueError(f"Average of {len(inputs)} arrays with {len(weights)} weights")
        total = float(sum(weights))
        if total == 0 or not np.isfinite(total):
            raise ValueError(f"Average with weights {tuple(weights)}: their sum must be finite and not zero")
        for view in inputs:
            if view.dtype.kind in "bOSU":
                raise TypeError(f"Average of dtype {view.dtype.name}: {view!r} holds no numbers")
        wide = any(view.dtype in _WIDE or view.dtype.kind in "iu" for view in inputs)
        is_complex = any(view.dtype.kind == "c" for view in inputs)
        name = ("complex128" if wide else "complex64") if is_complex else ("float64" if wide else "float32")
        freeze(self, "weights", tuple(float(weight) / total for weight in weights))
        freeze(self, "_sum_dtype", np.dtype(name))

    def _describe(self) -> str:
        return f"average of {len(self.inputs)}"

    def _temp_bytes(self, box: Box, contiguous_dims: int) -> int:
        # One sum and one product beside what is read.
        size = box_size(box)
        own = sum(size * source.dtype.itemsize + source._temp_bytes(box, len(box)) for source in self.inputs)
        return own + 2 * size * self._sum_dtype.itemsize

    def _lower(self, box: Box, out: np.ndarray, lowered: Lowered) -> None:
        temps = [np.empty(out.shape, source.dtype) for source in self.inputs]
        for source, temp in zip(self.inputs, temps, strict=True):
            source._lower(box, temp, lowered)
        lowered.finish.append(partial(self._average, temps, out))

    def _average(self, temps: list[np.ndarray], out: np.ndarray) -> None:
        total = np.zeros(out.shape, self._sum_dtype)
        term = np.empty(out.shape, self._sum_dtype)
        with np.errstate(all="ignore"):
            for weight, temp in zip(self.weights, temps, strict=True):
                cast_into(term, temp)
                term *= self._sum_dtype.type(weight)
                total += term
            if out.dtype.kind in "iu":
                np.rint(total, out=total)
        cast_into(out, total)


_WIDE = (np.dtype("float64"), np.dtype("complex128"))


class AllEqual(_Combine):
    """The first of several arrays that must be equal bit for bit; reading raises `LeafMismatchError` where not."""

    __slots__ = ()

    def __init__(self, inputs: Sequence[View]):
        super().__init__(inputs)
        for view in inputs:
            if view.dtype != self.dtype:
                raise ValueError(f"AllEqual of different dtypes: {self.dtype.name}, and {view.dtype.name} of {view!r}")

    def _describe(self) -> str:
        return f"one of {len(self.inputs)} that must be equal"

    def _temp_bytes(self, box: Box, contiguous_dims: int) -> int:
        first, *others = self.inputs
        # Each of the others, and while comparing a byte per element, and two more for the two halves of wide elements.
        own = sum(box_size(box) * self._dtype.itemsize + other._temp_bytes(box, len(box)) for other in others)
        return own + first._temp_bytes(box, contiguous_dims) + 3 * box_size(box)

    def _lower(self, box: Box, out: np.ndarray, lowered: Lowered) -> None:
        self.inputs[0]._lower(box, out, lowered)
        for other in self.inputs[1:]:
            temp = np.empty(out.shape, self._dtype)
            other._lower(box, temp, lowered)
            lowered.finish.append(partial(self._compare, other, box, temp, out))

    def _compare(self, other: View, box: Box, temp: np.ndarray, out: np.ndarray) -> None:
        same = _same_bits(temp, out)
        if same.all():
            return
        at = np.unravel_index(int(np.argmin(same)), same.shape)
        index = tuple(int(i) + first for i, (first, _) in zip(at, box, strict=True))
        first_leaf, leaf = self.leaves()[0], other.leaves()[0]
        raise LeafMismatchError(
            f"must equal {first_leaf.name!r}, but at {index} it holds {temp[at]} and that holds {out[at]}",
            path=leaf.path or None,
            leaf=leaf.name,
        )


def _same_bits(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Where two arrays of one dtype hold the same bits: NaN equals itself, -0 does not equal 0."""
    if left.dtype.kind == "O":
        return left == right
    if left.dtype.kind == "c":
        return _same_bits(np.real(left), np.real(right)) & _same_bits(np.imag(left), np.imag(right))
    bits = f"u{left.dtype.itemsize}"
    return left.view(bits) == right.view(bits)
