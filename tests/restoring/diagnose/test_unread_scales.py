"""Leftover scales of quantized weights: the problem says so, and restores that leave them unread warn."""

import ml_dtypes
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import RestorePlanError
from tests.support.memory_checkpoint import checkpoint

STORED = {
    "q.weight": np.full((2, 3), 3, ml_dtypes.float8_e4m3fn),
    "q.scale_weight": np.float32(0.5),
    "scaled_fp8": np.zeros(0, ml_dtypes.float8_e4m3fn),
}
TARGET = {"q.weight": np.zeros((2, 3), np.float32)}


def test_the_fix_of_leftover_scales_is_to_multiply_by_them():
    for given in ((), [ot.transforms.Cast("q.weight", "float32")]):
        with pytest.raises(RestorePlanError) as caught:
            ot.plan_restore(checkpoint(STORED), TARGET, given)
        (problem,) = caught.value.problems
        assert problem.kind == "leftover" and "1 weight is quantized" in problem.message
        restored = ot.restore(checkpoint(STORED), TARGET, (*given, *problem.fix.transforms))
        np.testing.assert_array_equal(restored["q.weight"], np.full((2, 3), 1.5, np.float32))


def test_scales_that_are_allowed_to_be_left_over_are_a_warning():
    plan = ot.plan_restore(checkpoint(STORED), TARGET, strict=False)
    assert [one for one in plan.warnings if "1 quantized weight is" in one] and "q.scale_weight" in plan.unused
    stored = {"q.weight": np.ones(2, np.float32), "k.scale_weight": np.float32(1), "step": np.int32(1)}
    plan = ot.plan_restore(checkpoint(stored), {"q.weight": np.ones(2, np.float32)}, strict=False)
    assert list(plan.unused) == ["k.scale_weight", "step"] and not [one for one in plan.warnings if "quantized" in one]
