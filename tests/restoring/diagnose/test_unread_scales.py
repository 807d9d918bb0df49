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


FLOAT8, INT8 = ml_dtypes.float8_e4m3fn, np.int8
# What stands beside a quantized weight: its dtype, and by name what is to be done.
UNKNOWN = [
    (FLOAT8, {"q.input_scale": np.float32(2)}),
    (FLOAT8, {"q.comfy_quant": np.zeros(5, np.uint8)}),
    (np.uint8, {"q.weight.absmax": np.ones(1, np.float32), "q.weight.quant_map": np.ones(16, np.float32)}),
]
RENAMED = [ot.transforms.Rename([(r"q\.weight", "q/kernel"), (r"q\.(?!weight$)(.*)", r"other/\1")])]


@pytest.mark.parametrize(("dtype", "beside"), UNKNOWN)
def test_a_leaf_that_may_multiply_a_kept_weight_has_no_fix_that_leaves_it_out(dtype, beside):
    stored = {"q.weight": np.full((2, 3), 3, dtype), **beside}
    renamed = {"q/kernel": np.zeros((2, 3), dtype)}
    for target, rules in ((stored, ot.rules.scaled_fp8_to_float32()), (TARGET, ()), (renamed, RENAMED)):
        wanted = {name: value for name, value in target.items() if name not in beside}
        if target is TARGET:
            wanted = {"q.weight": np.zeros((2, 3), dtype)}
        with pytest.raises(RestorePlanError) as caught:
            ot.plan_restore(checkpoint(stored), wanted, rules)
        assert len(caught.value.problems) == len(beside)
        for problem in caught.value.problems:
            assert "what the quantized weight 'q.weight' is multiplied by" in problem.message
            text = str(problem.fix)
            assert "float32" in text and "strict" not in text and "Drop" not in text and not problem.fix.arguments
    plan = ot.plan_restore(checkpoint(stored), {"q.weight": np.zeros((2, 3), dtype)}, strict=False)
    assert [one for one in plan.warnings if "1 quantized weight is" in one]


@pytest.mark.parametrize(
    ("dtype", "scale", "value"),
    [(FLOAT8, "weight_scale_inv", np.ones((1, 1))), (INT8, "weight_scale", np.ones((2, 1))), (INT8, "SCB", np.ones(2))],
)
def test_a_known_scale_is_multiplied_and_never_left_out(dtype, scale, value):
    stored = checkpoint({"q.weight": np.full((2, 3), 3, dtype), f"q.{scale}": value.astype(np.float32)})
    found = []
    for name, rules in (("q.weight", ()), ("q/kernel", RENAMED), ("q.weight", ot.rules.scaled_fp8_to_float32())):
        with pytest.raises(RestorePlanError) as caught:
            ot.plan_restore(stored, {name: np.zeros((2, 3), dtype)}, rules)
        (problem,) = caught.value.problems
        assert not {"strict", "Drop"} & set(str(problem.fix).replace("(", " ").split())
        found.append((problem.kind, str(problem.fix.text).startswith("add transforms=[ot.rules.scaled_fp8")))
    assert found == [("leftover", True), ("leftover", False), ("dtype", False)]


@pytest.mark.parametrize("shape", [(), (1,), (2,), (2, 1)])
def test_weight_scale_multiplies_the_weight_or_each_of_its_rows(shape):
    weight = np.arange(6).reshape(2, 3).astype(FLOAT8)
    scale = np.arange(1, 1 + np.prod(shape, dtype=int), dtype=np.float32).reshape(shape) / 4
    stored = {"q.weight": weight, "q.weight_scale": scale, "q.scale_input": np.float32(9)}
    stored["q.comfy_quant"] = np.zeros(3, np.uint8)
    expected = weight.astype(np.float32) * (scale.reshape(-1, 1) if scale.size > 1 else scale.reshape(()))
    for rules in ("auto", [ot.rules.scaled_fp8_to_float32()]):
        np.testing.assert_array_equal(ot.restore(checkpoint(stored), TARGET, rules)["q.weight"], expected)
    with pytest.raises(RestorePlanError) as caught:
        ot.plan_restore(checkpoint(stored), TARGET)
    (problem,) = caught.value.problems
    np.testing.assert_array_equal(ot.restore(checkpoint(stored), TARGET, problem.fix.transforms)["q.weight"], expected)


def test_a_scale_of_blocks_is_refused_by_its_shape():
    stored = {"q.weight": np.ones((2, 4), FLOAT8), "q.weight_scale": np.ones((2, 2), np.float32)}
    with pytest.raises(
        RestorePlanError, match=r"one for each row \(rows, 1\) or element, not an array of shape \(2, 2\)"
    ):
        ot.plan_restore(checkpoint(stored), None, ot.rules.scaled_fp8_to_float32())


def test_the_scale_of_a_weight_that_is_left_over_itself_is_a_leftover_like_it():
    stored = {"q.weight": np.ones((2, 3), np.float32), "k.weight": np.ones(3, FLOAT8), "k.SCB": np.float32(2)}
    with pytest.raises(RestorePlanError) as caught:
        ot.plan_restore(checkpoint(stored), TARGET)
    (problem,) = caught.value.problems
    assert problem.kind == "leftover" and problem.fix.arguments == {"strict": False}
