"""Copies from windows of stored bytes: NumPy's dtypes are the oracle of byte orders, bools and small integers."""

import itertools
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.lazy.box import box_slices
from orbax_t5x.lazy.leaf import Request
from orbax_t5x.readers.ranges.byte_runs import Run, WindowGrid
from orbax_t5x.readers.ranges.scatter import LOW_BITS, Elements, Scatter, as_stored

STORED = ["bfloat16", "float32", "int4", "bool", "complex64", "float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu"]


def copied(stored, dtype, *, swap=False):
    out = np.zeros(stored.shape, dtype)
    Elements(np.dtype(dtype), swap, "/checkpoint", "leaf").copy(stored, out)
    return out


@pytest.mark.parametrize("dtype", ["int16", "float32", "uint64", "complex64"])
def test_bytes_of_the_other_order_are_numpys(dtype):
    values = np.arange(6).reshape(2, 3).astype(dtype) * 3
    stored = values.astype(np.dtype(dtype).newbyteorder(">")).view(np.dtype(dtype))
    assert np.array_equal(copied(stored, dtype, swap=True), values)
    assert not np.array_equal(copied(stored, dtype), values)


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.int2])
def test_padding_bits_of_small_integers_count_nothing(dtype):
    info = ml_dtypes.iinfo(dtype)
    values = np.arange(info.min, info.max + 1).astype(dtype)
    padded = (values.view(np.uint8) | np.uint8(0xFF ^ LOW_BITS[np.dtype(dtype)])).view(dtype)
    assert np.array_equal(copied(padded, dtype), values)
    assert not as_stored(np.dtype(dtype))


def test_a_bool_is_0_or_1():
    assert copied(np.array([0, 1], np.uint8).view(bool), bool).tolist() == [False, True]
    with pytest.raises(CorruptCheckpointError, match="2"):
        copied(np.array([0, 2], np.uint8).view(bool), bool)
    assert as_stored(np.dtype("float32")) and not as_stored(np.dtype(bool))


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
