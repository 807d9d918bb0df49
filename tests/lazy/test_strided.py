"""Slices, repeats and reshapes of views: exactly the boxes that they need are read."""

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x import lazy
from orbax_t5x.lazy import as_view, box_slices, full_box, several
from orbax_t5x.lazy.read import read_boxes
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


def test_a_reshape_reads_runs_and_reads_over_small_gaps_only():
    heads = view_of((6, 4096)).reshape(6, 4, 1024)
    assert [box for _, box in heads.requests(((0, 6), (1, 3), (0, 1024)))] == [((0, 6), (1024, 3072))]
    # Half of each head: gaps of 2 KiB lie between.
    assert [box for _, box in heads.requests(((0, 6), (1, 3), (0, 512)))] == [((0, 6), (1024, 2560))]
    wide = view_of((6, 16384)).reshape(6, 4, 4096)
    # Gaps of 8 KiB.
    boxes = [box for _, box in wide.requests(((0, 6), (1, 3), (0, 2048)))]
    assert boxes == [((0, 6), (4096, 6144)), ((0, 6), (8192, 10240))]
    joined = view_of((4, 16)).reshape(64)
    boxes = [box for _, box in joined.requests(((10, 50),))]
    assert boxes == [((0, 1), (10, 16)), ((1, 3), (0, 16)), ((3, 4), (0, 2))]


def test_a_reshape_into_a_scattered_buffer_is_cut_where_the_pieces_are_large_only():
    def pieces(view, scattered_axis):
        # A buffer whose leading dimensions up to this one cannot be joined with what follows.
        padded = [size + (axis == scattered_axis + 1) for axis, size in enumerate(view.shape)]
        out = np.zeros(padded, view.dtype)[tuple(slice(0, size) for size in view.shape)]
        return [request.box for _, request in view.lower(full_box(view.shape), out).reads]

    heads_first = view_of((128, 1024)).reshape(4, 32, 1024)
    assert pieces(heads_first, 0) == [((32 * i, 32 * i + 32), (0, 1024)) for i in range(4)]
    assert pieces(heads_first, 1) == [((0, 128), (0, 1024))]
    # Heads of 64 floats: a quarter of a kilobyte each is not worth a request of its own.
    assert pieces(view_of((128, 768)).reshape(128, 12, 64), 1) == [((0, 128), (0, 768))]


@pytest.mark.parametrize(
    "box", [((4, 12), (0, 32), (0, 1024)), ((3, 4), (5, 29), (0, 1024)), ((1, 16), (0, 32), (0, 700))]
)
@pytest.mark.parametrize("padded_axis", [1, 2])
def test_parts_of_a_reshape_arrive_in_a_scattered_buffer(box, padded_axis):
    view = view_of((512, 1024)).reshape(16, 32, 1024)
    shape = [last - first for first, last in box]
    out = np.full([size + 3 * (axis == padded_axis) for axis, size in enumerate(shape)], -1, view.dtype)
    read_boxes([(view.node, box, out[tuple(map(slice, shape))])])
    whole = np.arange(512 * 1024).reshape(16, 32, 1024).astype(np.float32)
    np.testing.assert_array_equal(out[tuple(map(slice, shape))], whole[box_slices(box)])
    assert (np.delete(out, np.s_[: shape[padded_axis]], padded_axis) == -1).all()
