"""Arrays that grow at their end: `np.pad`'s shape, the old elements at the origin, the filler's beyond them."""

import itertools

import numpy as np
import pytest

from orbax_t5x.lazy.node import leaf_node
from orbax_t5x.lazy.pad import padded
from orbax_t5x.lazy.read import read_boxes
from orbax_t5x.testing.array_leaf import ArrayLeaf

OLD = np.arange(6, dtype=np.int32).reshape(2, 3)
FILLER = np.arange(100, 120, dtype=np.int32).reshape(4, 5)
EXPECTED = FILLER.copy()
EXPECTED[:2, :3] = OLD
ROWS = [(0, 4), (0, 2), (1, 3), (2, 4)]
COLUMNS = [(0, 5), (0, 3), (2, 4), (3, 5)]


@pytest.mark.parametrize("box", list(itertools.product(ROWS, COLUMNS)))
def test_old_elements_come_from_the_array_and_the_rest_from_the_filler(box):
    node = padded(leaf_node(ArrayLeaf(OLD)), leaf_node(ArrayLeaf(FILLER)), "rows")
    expected = EXPECTED[tuple(slice(*side) for side in box)]
    out = np.full(expected.shape, -1, np.int32)
    read_boxes([(node, box, out)])
    assert np.array_equal(out, expected)
    requested = {leaf.shape for leaf, _ in node.requests(box)}
    assert (OLD.shape in requested) == (box[0][0] < 2 and box[1][0] < 3)


def test_an_array_of_the_wanted_shape_is_itself():
    node = leaf_node(ArrayLeaf(OLD))
    assert padded(node, leaf_node(ArrayLeaf(OLD)), "zeros") is node
