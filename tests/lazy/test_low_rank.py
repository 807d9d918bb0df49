"""Products of thin matrices added to an array."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbax_t5x import lazy
from orbax_t5x.lazy import as_view, full_box, several
from orbax_t5x.testing.array_leaf import ArrayLeaf
from tests.support.array_strategies import GuardedBuffer, boxes
from tests.support.lazy_views import view_of


def test_a_low_rank_sum_reads_rows_and_columns_and_is_the_same_in_every_box():
    rng = np.random.default_rng(0)
    arrays = {"kernel": (64, 3, 40), "down": (64, 8), "up": (8, 3, 40)}
    leaves = {name: ArrayLeaf(rng.normal(size=shape).astype("bfloat16"), name) for name, shape in arrays.items()}
    kernel, down, up = (as_view(leaf) for leaf in leaves.values())
    merged = several.add_low_rank(kernel, down, up, 0.3)
    box = ((5, 9), (1, 3), (0, 7))
    assert merged.requests(box) == [
        (leaves["kernel"], box),
        (leaves["down"], ((5, 9), (0, 8))),
        (leaves["up"], ((0, 8), (1, 3), (0, 7))),
    ]
    wide = [leaf.array.astype(np.float64) for leaf in leaves.values()]
    exact = wide[0] + 0.3 * np.tensordot(wide[1], wide[2], 1)
    whole = merged.get()
    assert whole.dtype == kernel.dtype
    # Rounded once: within half a unit in the last place, and a little for sums in float32.
    np.testing.assert_allclose(whole.astype(np.float64), exact, rtol=2**-8 * 1.01, atol=1e-6)
    # In float32, boxes of every shape have the bits of the whole: shards agree with one another.
    sums = several.add_low_rank(kernel.astype("float32"), down, up, 0.3)
    np.testing.assert_allclose(sums.get(), exact, rtol=1e-5, atol=1e-6)
    for part in (np.s_[5:6, 1:2, 3:4], np.s_[:, 2], np.s_[7:30, :, ::-3], np.s_[40]):
        assert sums[part].get().tobytes() == sums.get()[part].tobytes()
    assert merged.describe() == "plus 0.3 times a product of rank 8"
    assert several.add_low_rank(np.ones((2, 2)), np.ones((2, 1)), np.ones((1, 2), "float32"), 1).dtype == np.float64


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 2)
@given(st.data())
def test_a_low_rank_sum_equals_numpy_in_any_box_and_buffer(data):
    """Small whole numbers, whose sums are exact in every order."""
    rows, columns = (tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))) for _ in range(2))
    rank = data.draw(st.integers(0, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    shapes = {"kernel": (*rows, *columns), "down": (*rows, rank), "up": (rank, *columns)}
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "float16", "float64"]))
    leaves = {name: ArrayLeaf(rng.integers(-2, 3, shape).astype(dtype), name) for name, shape in shapes.items()}
    expected = leaves["kernel"].array + 2 * np.tensordot(leaves["down"].array, leaves["up"].array, 1).astype(dtype)
    view = several.add_low_rank(*map(as_view, leaves.values()), 2)
    axes = data.draw(st.permutations(range(view.ndim)))
    view, expected = view.transpose(axes), expected.transpose(axes)
    box = data.draw(boxes(expected.shape))
    buffer = GuardedBuffer(data.draw, lazy.box_shape(box), view.dtype)
    lazy.read_views([(view, box, buffer.array)])
    np.testing.assert_array_equal(buffer.array, expected[lazy.box_slices(box)])
    assert view.dtype == np.dtype(dtype) and buffer.guards_hold()
    for leaf, (of_leaf, part) in zip(leaves.values(), view.requests(box), strict=False):
        assert of_leaf is leaf and leaf.counts.sum() == lazy.box_size(part) and leaf.counts.max() == 1


def test_a_low_rank_sum_takes_little_memory_and_large_rows(monkeypatch):
    kernel = view_of((300, 50))
    merged = several.add_low_rank(kernel, np.ones((300, 2), "float32"), np.ones((2, 50), "float32"), 1)
    np.testing.assert_array_equal(merged.get(), kernel.get() + 2)
    monkeypatch.setattr("orbax_t5x.lazy.low_rank._BLOCK_BYTES", 64)
    np.testing.assert_array_equal(merged.get(), kernel.get() + 2)
    # Two copies of each factor, and two rows of sums.
    assert merged.scratch_bytes(full_box(merged.shape)) == 4 * (2 * (600 + 100) + 2 * 50)
    assert (
        several.add_low_rank(kernel, np.ones((300, 0), "float32"), np.ones((0, 50), "float32"), 1).node is kernel.node
    )


def test_a_low_rank_sum_refuses_what_does_not_fit():
    for down, up in [((4, 2), (3, 5)), ((4, 2), (2, 6)), ((2,), (2, 4, 5)), ((2, 4), (2, 5))]:
        with pytest.raises(ValueError, match=r"has not the kernel's shape \(4, 5\)"):
            several.add_low_rank(view_of((4, 5)), view_of(down), view_of(up), 1)
    with pytest.raises(TypeError, match="floating-point numbers, not int32"):
        several.add_low_rank(view_of((4, 5)), view_of((4, 2), "int32"), view_of((2, 5)), 1)
