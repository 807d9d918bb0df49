"""A whole model into a target that is its encoder."""

import numpy as np
import pytest

import orbax_t5x as ot
from tests.support.failed_plans import BUNDLE, HF, HF_CONFIG, parameters, problems_of
from tests.support.memory_checkpoint import checkpoint

WHOLE = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in parameters(HF_CONFIG).items()}
ENCODER = {name: leaf for name, leaf in WHOLE.items() if "decoder" not in name}


@pytest.mark.parametrize(
    "source, transforms", [(checkpoint(WHOLE), ()), (HF, [ot.rules.hf_t5_to_t5x()]), (HF, ()), (HF, "auto")]
)
def test_the_decoders_leaves_are_left_over(source, transforms):
    problem = problems_of(source, ENCODER, transforms)[-1]
    assert problem.kind == "leftover" and "decoder" in problem.message and "no decoder" in problem.message
    assert "strict=False" in str(problem.fix) and "projection" not in str(problem)
    if transforms or source is not HF:
        assert len(problems_of(source, ENCODER, transforms)) == 1
        plan = ot.plan_restore(source, ENCODER, transforms, **problem.fix.arguments)
        assert not plan.filled and len(plan.entries) == len(ENCODER)


def test_a_target_with_a_decoder_keeps_its_own_explanation():
    tied = {name: leaf for name, leaf in WHOLE.items() if "logits_dense" not in name}
    (problem,) = problems_of(checkpoint(WHOLE), tied)
    assert "output projection" in str(problem.fix)


def test_other_leftovers_are_told_apart():
    found = problems_of(checkpoint({**WHOLE, "target/more": np.zeros(2)}), ENCODER)
    assert [problem.leaf for problem in found] == [None, "target/more"]


@pytest.mark.slow
def test_a_decoder_of_another_name_is_no_encoder_only_target():
    target = {name.replace("decoder/", "dec/"): leaf for name, leaf in WHOLE.items()}
    assert not any("no decoder" in problem.message for problem in problems_of(BUNDLE, target))
