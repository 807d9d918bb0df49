"""The rule table from Mesh TensorFlow's names to T5X's."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from orbax_t5x.lazy import as_view
from orbax_t5x.mesh_tf.rules import t5_importer
from tests.support.mesh_tf_names import Unreadable, problems, translate, unreadable

BUNDLES = ["lm_transformer", "t5_1_0_bf16", "t5_1_1_bf16_snappy", "t5_1_1_f32", "t5_1_1_perlayer_rel"]


def bundle(goldens, name):
    meta = json.loads((goldens / "tf_bundle" / name / "expected_meta.json").read_text())
    return {key: as_view(Unreadable(key, leaf["shape"], leaf["dtype"])) for key, leaf in meta["tensors"].items()}


def imported(goldens, name):
    """What T5X's importer made of a bundle: shape and dtype by name."""
    leaves = json.loads((goldens / "importer" / f"{name}.json").read_text())["leaves"]
    return {key: (tuple(leaf["shape"]), leaf["dtype"]) for key, leaf in leaves.items()}


def like(shapes):
    return {name: np.empty(shape, getattr(ml_dtypes, dtype, dtype)) for name, (shape, dtype) in shapes.items()}


@pytest.mark.parametrize("name", BUNDLES)
@pytest.mark.parametrize("with_target", [False, True])
def test_names_shapes_and_dtypes_are_t5xs(goldens, name, with_target):
    expected = imported(goldens, name)
    source = bundle(goldens, name)
    before = dict(source)
    result = translate(source, like(expected) if with_target else None)
    assert {key: (tuple(value.shape), value.dtype.name) for key, value in result.items()} == expected
    assert source == before


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("global_step", "state/step"),
        ("shared/embedding", "target/token_embedder/embedding"),
        ("shared/embedding_slot_vr", "state/param_states/token_embedder/embedding/v_row"),
        ("encoder/embedding", "target/encoder/token_embedder/embedding"),
        ("decoder/embedding_slot_vc", "state/param_states/decoder/token_embedder/embedding/v_col"),
        ("transformer/embedding", "target/decoder/token_embedder/embedding"),
        ("encoder/block_010/layer_000/SelfAttention/q", "target/encoder/layers_10/attention/query/kernel"),
        ("decoder/block_123/layer_000/SelfAttention/o", "target/decoder/layers_123/self_attention/out/kernel"),
        (
            "decoder/block_000/layer_001/EncDecAttention/v_slot_v",
            "state/param_states/decoder/layers_0/encoder_decoder_attention/value/kernel/v",
        ),
        ("transformer/block_002/layer_000/SelfAttention/k", "target/decoder/layers_2/self_attention/key/kernel"),
        ("encoder/block_000/layer_001/DenseReluDense/wi/kernel", "target/encoder/layers_0/mlp/wi/kernel"),
        ("decoder/block_000/layer_002/DenseReluDense/wi_1/kernel", "target/decoder/layers_0/mlp/wi_1/kernel"),
        ("transformer/block_000/layer_001/DenseReluDense/wo/kernel", "target/decoder/layers_0/mlp/wo/kernel"),
        ("encoder/block_000/layer_000/rms_norm/scale", "target/encoder/layers_0/pre_attention_layer_norm/scale"),
        ("encoder/block_000/layer_001/layer_norm/scale", "target/encoder/layers_0/pre_mlp_layer_norm/scale"),
        ("decoder/block_000/layer_000/rms_norm/scale", "target/decoder/layers_0/pre_self_attention_layer_norm/scale"),
        ("decoder/block_000/layer_001/rms_norm/scale", "target/decoder/layers_0/pre_cross_attention_layer_norm/scale"),
        ("decoder/block_000/layer_002/rms_norm/scale", "target/decoder/layers_0/pre_mlp_layer_norm/scale"),
        (
            "transformer/block_000/layer_000/rms_norm/scale",
            "target/decoder/layers_0/pre_self_attention_layer_norm/scale",
        ),
        ("transformer/block_000/layer_001/rms_norm/scale", "target/decoder/layers_0/pre_mlp_layer_norm/scale"),
        ("encoder/final_layer_norm/scale", "target/encoder/encoder_norm/scale"),
        ("decoder/rms_norm/scale_slot_v", "state/param_states/decoder/decoder_norm/scale/v"),
        ("transformer/rms_norm/scale", "target/decoder/decoder_norm/scale"),
        ("decoder/logits/kernel", "target/decoder/logits_dense/kernel"),
        ("transformer/logits/kernel_slot_vr", "state/param_states/decoder/logits_dense/kernel/v_row"),
    ],
)
def test_each_rule(source, expected):
    assert list(t5_importer.apply({source: np.float32(1)})) == [expected]


@pytest.mark.parametrize(
    "name",
    [
        "encoder/block_000/layer_000/EncDecAttention/q",  # encoders have none
        "encoder/block_000/layer_002/layer_norm/scale",
        "transformer/block_000/layer_002/layer_norm/scale",
        "encoder/logits/kernel",
        "encoder/block_000/layer_001/DenseReluDense/wo_0/kernel",
        "shared/embedding_slot_x",
        "shared/embedding_slot_vr ",
        "global_step2",
        "my/global_step",
        "decoder/block_000/layer_002/SelfAttention/relative_attention_bias",  # T5X knows that of layer_000
        "encoder/block_003/layer_001/SelfAttention/relative_attention_bias_slot_v",
        "encoder/block_000/layer_0/SelfAttention/relative_attention_bias",
    ],
)
def test_a_name_that_no_rule_knows_is_named(name):
    with pytest.raises(ValueError, match=name.strip()):
        t5_importer.apply({name: np.ones(3)})
    (problem,) = problems(unreadable([name]))
    assert (problem.kind, problem.leaf) == ("translate", name)
