"""Boxes of arrays: NumPy's masks are the oracle of what they hold together."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from orbax_t5x.lazy import box as boxes

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
def test_a_union_counts_each_element_once_and_lies_in_the_bounding_box(several):
    held = mask(*several)
    assert boxes.union_size(tuple(several)) == held.sum()
    assert not (held & ~mask(boxes.bounding_box(several))).any()


@given(BOXES)
def test_shape_and_size_are_those_of_the_slice(box):
    array = np.arange(math.prod(SHAPE)).reshape(SHAPE)
    cut = array[boxes.box_slices(box)]
    assert (boxes.box_shape(box), boxes.box_size(box)) == (cut.shape, cut.size)
    outer = boxes.bounding_box([box, ((4, 5), (3, 4))])
    assert np.array_equal(array[boxes.box_slices(outer)][boxes.slices_within(box, outer)], cut)
    assert boxes.full_box(SHAPE) == ((0, 5), (0, 4))
