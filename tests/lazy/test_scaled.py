"""Arrays times the scale stored beside them."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbax_t5x import lazy
from orbax_t5x.lazy import as_view, full_box
from orbax_t5x.testing.array_leaf import ArrayLeaf
from tests.support.array_strategies import GuardedBuffer, boxes

_DTYPES = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16, np.float64, np.int8]


@settings(max_examples=max(10, settings.default.max_examples // 10))
@given(st.data())
def test_a_scaled_array_equals_numpy_in_any_box_and_buffer(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    by_row = (shape[0], *(1 for _ in shape[1:])) if len(shape) > 1 else ()
    dtype, scale_shape = data.draw(st.sampled_from(_DTYPES)), data.draw(st.sampled_from([(), (1,), (1, 1), by_row]))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    weight = ArrayLeaf((rng.normal(size=shape) * 9).astype(dtype), "weight")
    scale = ArrayLeaf(rng.normal(size=scale_shape).astype(np.float32), "scale")
    wide = np.float64 if dtype is np.float64 else np.float32
    factor = scale.array.astype(wide).reshape(() if scale.array.size == 1 else by_row)
    expected = weight.array.astype(wide) * factor
    axes = data.draw(st.permutations(range(len(shape))))
    view, expected = lazy.scaled(as_view(weight), as_view(scale)).transpose(axes), expected.transpose(axes)
    if shape and data.draw(st.booleans()):
        view, expected = view[::-2], expected[::-2]
    box = data.draw(boxes(expected.shape))
    buffer = GuardedBuffer(data.draw, lazy.box_shape(box), view.dtype)
    lazy.read_views([(view, box, buffer.array)])
    assert view.dtype == wide and buffer.guards_hold()
    assert buffer.array.tobytes() == expected[lazy.box_slices(box)].tobytes()
    for leaf in (weight, scale) if buffer.array.size else ():
        assert leaf.counts.max() == 1


def test_only_the_box_is_read_and_the_scale_once():
    weight, scale = ArrayLeaf(np.ones((64, 40), ml_dtypes.float8_e4m3fn), "w"), ArrayLeaf(np.float32(3), "s")
    view = lazy.scaled(as_view(weight), as_view(scale))
    assert view[5:9].T.requests(((0, 40), (0, 4))) == [(weight, ((5, 9), (0, 40))), (scale, ())]
    assert view.describe() == "times a scale, float32"
    np.testing.assert_array_equal(view[5:9].get(), np.full((4, 40), 3, np.float32))
    assert weight.counts.sum() == 4 * 40
    # The weight's own bytes, the scale, and a product.
    assert view.scratch_bytes(full_box(view.shape)) == 64 * 40 + 4 + 64 * 40 * 4
    repeated = lazy.repeat(view, 2, 0)
    assert repeated.get().shape == (2, 64, 40)


def test_what_is_no_scale_is_refused():
    with pytest.raises(ValueError, match=r"one number, [^;]*not an array of shape \(2,\)"):
        lazy.scaled(np.ones((2, 2), np.float32), np.ones(2, np.float32))
    for weight, scale in ((np.ones(2, bool), np.float32(1)), (np.ones(2), np.int32(1)), (np.ones(2, complex), 1.0)):
        with pytest.raises(TypeError, match="real numbers, not"):
            lazy.scaled(weight, scale)
