"""Reshapes read runs, and into scattered buffers only large pieces."""

import numpy as np
import pytest

from orbax_t5x.lazy import box_slices, full_box
from orbax_t5x.lazy.read import read_boxes
from tests.support.lazy_views import view_of


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
