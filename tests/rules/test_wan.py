"""The names of Wan's text encoder below prefixes and in float8; `test_relatives` has its values in every layout."""

import ml_dtypes
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x import rules
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.testing.transform_suite import assert_same
from orbax_t5x.trees.flat import flatten, unflatten
from tests.support import relative_trees as trees
from tests.support import t5_layouts as t5
from tests.support.memory_checkpoint import checkpoint

PACK = rules.wan_t5_to_hf_t5()
UMT5, SHARED = t5.minimal(bias="layer", towers=("encoder",)), t5.minimal(towers=("encoder",))


def wan_of(plain):
    return trees.wan(plain, trees.by_name("umT5's encoder"))


def restored(source, target, transforms="auto"):
    zeros = unflatten({name: np.zeros_like(value) for name, value in target.items()})
    return flatten(ot.restore(checkpoint(source), zeros, transforms))


@pytest.mark.parametrize("plain", [UMT5, SHARED], ids=["bias per block", "shared bias"])
def test_auto_leads_from_and_to_names_below_any_prefix(plain):
    wan, hugging_face = wan_of(plain), t5.hugging_face(plain)
    assert len(wan) == len(plain)
    below = "text_encoder.", "cond_stage_model.t5."
    others = [t5.below("target/", plain), hugging_face, t5.below("a.b.", hugging_face)]
    for prefix, other in zip(("", *below), others, strict=True):
        there = t5.below(prefix, wan)
        assert_same(restored(there, other), other)
        assert_same(restored(other, there), there)


@pytest.mark.parametrize("plain", [UMT5, SHARED], ids=["bias per block", "shared bias"])
def test_the_pack_and_its_inverse_need_no_target(plain):
    wan, hugging_face = wan_of(plain), t5.hugging_face(plain)
    assert_same(flatten(ot.restore(checkpoint(wan), None, PACK)), hugging_face)
    assert_same(flatten(ot.restore(checkpoint(hugging_face), None, PACK.inverse())), wan)
    t5x = t5.below("target/", plain)
    assert_same(flatten(ot.restore(checkpoint(wan), None, [PACK, rules.hf_t5_to_t5x()])), t5x)
    assert_same(flatten(ot.restore(checkpoint(t5x), None, [rules.t5x_to_hf_t5(), PACK.inverse()])), wan)


def test_scaled_weights_and_float8_ones_are_read():
    wan = wan_of(UMT5)
    name = "blocks.1.ffn.fc2."
    weight, scale = (wan[f"{name}weight"] / 100).astype(ml_dtypes.float8_e4m3fn), np.float32(0.3)
    target = t5.below("target/", dict(UMT5))
    for added, value in (({}, weight.astype(np.float32)), ({f"{name}scale_weight": scale}, weight * scale)):
        target["target/encoder/layers_1/mlp/wo/kernel"] = value.T
        assert_same(restored({**wan, f"{name}weight": weight, **added}, target), target)


def test_leaves_that_either_side_does_not_have_are_problems():
    for source, pack, name in (
        ({**wan_of(UMT5), "blocks.0.ffn.fc3.weight": np.ones(2)}, PACK, "blocks.0.ffn.fc3.weight"),
        ({**wan_of(UMT5), "norm.weight": np.ones(7)}, PACK, "norm.weight"),
        (t5.hugging_face(t5.minimal()), PACK.inverse(), "decoder.final_layer_norm.weight"),
        (t5.hugging_face(t5.minimal(gated=False, towers=("encoder",))), PACK.inverse(), "DenseReluDense.wi.weight"),
    ):
        with pytest.raises(RestorePlanError) as caught:
            ot.plan_restore(checkpoint(source), None, pack)
        assert any(str(one.leaf).endswith(name) for one in caught.value.problems)
