"""Geometry of byte runs and windows: against masks over all bytes."""

import itertools
from unittest import mock

import ml_dtypes
import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from orbax_t5x.lazy.box import box_shape, box_slices
from orbax_t5x.lazy.leaf import Request
from orbax_t5x.readers.ranges.byte_range import byte_strides, locate_box
from orbax_t5x.readers.ranges.elements import Elements
from orbax_t5x.readers.ranges.windowed import Run, Scatter, WindowGrid, split_ends, union_runs
from tests.support.byte_ranges import bytes_of, shapes_and_boxes


def gaps_of(read: np.ndarray, wanted: np.ndarray) -> list[int]:
    """Lengths of the stretches read over."""
    return [len(list(group)) for over, group in itertools.groupby(read & ~wanted) if over]


class TestGeometry:
    @given(shapes_and_boxes(), st.sampled_from([1, 2, 4]), st.sampled_from([0, 1, 3, 8, 40]))
    def test_runs_are_the_union_with_small_gaps(self, case, itemsize, max_gap) -> None:
        shape, boxes = case
        wanted = bytes_of(shape, itemsize, boxes)
        runs, count = union_runs(shape, itemsize, boxes, max_gap)
        ranges = [one for run in runs for one in run.ranges()]
        assert count == wanted.sum()
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges)), "file order, disjoint"
        read = np.zeros_like(wanted)
        for start, stop in ranges:
            assert wanted[start] and wanted[stop - 1], "no read begins or ends in a gap"
            read[start:stop] = True
        assert (read >= wanted).all()
        assert max(gaps_of(read, wanted), default=0) < max(1, max_gap)

    @given(shapes_and_boxes(), st.sampled_from([1, 4]), st.sampled_from([0, 3, 8, 40]))
    def test_split_ends_reads_the_same_and_cuts_at_wanted_edges(self, case, itemsize, max_gap) -> None:
        shape, boxes = case
        runs, _ = union_runs(shape, itemsize, boxes, max_gap)
        wanted, _ = union_runs(shape, itemsize, boxes, 0)
        before = [one for run in runs for one in run.ranges()]
        after = [one for run in split_ends(runs, wanted) for one in run.ranges()]
        starts = {start for run in wanted for start, _ in run.ranges()}
        stops = {stop for run in wanted for _, stop in run.ranges()}
        assert [byte for one in after for byte in range(*one)] == [byte for one in before for byte in range(*one)]
        for start, stop in before:
            inside = [one for one in after if start <= one[0] < stop]
            assert inside[0][1] in stops and inside[-1][0] in starts

    @given(shapes_and_boxes(), st.sampled_from([1, 4]), st.sampled_from([1, 4, 16, 100]))
    def test_windows_are_boxes_and_byte_ranges_at_once(self, case, itemsize, max_bytes) -> None:
        shape, boxes = case
        assume(0 not in shape)
        runs, _ = union_runs(shape, itemsize, boxes, 8)
        numbers = np.arange(int(np.prod(shape, dtype=int)) * itemsize).reshape(*(shape or (1,)), itemsize)
        grid = WindowGrid(shape, itemsize, max_bytes)
        pieces = []
        for window in grid.windows(runs):
            assert window.stop - window.start <= max(max_bytes, itemsize)
            inside = numbers[(*window.outer, slice(window.low, window.high))].reshape(-1)
            assert inside.tolist() == list(range(window.start, window.stop))
            assert all(window.start <= start < stop <= window.stop for start, stop in window.ranges)
            pieces += window.ranges
        assert [b for one in pieces for b in range(*one)] == [
            b for run in runs for one in run.ranges() for b in range(*one)
        ]

    @given(shapes_and_boxes(), st.sampled_from([1, 4]))
    def test_a_box_is_one_range_where_its_bytes_are(self, case, itemsize) -> None:
        shape, (box, *_) = case
        held = np.flatnonzero(bytes_of(shape, itemsize, [box]))
        assume(held.size)
        placed = locate_box(box, box_shape(box), shape, byte_strides(shape, itemsize))
        assert placed == (held[0], held[-1] + 1 - held[0] == held.size)

    def test_boxes_outside_are_refused(self) -> None:
        strides = byte_strides((4,), 1)
        for box, extents in (((0, 5),), (5,)), (((-1, 2),), (3,)), (((0, 2),), (3,)), ((), ()), (((3, 1),), (-2,)):
            assert locate_box(box, extents, (4,), strides) is None

    def test_columns_of_a_matrix_are_one_run_however_high_it_is(self) -> None:
        runs, wanted = union_runs((10**9, 4, 10**6), 4, [((0, 10**9), (0, 4), (5, 10))], 4096)
        assert len(runs) == 1 and wanted == 10**9 * 4 * 5 * 4


STORED = ["bfloat16", "float32", "int4", "bool", "complex64", "float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu"]


def scattered(array, requests, max_bytes):
    """Scatters all windows of an array; returns the number of elements, and of copies for each window."""
    grid = WindowGrid(array.shape, array.itemsize, max_bytes)
    stored = array.reshape(-1).view(np.uint8)
    scatter = Scatter(array.shape, grid.depth, requests, Elements(array.dtype, False, "/checkpoint", "leaf"))
    windows = list(grid.windows([Run(0, array.nbytes)]))
    with mock.patch.object(Elements, "copy", autospec=True, side_effect=Elements.copy) as copies:
        filled = sum(scatter.window(window, stored[window.start : window.stop]) for window in windows)
    return filled, copies.call_count / len(windows)


@st.composite
def grids_of_boxes(draw):
    """Draws a shape and its division into equal boxes, as a mesh divides an array."""
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    sizes = [draw(st.integers(1, 4)) for _ in counts]
    boxes = itertools.product(
        *([(k * size, (k + 1) * size) for k in range(count)] for count, size in zip(counts, sizes, strict=True))
    )
    return tuple(count * size for count, size in zip(counts, sizes, strict=True)), list(boxes)


@given(grids_of_boxes(), st.sampled_from(STORED), st.integers(0, 3), st.data())
def test_buffers_of_any_distance_are_filled_alike(case, dtype_name, padding, data):
    shape, boxes = case
    dtype = np.dtype(getattr(ml_dtypes, dtype_name, dtype_name))
    array = (np.arange(np.prod(shape)) % 7).astype(dtype).reshape(shape)
    boxes = data.draw(st.permutations(boxes) | st.just(boxes) | st.just(boxes[::-1]))
    size = array[box_slices(boxes[0])].size
    memory = np.zeros((len(boxes), size + padding), dtype)
    outs = [row[:size].reshape(array[box_slices(box)].shape) for row, box in zip(memory, boxes, strict=True)]
    assert scattered(array, list(map(Request, boxes, outs)), data.draw(st.integers(1, 200)))[0] == array.size
    for box, out in zip(boxes, outs, strict=True):
        assert out.tobytes() == array[box_slices(box)].tobytes()
    assert not any(memory[:, size:].tobytes())


def test_columns_at_equal_distances_are_one_copy():
    array = np.arange(6 * 8, dtype=np.float32).reshape(6, 8)
    boxes = [((0, 6), (2 * k, 2 * k + 2)) for k in range(4)]
    memory = np.zeros((4, 6, 2), np.float32)
    assert scattered(array, list(map(Request, boxes, memory)), 64) == (48, 1)
    assert np.array_equal(memory, array.reshape(6, 4, 2).transpose(1, 0, 2))
    apart = [np.zeros((6, 2), np.float32) for _ in range(3)] + [memory[0]]
    assert scattered(array, list(map(Request, boxes, apart[::-1])), 64)[0] == 48
    assert np.array_equal(np.concatenate(apart[::-1], axis=1), array)


def test_rows_and_columns_of_a_mesh_are_one_copy_for_each_row():
    array = np.arange(64, dtype=np.float32).reshape(8, 8)
    boxes = [((4 * i, 4 * i + 4), (2 * k, 2 * k + 2)) for i in range(2) for k in range(4)]
    memory = np.zeros((8, 4, 2), np.float32)
    assert scattered(array, list(map(Request, boxes, memory)), 64) == (64, 1)
    assert all(np.array_equal(out, array[box_slices(box)]) for box, out in zip(boxes, memory, strict=True))
