"""Slices, repeats and reshapes of views: exactly the boxes that they need are read."""

import numpy as np

import orbax_t5x as ot
from orbax_t5x import lazy
from orbax_t5x.lazy import as_view, several
from orbax_t5x.testing.array_leaf import ArrayLeaf
from tests.support.lazy_views import view_of


def test_compositions_that_undo_each_other_cost_nothing():
    view = view_of((4, 6, 2))
    assert (view.T.T).node is view.node
    assert (view[::-1][::-1]).node is view.node
    assert (view[...]).node is view.node
    assert (view[None][0]).node is view.node
    assert (view.reshape(48).reshape(4, 6, 2)).node is view.node
    assert (view.reshape(2, 2, 1, 12).reshape(8, 6).reshape(4, 6, 2)).node is view.node
    assert (view.astype("float32")).node is view.node
    assert (several.stack([view, view], 2)[:, :, 1]).node is view.node
    assert (several.concatenate([view])).node is view.node
    assert (lazy.broadcast_to(view, view.shape)).node is view.node
    assert view[1:3][:, 2:][1].requests(((0, 1), (0, 2))) == [(view.leaves()[0], ((2, 3), (2, 3), (0, 2)))]


def test_steps_read_row_by_row_where_rows_are_large_and_the_covering_box_where_not():
    large = view_of((10, 2048))
    assert [box for _, box in large[::4].requests(((0, 3), (0, 2048)))] == [((i, i + 1), (0, 2048)) for i in (0, 4, 8)]
    small = view_of((10, 8))
    assert [box for _, box in small[::4].requests(((0, 3), (0, 8)))] == [((0, 9), (0, 8))]
    assert [box for _, box in small[::-4].requests(((1, 3), (0, 8)))] == [((1, 6), (0, 8))]


def test_a_repeat_reads_once():
    leaf = ArrayLeaf(np.arange(6.0).reshape(2, 3))
    repeated = ot.repeat(as_view(leaf), 5, 1)
    np.testing.assert_array_equal(repeated.get(), np.repeat(leaf.array[:, None], 5, 1))
    assert leaf.counts.max() == 1
    assert repeated.requests(((0, 2), (2, 4), (0, 3))) == [(leaf, ((0, 2), (0, 3)))]


def test_a_repeat_larger_than_the_blocks_it_is_copied_in():
    array = np.random.default_rng(0).random((300, 700)).astype("float32")
    for axis in range(3):
        expected = np.repeat(np.expand_dims(array, axis), 3, axis)
        np.testing.assert_array_equal(lazy.repeat(array, 3, axis).get(), expected)
