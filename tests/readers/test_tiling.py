"""A tiling fills every element of an array once; counting elements is the oracle."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from orbax_t5x.readers.tiling import MAX_TILING_STEPS, check_tiling


def brute_force(shape: tuple[int, ...], boxes) -> bool:
    held = np.zeros(shape, int)
    for box in boxes:
        held[tuple(slice(low, high) for low, high in box)] += 1
    return bool((held == 1).all())


@st.composite
def boxes_in(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    cuts = [sorted({0, size, *draw(st.sets(st.integers(0, size), max_size=3))}) for size in shape]
    boxes = [tuple(cell) for cell in itertools.product(*(list(itertools.pairwise(marks)) for marks in cuts))]
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(boxes) - 1))
        low_high = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
        boxes[at] = tuple((low, high) for low, high in low_high)
    return shape, boxes


@given(boxes_in())
def test_a_tiling_is_what_fills_every_element_once(case):
    shape, boxes = case
    assert (check_tiling(shape, boxes, MAX_TILING_STEPS).problem is None) == brute_force(shape, boxes)
