"""Compares the elements of two arrays.

How many differ, by how much, and at which index most. Pure: arrays in memory, a few thousand elements at a time, so
that what is computed beside them stays small. NaN equals NaN and differs from every number, -0 equals 0, an infinity
equals only itself. Numbers are compared by value: integers as integers, without overflow; floats, and integers with
floats, in float64, which has every value of narrower floats; complex numbers in complex128.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from orbax_t5x.trees.dtypes import kind_of

# What is compared at a time. All that it takes beside the arrays stays in a core's second cache.
_BLOCK_ELEMENTS = 1 << 15
# For each element of a block: both sides in 8 or 16 bytes, their distance, the relative one, and five answers.
_BYTES_PER_ELEMENT = 64


class Tolerance(NamedTuple):
    """Bounds of `|a - b| <= atol + rtol * |b|` for equal elements.

    As in `numpy.isclose`; neither is negative.
    """

    atol: float = 0.0
    rtol: float = 0.0


@dataclasses.dataclass(frozen=True)
class LargestDifference:
    """The largest difference of two arrays.

    Attributes:
      value: the difference; an exact integer where both sides hold integers or truth values.
      index: of the element; of several, the first in row-major order.
      a, b: the element on each side.
    """

    value: float | int
    index: tuple[int, ...]
    a: Any
    b: Any

    def as_data(self) -> list[Any]:
        """Encodes the difference as JSON data."""
        sides = ([side.real, side.imag] if isinstance(side, complex) else side for side in (self.a, self.b))
        return [self.value, list(self.index), *sides]

    @classmethod
    def of_data(cls, data: Sequence[Any]) -> LargestDifference:
        """Returns the difference of `as_data`."""
        value, index, *sides = data
        return cls(value, tuple(index), *(complex(*side) if isinstance(side, list) else side for side in sides))


@dataclasses.dataclass(frozen=True)
class ValueDifference:
    """Differences between two arrays, or between boxes of two arrays.

    Attributes:
      differing: elements that differ by more than the tolerance.
      one_nan: elements that are NaN on only one side; they are among those that differ.
      absolute: where `|a - b|` is largest, over all elements that are no NaN; None where that is 0, and for text.
      relative: where `|a - b| / |b|` is largest, likewise; infinite where only b is 0.
    """

    differing: int = 0
    one_nan: int = 0
    absolute: LargestDifference | None = None
    relative: LargestDifference | None = None

    def repeated(self, times: int) -> ValueDifference:
        """Counts each element several times."""
        return dataclasses.replace(self, differing=self.differing * times, one_nan=self.one_nan * times)

    def joined(self, other: ValueDifference) -> ValueDifference:
        """Joins the differences of two boxes of an array."""
        return ValueDifference(
            self.differing + other.differing,
            self.one_nan + other.one_nan,
            _larger(self.absolute, other.absolute),
            _larger(self.relative, other.relative),
        )


def _larger(one: LargestDifference | None, other: LargestDifference | None) -> LargestDifference | None:
    if one is None or other is None:
        return one or other
    return min(one, other, key=lambda largest: (-largest.value, largest.index))


def are_comparable(a: np.dtype, b: np.dtype) -> bool:
    """Tests if values of two dtypes can be compared."""
    return (kind_of(a) == "object") == (kind_of(b) == "object")


def scratch_bytes(size: int) -> int:
    """Returns the memory for a comparison besides the arrays."""
    return min(size, _BLOCK_ELEMENTS) * _BYTES_PER_ELEMENT


def compare_values(a: np.ndarray, b: np.ndarray, corner: Sequence[int], tolerance: Tolerance) -> ValueDifference:
    """Compares two C-contiguous arrays of the same shape."""
    found = ValueDifference()
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    for start in range(0, flat_a.size, _BLOCK_ELEMENTS):
        part_a, part_b = flat_a[start : start + _BLOCK_ELEMENTS], flat_b[start : start + _BLOCK_ELEMENTS]
        if _have_same_bits(part_a, part_b):
            continue
        stretch = _Stretch(a.shape, start, tuple(corner))
        is_text = kind_of(a.dtype) == "object"
        apart = _compare_text(part_a, part_b) if is_text else _Numbers(part_a, part_b).apart(stretch, tolerance)
        found = found.joined(apart)
    return found


class _Stretch(NamedTuple):
    """Position of a run of elements in an array."""

    shape: tuple[int, ...]
    start: int
    corner: tuple[int, ...]

    def index_of(self, at: int) -> tuple[int, ...]:
        """Returns the index of element `at` of the run."""
        own = np.unravel_index(self.start + at, self.shape)
        return tuple(int(step) + first for step, first in zip(own, self.corner, strict=True))


def _have_same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Tests if two runs of the same dtype hold the same bits."""
    if a.dtype != b.dtype or a.dtype.hasobject:
        return False
    width = math.gcd(a.dtype.itemsize, 8)
    return np.array_equal(a.view(f"u{width}"), b.view(f"u{width}"))


def _compare_text(a: np.ndarray, b: np.ndarray) -> ValueDifference:
    return ValueDifference(sum(one != other for one, other in zip(a.tolist(), b.tolist(), strict=True)))


@functools.cache
def _common_dtype(a: np.dtype, b: np.dtype) -> np.dtype:
    """Returns a dtype with the values of both."""
    kinds = {kind_of(a), kind_of(b)}
    if kinds & {"complex"}:
        return np.dtype(np.complex128)
    if kinds & {"float"}:
        return np.dtype(np.float64)
    has_wide = np.dtype(np.uint64) in (a, b)
    if not has_wide:
        return np.dtype(np.int64)
    unsigned = all(kind_of(dtype) == "bool" or dtype.kind == "u" or dtype.name.startswith("uint") for dtype in (a, b))
    return np.dtype(np.uint64 if unsigned else object)


class _Numbers:
    """Two runs of numbers in a common dtype."""

    def __init__(self, a: np.ndarray, b: np.ndarray):
        self._dtype = _common_dtype(a.dtype, b.dtype)
        self._stored = a, b
        self._a, self._b = self._converted(a), self._converted(b)

    def _converted(self, values: np.ndarray) -> np.ndarray:
        if self._dtype.kind == "O" and values.dtype != np.uint64:
            # NumPy's own integers become Python's; those of `ml_dtypes` would stay what they are.
            values = values.astype(np.int64)
        # Without a word about NaNs that signal.
        with np.errstate(all="ignore"):
            return values.astype(self._dtype)

    def apart(self, stretch: _Stretch, tolerance: Tolerance) -> ValueDifference:
        a, b = self._a, self._b
        equal = a == b
        one_nan = np.zeros(a.shape, bool)
        if self._dtype.kind in "fc":
            nan_a, nan_b = np.isnan(a), np.isnan(b)
            equal |= nan_a & nan_b
            one_nan = nan_a ^ nan_b
        with np.errstate(all="ignore"):
            distance = self._distance(equal, one_nan)
            relative = self._relative(distance)
            differs = ~equal
            if tolerance != Tolerance():
                differs &= ~self._are_close(distance, tolerance)
        return ValueDifference(
            int(np.count_nonzero(differs)),
            int(np.count_nonzero(one_nan)),
            self._largest(distance, stretch),
            self._largest(relative, stretch),
        )

    def _distance(self, equal: np.ndarray, one_nan: np.ndarray) -> np.ndarray:
        """Computes `|a - b|`, with 0 for equal elements and NaN."""
        a, b = self._a, self._b
        if self._dtype.kind in "iu":
            # The difference of 64-bit integers has 64 bits, the sign not among them.
            return np.maximum(a, b).view(np.uint64) - np.minimum(a, b).view(np.uint64)
        if self._dtype.kind == "O":
            return abs(a - b)
        distance = np.abs(a - b)
        # An infinity less an infinity, in a part of a complex number.
        distance[np.isnan(distance)] = np.inf
        distance[equal | one_nan] = 0
        return distance

    def _magnitude(self) -> np.ndarray:
        """Computes `|b|` in float64."""
        # int64 has no place for the magnitude of its smallest.
        return np.abs(self._b.astype(np.float64) if self._dtype.kind in "iuO" else self._b)

    def _relative(self, distance: np.ndarray) -> np.ndarray:
        relative = distance.astype(np.float64) / self._magnitude()
        # 0 / 0, and infinite distances from an infinity.
        relative[np.isnan(relative)] = np.inf
        relative[distance == 0] = 0
        return relative

    def _are_close(self, distance: np.ndarray, tolerance: Tolerance) -> np.ndarray:
        """Marks finite elements within tolerance."""
        magnitude = self._magnitude()
        tolerated = distance.astype(np.float64) <= tolerance.atol + tolerance.rtol * magnitude
        return tolerated & np.isfinite(magnitude) & (distance != 0)

    def _largest(self, values: np.ndarray, stretch: _Stretch) -> LargestDifference | None:
        at = int(np.argmax(values))
        value = values[at]
        if not value > 0:
            return None
        value = value.item() if isinstance(value, np.generic) else value
        stored_a, stored_b = self._stored
        return LargestDifference(value, stretch.index_of(at), _scalar(stored_a[at]), _scalar(stored_b[at]))


def _scalar(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
