"""Boxes and indices of arrays: NumPy is the oracle."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_t5x.lazy import box as boxes
from tests.support.lazy_views import view_of

SHAPE = (5, 4)
BOXES = st.tuples(
    *(st.integers(0, size).flatmap(lambda a, n=size: st.tuples(st.just(a), st.integers(a, n))) for size in SHAPE)
)


def mask(*several):
    held = np.zeros(SHAPE, bool)
    for box in several:
        held[boxes.box_slices(box)] = True
    return held


@given(BOXES, BOXES)
def test_an_intersection_is_what_both_hold(box, other):
    common = boxes.intersect(box, other)
    assert np.array_equal(mask(*([common] if common else [])), mask(box) & mask(other))


@given(st.lists(BOXES, min_size=1, max_size=6))
def test_a_union_counts_each_element_once(several):
    held = mask(*several)
    assert boxes.union_size(tuple(several)) == held.sum()


@given(BOXES)
def test_shape_and_size_are_those_of_the_slice(box):
    array = np.arange(math.prod(SHAPE)).reshape(SHAPE)
    cut = array[boxes.box_slices(box)]
    assert (boxes.box_shape(box), boxes.box_size(box)) == (cut.shape, cut.size)
    outer = tuple((start, 7) for start, _ in box)
    assert np.array_equal(array[boxes.box_slices(outer)][boxes.slices_within(box, outer)], cut)
    assert boxes.full_box(SHAPE) == ((0, 5), (0, 4))


@pytest.mark.parametrize(
    "key, text",
    [
        ([0, 1], "indices, not list"),
        (np.array([0, 1]), "indices, not ndarray"),
        (np.array([True, False]), "indices, not ndarray"),
        (True, "indices, not bool"),
        (np.bool_(True), "indices, not bool"),
        (1.0, "indices, not float"),
        ("a", "indices, not str"),
        ((0, [1]), "indices, not list"),
        (slice("a", None), "a slice of a lazy array takes integers"),
        (2, r"index 2 is out of bounds for axis 0 of shape \(2, 3\)"),
        ((0, -4), r"index -4 is out of bounds for axis 1"),
        ((0, 0, 0), "too many indices: 3"),
        ((..., ...), "single ellipsis"),
    ],
)
def test_an_index_that_is_not_basic_is_an_index_error_that_says_so(key, text):
    with pytest.raises(IndexError, match=text):
        view_of((2, 3))[key]


def test_a_step_of_zero_is_numpys_value_error():
    with pytest.raises(ValueError, match="zero"):
        view_of((2, 3))[::0]


def test_integers_of_every_kind_are_indices():
    view = view_of((2, 3))
    for one in (1, np.int32(1), np.array(1), jnp.asarray(1)):
        np.testing.assert_array_equal(view[one].get(), [3, 4, 5])


def test_a_buffer_that_does_not_fit_is_refused():
    view = view_of((2, 3))
    for out in (np.zeros((3, 2), "float32"), np.zeros((2, 3)), np.zeros(6, "float32")):
        with pytest.raises(ValueError, match="a buffer of shape"):
            view.lower(((0, 2), (0, 3)), out)
