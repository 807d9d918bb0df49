"""Leaves without an explanation: the closest names, and one problem for all that is left over."""

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.trees.flat import flatten, unflatten
from tests.support import t5_layouts as t5
from tests.support.failed_plans import problems_of
from tests.support.memory_checkpoint import checkpoint

_ARRAY = np.ones(2, np.float32)


def test_a_missing_leaf_lists_the_closest_names():
    target = {"encoder/norm/scale_of_all": _ARRAY}
    (problem,) = problems_of(checkpoint({"encoder/norm/scale": np.ones(3, np.float32)}), target, strict=False)
    assert problem.message == "the checkpoint has no such leaf; closest: encoder/norm/scale"
    assert not any(way.transforms or way.arguments for way in problem.fix.ways)
    assert "fallback_for=['encoder/norm/scale_of_all']" in str(problem.fix)


def test_closest_names_are_looked_up_for_the_first_leaves_only():
    source = checkpoint({f"a{i}/x{i}/kernel": _ARRAY for i in range(30)})
    found = problems_of(source, {f"a{i}/y{i}/scale": np.ones(3, np.float32) for i in range(30)}, strict=False)
    assert ["closest" in problem.message for problem in found] == [True] * 20 + [False] * 10


def test_leftovers_are_one_problem_with_an_argument_as_its_fix():
    source = checkpoint({"a": _ARRAY, **{f"b{i}": _ARRAY for i in range(9)}})
    (problem,) = problems_of(source, {"a": _ARRAY})
    assert problem.message.startswith("9 leaves of the checkpoint have no place in the target: b0, b1,")
    assert dict(problem.fix.arguments) == {"strict": False}
    ot.plan_restore(source, {"a": _ARRAY}, **problem.fix.arguments)
    (problem,) = problems_of(checkpoint({"a": _ARRAY, "b": _ARRAY}), {"a": _ARRAY})
    assert (problem.leaf, problem.message) == ("b", "the target has no place for this leaf of the checkpoint")


PLAIN = t5.minimal(towers=("encoder",))
TARGET = t5.below("target/", t5.scanned(PLAIN))
OTHERS = {
    name: np.ones(shape, np.float32)
    for name, shape in {
        "text_encoders.clip_l.transformer.text_model.encoder.layers.0.layer_norm1.weight": (3,),
        "text_encoders.clip_l.transformer.text_model.final_layer_norm.weight": (3,),
        "text_encoders.clip_g.transformer.text_model.embeddings.token_embedding.weight": (4, 3),
        "conditioner.embedders.0.model.ln_final.weight": (3,),
        "model.diffusion_model.input_blocks.0.0.weight": (2, 2),
        "first_stage_model.encoder.down.0.block.0.conv1.weight": (2, 2),
    }.items()
}
ZEROS = unflatten({name: np.zeros_like(value) for name, value in TARGET.items()})


def failed(source, target, transforms):
    with pytest.raises(RestorePlanError) as caught:
        ot.plan_restore(checkpoint(source), target, transforms)
    return caught.value.problems


def assert_equal(found):
    found = flatten(found)
    assert found.keys() == TARGET.keys()
    for name, value in TARGET.items():
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize("prefix", ["conditioner.embedders.1.transformer.", "text_encoders.t5xxl.transformer."])
def test_the_text_encoder_of_a_bundle_is_found(prefix):
    source = {**t5.below(prefix, t5.hugging_face(PLAIN)), **OTHERS}
    (problem,) = failed(source, ZEROS, "auto")
    assert problem.kind == "leftover" and "6 leaves" in problem.message
    assert_equal(ot.restore(checkpoint(source), ZEROS, "auto", **problem.fix.arguments))


def test_heads_below_no_prefix_are_named_and_train_states_have_no_other_models():
    head = {"classification_head.dense.weight": np.ones((2, 2)), "classification_head.out_proj.bias": np.ones(2)}
    (problem,) = failed({**t5.below("transformer.", t5.hugging_face(PLAIN)), **head}, ZEROS, "auto")
    assert all(name in problem.message for name in head)
    (problem,) = failed({**TARGET, "extra/rng": np.ones(2, np.uint32)}, ZEROS, ())
    assert problem.kind == "leftover" and "beside it" not in problem.message
