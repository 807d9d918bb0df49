"""Bundles of models with experts, in blocks of one or several layers.

Names and shapes are those of mesh_tensorflow 0.1.21 (`MoE1D`, `make_layer_stack`), read in its source. Values by NumPy.
"""

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.mesh_tf.blocks import one_layer_blocks
from orbax_t5x.testing.transform_suite import run
from orbax_t5x.trees.flat import flatten, unflatten
from tests.support.memory_checkpoint import checkpoint
from tests.support.mesh_tf_names import problems, translate, unreadable

E, F, J, X = 12, 14, 10, 3
NORMS = {
    "encoder": ("pre_attention_layer_norm", "pre_mlp_layer_norm"),
    "decoder": ("pre_self_attention_layer_norm", "pre_cross_attention_layer_norm", "pre_mlp_layer_norm"),
}
ATTENTION = {
    ("encoder", 0): ("SelfAttention", "attention"),
    ("decoder", 0): ("SelfAttention", "self_attention"),
    ("decoder", 1): ("EncDecAttention", "encoder_decoder_attention"),
}


def bundle(blocks, layers, gating="switch", gated=False):
    """A bundle whose blocks have so many layers, the last of each with experts; and T5X's leaves of the same values."""
    rng = np.random.default_rng(0)
    stored, expected = {}, {}

    def put(theirs, ours, *shape):
        stored[theirs] = expected[f"target/{ours}"] = rng.normal(size=shape).astype(np.float32)

    for tower, norms in NORMS.items():
        for block in range(blocks):
            for number in range(layers * len(norms)):
                at, sublayer = divmod(number, len(norms))
                theirs = f"{tower}/block_{block:03}/layer_{number:03}"
                ours = f"{tower}/layers_{block * layers + at}"
                put(f"{theirs}/rms_norm/scale", f"{ours}/{norms[sublayer]}/scale", E)
                if (tower, sublayer) in ATTENTION:
                    module, attention = ATTENTION[tower, sublayer]
                    for one, other in zip("qkvo", ("query", "key", "value", "out"), strict=True):
                        shape = (J, E) if one == "o" else (E, J)
                        put(f"{theirs}/{module}/{one}", f"{ours}/{attention}/{other}/kernel", *shape)
                    continue
                has_experts = at == layers - 1
                module, mlp, outer = ("MoE1D", "mlp/expert", (X,)) if has_experts else ("DenseReluDense", "mlp", ())
                for kernel in (*(("wi_0", "wi_1") if gated else ("wi",)), "wo"):
                    shape = (F, E) if kernel == "wo" else (E, F)
                    put(f"{theirs}/{module}/{kernel}/kernel", f"{ours}/{mlp}/{kernel}/kernel", *outer, *shape)
                if has_experts:
                    put(f"{theirs}/MoE1D/{gating}_gating/kernel", f"{ours}/mlp/router/router_weights/w/kernel", E, X)
        bias = f"{tower}/block_000/layer_000/SelfAttention/relative_attention_bias"
        put(bias, f"{tower}/relpos_bias/rel_embedding", 2, 32)
    return stored, expected


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_experts_and_routers_of_every_block(layers):
    for gating, gated in (("switch", False), ("top_2", True)):
        stored, expected = bundle(2, layers, gating, gated)
        zeros = unflatten({name: np.zeros_like(value) for name, value in expected.items()})
        for target, rules in ((None, ot.transforms.Translate()), (zeros, ot.transforms.Translate()), (zeros, "auto")):
            found = flatten(ot.restore(checkpoint(stored), target, rules))
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_the_slots_of_experts_keep_their_factors():
    """Mesh TensorFlow averages over the largest dimension in vr, T5X over that of the experts' MLP."""
    layer = "encoder/block_000/layer_001/MoE1D"
    slots = {"wi/kernel_slot_vr": (X, E), "wi/kernel_slot_vc": (X, F), "wo/kernel_slot_vr": (X, E)}
    slots |= {"wo/kernel_slot_vc": (X, F), "switch_gating/kernel_slot_v": (E, X)}
    found = translate(unreadable({f"{layer}/{name}": shape for name, shape in slots.items()}))
    mlp = "state/param_states/encoder/layers_0/mlp"
    shapes = {name: value.shape for name, value in found.items() if value.shape != (1,)}
    assert shapes == {
        f"{mlp}/expert/wi/kernel/v_row": (X, E),
        f"{mlp}/expert/wi/kernel/v_col": (X, F),
        f"{mlp}/expert/wo/kernel/v_row": (X, E),
        f"{mlp}/expert/wo/kernel/v_col": (X, F),
        f"{mlp}/router/router_weights/w/kernel/v": (E, X),
    }


def test_an_experts_kernel_of_another_shape_is_a_problem():
    stored, _ = bundle(2, 1)
    for name, shape in (("wo", (X, E, F)), ("wi", (E, F)), ("wi", (X, E + 1, F))):
        leaf = f"decoder/block_001/layer_002/MoE1D/{name}/kernel"
        found = run(ot.rules.mesh_tf_to_t5x(), {**stored, leaf: np.zeros(shape, np.float32)})[1].problems
        assert {(one.kind, one.leaf) for one in found} == {("shape", leaf)}


def test_blocks_of_other_modules_stay_and_are_named():
    stored, _ = bundle(2, 1)
    assert one_layer_blocks(stored) == {}
    odd = {"encoder/block_000/layer_001/SelfAttention/q": 0, "encoder/block_000/layer_003/DenseReluDense/wo/kernel": 0}
    assert one_layer_blocks(odd) == {}
    for name in ("MoE2D/wi/kernel", "MoE1D/q_wo/kernel", "MoE1D/expert_selection_gating/kernel", "MoE1D/wi/bias"):
        (problem,) = problems(unreadable([f"encoder/block_000/layer_001/{name}"]))
        assert problem.kind == "translate" and name in problem.message
