"""How far two arrays are apart, against Python's own arithmetic on single elements and NumPy's `isclose`."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orbax_t5x.operations.diff import values as diff_values
from orbax_t5x.operations.diff.values import (
    LargestDifference,
    Tolerance,
    ValueDifference,
    are_comparable,
    compare_values,
)
from tests.support.array_strategies import DTYPES

_TOLERANCES = [(0.0, 0.0), (0.5, 0.0), (0.0, 0.25), (1e-3, 1e-3), (1e300, 0.0)]


def elements(array):
    """The elements as Python's numbers, in row-major order, with their indices."""
    kind = np.dtype(array.dtype)
    wide = kind if kind.kind in "biufc" else np.dtype(int if "int" in kind.name else float)
    with np.errstate(all="ignore"):
        return zip(np.ndindex(array.shape), array.astype(wide).reshape(-1).tolist(), strict=True)


def is_nan(value):
    return value != value


def distance(a, b):
    if a == b:
        return 0
    try:
        found = abs(a - b)
    except OverflowError:
        return math.inf
    return math.inf if is_nan(found) else found


def ratio(apart, b):
    try:
        found = apart / abs(b)
    except (ZeroDivisionError, OverflowError):
        return math.inf
    return math.inf if is_nan(found) else found


def expected(a, b, tolerance):
    """The same by loops over elements; what is close is NumPy's answer where numbers are not exact."""
    differing, one_nan = 0, 0
    absolute = relative = None
    both_exact = all(np.dtype(x.dtype).kind in "biu" or "int" in np.dtype(x.dtype).name for x in (a, b))
    for (index, x), (_, y) in zip(elements(a), elements(b), strict=True):
        if not both_exact:
            x, y = (value if isinstance(value, complex) else float(value) for value in (x, y))
        if is_nan(x) or is_nan(y):
            one_nan += is_nan(x) != is_nan(y)
            differing += is_nan(x) != is_nan(y)
            continue
        far = distance(x, y)
        if both_exact:
            is_close = far == 0 or float(far) <= tolerance.atol + tolerance.rtol * abs(float(y))
        else:
            with np.errstate(all="ignore"):
                is_close = x == y or bool(np.isclose(x, y, atol=tolerance.atol, rtol=tolerance.rtol))
        differing += not is_close
        if far > 0:
            absolute = absolute if absolute is not None and absolute[0] >= far else (far, index)
            share = ratio(far, y)
            relative = relative if relative is not None and relative[0] >= share else (share, index)
    return differing, one_nan, absolute, relative


@st.composite
def arrays(draw):
    """Two arrays of one shape, of any dtypes: any bits, and often the same values on both sides."""
    shape = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    size = math.prod(shape)

    def array(dtype):
        raw = np.frombuffer(draw(st.binary(min_size=size * 16, max_size=size * 16)), np.uint8)
        if dtype.kind == "b":
            return (raw[:size] % 2).astype(bool)
        if dtype.name.strip("uint") in ("1", "2", "4"):
            return raw[:size].astype(dtype)
        return raw[: size * dtype.itemsize].view(dtype)

    one, other = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    if draw(st.booleans()):
        other = one
    a, b = array(one).copy(), array(other).copy()
    for at in draw(st.lists(st.integers(0, size - 1), max_size=size)):
        if one == other:
            a[at] = b[at]
        else:
            a[at], b[at] = np.ones((), one), np.ones((), other)
    return a.reshape(shape), b.reshape(shape)


@pytest.mark.slow
@given(arrays(), st.sampled_from(_TOLERANCES), st.sampled_from([1, 3, 1 << 15]))
def test_any_two_arrays(pair, tolerance, block):
    a, b = pair
    tolerance = Tolerance(*tolerance)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diff_values, "_BLOCK_ELEMENTS", block)
        found = compare_values(a, b, (0,) * a.ndim, tolerance)
    differing, one_nan, absolute, relative = expected(a, b, tolerance)
    assert (found.differing, found.one_nan) == (differing, one_nan)
    for largest, wanted in ((found.absolute, absolute), (found.relative, relative)):
        assert (largest is None) == (wanted is None)
        if wanted is not None:
            assert float(largest.value) == pytest.approx(float(wanted[0]), rel=1e-15)


@given(arrays())
# An integer that float64, in which the two are compared, has not.
@example((np.array(0, ml_dtypes.bfloat16), np.array(2306124484190404864, np.uint64)))
def test_the_places_of_the_largest(pair):
    """The elements named are those that stand there, and the first as far apart as said."""
    a, b = pair
    found = compare_values(a, b, (5,) * a.ndim, Tolerance())
    for largest in (found.absolute, found.relative):
        if largest is not None:
            index = tuple(i - 5 for i in largest.index)
            assert dict(elements(a))[index] == largest.a and dict(elements(b))[index] == largest.b
    if found.absolute is not None:
        distances = [
            0 if is_nan(x) or is_nan(y) else distance(x, y)
            for (_, x), (_, y) in zip(elements(a), elements(b), strict=True)
        ]
        first = np.unravel_index(distances.index(max(distances)), a.shape)
        close = math.isclose(float(found.absolute.value), float(max(distances)), rel_tol=1e-15)
        assert close or math.isinf(max(distances))
        if isinstance(found.absolute.value, int):
            assert found.absolute.index == tuple(int(i) + 5 for i in first)


@pytest.mark.parametrize(
    ("a", "b", "apart"),
    [
        (np.int64(-(2**63)), np.int64(2**63 - 1), 2**64 - 1),
        (np.uint64(0), np.uint64(2**64 - 1), 2**64 - 1),
        (np.int64(-(2**63)), np.uint64(2**64 - 1), 2**64 + 2**63 - 1),
        (np.int64(2**53 + 1), np.int64(2**53), 1),
        (np.uint8(3), np.int8(-4), 7),
        (np.bool_(True), np.int32(-2), 3),
        (ml_dtypes.int4(-8), np.uint64(2**63), 2**63 + 8),
    ],
)
def test_integers_do_not_overflow(a, b, apart):
    found = compare_values(np.asarray([a]), np.asarray([b]), (0,), Tolerance())
    assert found.differing == 1 and found.absolute == LargestDifference(apart, (0,), int(a), int(b))
    assert isinstance(found.absolute.value, int)


def test_nan_infinities_and_zeros():
    nan, inf = math.nan, math.inf
    a = np.array([nan, nan, 1.0, inf, inf, -inf, 0.0, 5.0])
    b = np.array([nan, 1.0, nan, inf, -inf, 2.0, -0.0, 0.0])
    found = compare_values(a, b, (0,), Tolerance())
    assert (found.differing, found.one_nan) == (5, 2)
    assert found.absolute == LargestDifference(inf, (4,), inf, -inf)
    assert compare_values(a[-2:], b[-2:], (6,), Tolerance()).relative == LargestDifference(inf, (7,), 5.0, 0.0)
    # No tolerance reaches an infinity, or a NaN.
    assert compare_values(a, b, (0,), Tolerance(1e9, 1e9)).differing == 4


def test_bits_of_small_types_that_mean_nothing():
    low = np.array([0x13, 0x2F], np.uint8).view(ml_dtypes.uint4)
    other = np.array([0x03, 0x0F], np.uint8).view(ml_dtypes.uint4)
    assert np.array_equal(low.astype(int), other.astype(int))  # what ml_dtypes says
    assert compare_values(low, other, (0,), Tolerance()) == ValueDifference()


def test_dtypes_are_compared_by_value():
    exact = np.array([1.0, -2.5, 0.0], np.float32)
    assert compare_values(exact, exact.astype(ml_dtypes.bfloat16), (0,), Tolerance()) == ValueDifference()
    rounded = np.array([1 + 2**-12, 1.0], np.float32)
    found = compare_values(rounded, rounded.astype(ml_dtypes.bfloat16), (0,), Tolerance())
    assert found.differing == 1 and found.absolute == LargestDifference(2**-12, (0,), 1 + 2**-12, 1.0)


def test_text():
    a, b = np.array([b"one", b"two", b""], object), np.array([b"one", b"too", b"x"], object)
    assert compare_values(a, b, (0,), Tolerance(9.0, 9.0)) == ValueDifference(differing=2)
    assert are_comparable(a.dtype, b.dtype) and not are_comparable(a.dtype, np.dtype(np.float32))
