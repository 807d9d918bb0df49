"""Trees that no pack translates, whatever it leaves out: several models at once, and adapters without a base model."""

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x import rules
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.trees.flat import flatten, unflatten
from tests.support import relative_trees as trees
from tests.support import t5_layouts as t5
from tests.support.memory_checkpoint import checkpoint

PLAIN = t5.minimal(towers=("encoder",))
TORCH = t5.hugging_face(PLAIN)
TARGETS = [t5.below("target/", PLAIN), t5.below("params/", t5.scanned(PLAIN))]
QUERY = "base_model.model.encoder.block.0.layer.0.SelfAttention.q"
ADAPTERS = {f"{QUERY}.lora_{one}.weight": np.ones((2, 2), np.float32) for one in "AB"}


def zeros(tree):
    return unflatten({name: np.zeros_like(value) for name, value in tree.items()})


def only_problem(source, target, transforms, **options):
    with pytest.raises(RestorePlanError) as caught:
        ot.plan_restore(checkpoint(source), None if target is None else zeros(target), transforms, **options)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize("target", TARGETS, ids=["minimal", "scanned"])
def test_of_several_models_one_is_to_be_chosen(target):
    second = {name: value + 1 for name, value in TORCH.items()}
    both = {**t5.below("text_encoder.", TORCH), **t5.below("text_encoder_2.", second)}
    problem = only_problem(both, target, "auto")
    assert "2 models, below 'text_encoder.', 'text_encoder_2.'" in problem.message and len(problem.fix.ways) == 2
    for plus, way in enumerate(problem.fix.ways):
        found = flatten(ot.restore(checkpoint(both), zeros(target), **way.arguments))
        assert found.keys() == target.keys()
        for name, value in target.items():
            np.testing.assert_array_equal(found[name], value + plus)


def test_the_packs_say_the_same_by_hand():
    both = {**t5.below("a.", TORCH), **t5.below("b.", TORCH)}
    wan = {
        **t5.below("a.", trees.wan(PLAIN, trees.by_name("encoder only"))),
        **t5.below("b.", trees.wan(PLAIN, trees.by_name("encoder only"))),
    }
    for source, pack in ((both, rules.hf_t5_to_t5x()), (wan, rules.wan_t5_to_hf_t5())):
        for target in (None, TARGETS[0]):
            for options in ({}, {"strict": False}):
                assert "2 models" in only_problem(source, target, pack, **options).message


@pytest.mark.parametrize("source", [ADAPTERS, {**TORCH, **ADAPTERS}], ids=["alone", "beside a base model"])
def test_adapters_need_their_base_model_and_their_pack(source):
    for target in TARGETS:
        problem = only_problem(source, target, "auto")
        assert "2 leaves are of LoRA adapters" in problem.message and "ot.rules.peft_lora" in str(problem.fix)
    assert only_problem(source, None, rules.hf_t5_to_t5x()).kind == "rule"
