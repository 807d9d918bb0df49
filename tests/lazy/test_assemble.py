"""Stacks, concatenations and paddings read only the inputs that a box overlaps."""

import itertools

import numpy as np
import pytest

from orbax_t5x.lazy import several
from orbax_t5x.lazy.assemble import padded
from orbax_t5x.lazy.node import leaf_node
from orbax_t5x.lazy.read import read_boxes
from orbax_t5x.testing.array_leaf import ArrayLeaf
from tests.support.lazy_views import leaf_names, view_of


def test_a_slice_of_a_stack_knows_only_the_inputs_that_it_touches():
    views = [view_of((2, 3), name=f"layer{i}") for i in range(6)]
    stacked = several.stack(views, 1)
    assert leaf_names(stacked) == [f"layer{i}" for i in range(6)]
    assert stacked[:, 4].node is views[4].node
    assert leaf_names(stacked[:, 1:3]) == ["layer1", "layer2"]
    assert leaf_names(stacked[:, ::-2]) == ["layer5", "layer3", "layer1"]
    assert leaf_names(stacked.T[2, -1]) == ["layer5"]
    assert leaf_names(stacked.astype("float64")[:, 2].T) == ["layer2"]
    box = ((0, 2), (2, 3), (1, 3))
    assert stacked.requests(box) == [(views[2].leaves()[0], ((0, 2), (1, 3)))]


def test_a_slice_of_a_concatenation_knows_only_the_inputs_that_it_touches():
    views = [view_of((2, size), name=f"part{size}") for size in (3, 0, 4, 5)]
    joined = several.concatenate(views, 1)
    assert leaf_names(joined[:, :3]) == ["part3"]
    assert joined[:, 3:7].node is views[2].node
    assert leaf_names(joined[:, 2:4]) == ["part3", "part4"]
    assert leaf_names(joined[:, 7]) == ["part5"]
    assert leaf_names(joined[0, ::-6]) == ["part5", "part4"]
    assert joined.requests(((1, 2), (3, 4))) == [(views[2].leaves()[0], ((1, 2), (0, 1)))]


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
