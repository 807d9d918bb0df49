"""`Dequantize`: weights without a scale stay; what is no scale is a problem; its optimizer state is reset."""

import numpy as np

from orbax_t5x import transforms as tr
from orbax_t5x.testing.transform_suite import run
from tests.support.transform_cases import QUANTIZED, only_problem, problems

RULE = tr.Dequantize("(.)/kernel", r"\1/scale")


def test_no_scale_at_all_is_a_problem_unless_it_is_allowed():
    without = {name: value for name, value in QUANTIZED.items() if name != "x/scale"}
    problem = only_problem(RULE, without)
    assert problem.kind == "unused_rule" and r"'\\1/scale'" in problem.message
    assert run(tr.Dequantize("(.)/kernel", r"\1/scale", require_match=False), without)[1].problems == []


def test_scales_of_several_elements_or_of_integers_are_problems():
    several = {**QUANTIZED, "x/scale": np.ones(4, np.float32)}
    assert [(one.kind, one.leaf) for one in problems(RULE, several)] == [("shape", "x/kernel")]
    assert [one.kind for one in problems(RULE, {**QUANTIZED, "x/scale": np.int32(1)})] == ["dtype"]
    assert run(RULE, {**QUANTIZED, "x/scale": None}, {})[1].problems[0].kind == "unused_rule"


def test_the_optimizer_state_of_a_quantized_weight_cannot_follow():
    state = {f"target/{name}": value for name, value in QUANTIZED.items()}
    state["state/param_states/0/mu/x/kernel"] = np.ones((3, 4), np.float32)
    result, diagnostics = run(tr.Dequantize("target/(.)/kernel", r"target/\1/scale"), state)
    assert diagnostics.problems == [] and diagnostics.lost.keys() == {"state/param_states/0/mu/x/kernel"}
    expected = QUANTIZED["x/kernel"].astype(np.float32) * np.float32(0.3)
    np.testing.assert_array_equal(result["target/x/kernel"], expected)
