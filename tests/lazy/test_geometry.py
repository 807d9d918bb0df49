"""Indices, axes and shapes that views refuse, with the error that NumPy raises."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.lazy_views import view_of


@pytest.mark.parametrize(
    "key, text",
    [
        ([0, 1], "indices, not list"),
        (np.array([0, 1]), "indices, not ndarray"),
        (np.array([True, False]), "indices, not ndarray"),
        (True, "indices, not bool"),
        (np.bool_(True), "indices, not bool"),
        (1.0, "indices, not float"),
        ("a", "indices, not str"),
        ((0, [1]), "indices, not list"),
        (slice("a", None), "a slice of a lazy array takes integers"),
        (2, r"index 2 is out of bounds for axis 0 of shape \(2, 3\)"),
        ((0, -4), r"index -4 is out of bounds for axis 1"),
        ((0, 0, 0), "too many indices: 3"),
        ((..., ...), "single ellipsis"),
    ],
)
def test_an_index_that_is_not_basic_is_an_index_error_that_says_so(key, text):
    with pytest.raises(IndexError, match=text):
        view_of((2, 3))[key]


def test_a_step_of_zero_is_numpys_value_error():
    with pytest.raises(ValueError, match="zero"):
        view_of((2, 3))[::0]


def test_integers_of_every_kind_are_indices():
    view = view_of((2, 3))
    for one in (1, np.int32(1), np.array(1), jnp.asarray(1)):
        np.testing.assert_array_equal(view[one].get(), [3, 4, 5])


def test_a_buffer_that_does_not_fit_is_refused():
    view = view_of((2, 3))
    for out in (np.zeros((3, 2), "float32"), np.zeros((2, 3)), np.zeros(6, "float32")):
        with pytest.raises(ValueError, match="a buffer of shape"):
            view.lower(((0, 2), (0, 3)), out)
