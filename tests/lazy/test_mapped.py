"""Elementwise functions over views: NumPy's results for any box, dtype and composition."""

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.lazy import AffineFunction, as_view

ARRAY = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.mark.parametrize("index", [np.s_[...], np.s_[1], np.s_[:, ::-1, 1:3], np.s_[:0], np.s_[0, 0, 0]])
def test_boxes_equal_numpys(index):
    found = as_view(ARRAY).map(np.sqrt)[index]
    np.testing.assert_array_equal(np.asarray(found), np.sqrt(ARRAY)[index])


def test_it_composes_and_shows_its_name():
    view = as_view(ARRAY).map(lambda x: x > 3, name="above").T.astype(np.int8)
    np.testing.assert_array_equal(np.asarray(view), (ARRAY > 3).T.astype(np.int8))
    assert "map above" in view.describe() and view.map(np.negative).describe().count("map") == 2
    assert as_view(np.float32(4)).map(np.sqrt).get() == 2


@pytest.mark.parametrize(
    ("function", "error", "match"),
    [
        (lambda x: x.sum(), ValueError, "not elementwise"),
        (lambda x: x[:-1] if x.size else x[None], ValueError, "not elementwise"),
        (lambda x: x.tolist(), TypeError, "returned list"),
    ],
)
def test_other_functions_are_refused(function, error, match):
    with pytest.raises(error, match=match):
        as_view(ARRAY).map(function, name="f")


def test_errors_of_the_function_arrive_as_they_are():
    def fails(x):
        if x.size:
            raise KeyError("mine")
        return x

    with pytest.raises(KeyError, match="mine"):
        as_view(ARRAY).map(fails).get()
    late = as_view(ARRAY).map(lambda x: x if not x.size else x.ravel())
    with pytest.raises(ValueError, match="not elementwise"):
        late.get()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_affine_rounds_once(dtype):
    array = as_view(np.linspace(-3, 3, 17)).astype(ot.transforms.Cast("x", dtype).dtype).get()
    wide = np.float64 if dtype == "float64" else np.float32
    expected = (array.astype(wide) * wide(1.7) + wide(0.3)).astype(array.dtype)
    np.testing.assert_array_equal(AffineFunction(1.7, 0.3)(array), expected)
