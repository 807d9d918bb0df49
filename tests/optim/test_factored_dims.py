"""Dimensions that a factored second moment is averaged over."""

import itertools

import numpy as np
import pytest

from orbax_t5x.adafactor import FactorDim
from orbax_t5x.optim.factored_dims import dims_by_rule, dims_by_size, possible_dims

pytestmark = pytest.mark.slow


def test_the_heuristic_is_numpy_argsort():
    for shape in itertools.product([1, 2, 3], repeat=3):
        order = np.argsort(shape, kind="stable")
        dims = dims_by_size(shape)
        assert dims is not None and dims.kept(3) == (set(range(3)) - {order[-1]}, set(range(3)) - {order[-2]})
    assert possible_dims((4, 4), (4,), (4,), None) == (dims_by_size((4, 4)),)
    assert possible_dims((5,), (1,), (1,), None) == ()
    rule = (FactorDim.ROW, FactorDim.BATCH, FactorDim.COLUMN)
    assert possible_dims((2, 3, 4), (2, 3), (3, 4), None) == (dims_by_rule(rule),)
