"""The sizes of a T5 are found in a checkpoint, whatever its format and names."""

import dataclasses
import json
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.models import T5Config, config_of
from orbax_t5x.trees.flat import flatten
from tests.support import t5_model
from tests.support.memory_checkpoint import checkpoint
from tests.support.t5x_goldens import golden

# Nothing that a config leaves to its other fields.
UNTIED = T5Config(activation="gelu_new", scale_decoder_outputs=False)
KINDS = Path(__file__).parents[1] / "goldens" / "hf_models"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("tf_bundle/t5_1_1_f32", UNTIED),
        ("tf_bundle/t5_1_0_bf16", T5Config(gated=False, tied=True, activation="relu", scale_decoder_outputs=True)),
        ("flax_msgpack/t5_1_1", None),
    ],
)
def test_checkpoints_of_each_kind(goldens, path, expected):
    assert config_of(golden("d1_adafactor").step) == UNTIED
    found = config_of(goldens / path)
    assert found.encoder_layers and found.vocab
    if expected is not None:
        assert found == expected


@pytest.mark.parametrize("prefix", ["target/", "params/", ""])
@pytest.mark.parametrize(
    "layout",
    [{}, {"split_heads": True, "per_layer_bias": True}, {"scan_layers": True}],
    ids=["minimal", "unscanned", "scanned"],
)
def test_layouts_of_t5x(prefix, layout):
    config = T5Config(encoder_layers=3, decoder_layers=2, **layout)
    params = flatten(jax.eval_shape(lambda: t5_model.init(config)[1]["params"]))
    leaves = {prefix + name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in params.items()}
    expected = dataclasses.replace(UNTIED, encoder_layers=3)
    if layout:
        expected = dataclasses.replace(expected, split_heads=True, per_layer_bias=True)
    assert config_of(checkpoint(leaves)) == expected


def test_what_is_no_t5_is_refused():
    with pytest.raises(UnsupportedCheckpointError, match="no T5 is found by the names"):
        config_of(checkpoint({"dense/kernel": np.zeros((2, 2))}))


def test_importing_the_package_imports_no_model():
    code = "import sys, orbax_t5x; sys.exit(any(name.startswith(('orbax_t5x.models', 'flax')) for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def copy_with(tmp_path, kind, change):
    """A model of Transformers with another config.json; a key that becomes None goes."""
    copy = tmp_path / kind
    shutil.copytree(KINDS / kind, copy)
    config = {**json.loads((copy / "config.json").read_text()), **change}
    (copy / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return copy


@pytest.mark.parametrize(
    ("kind", "change", "wanted"),
    [
        ("t5_1_0", {}, {"tied": True, "scale_decoder_outputs": True, "activation": "relu", "max_distance": 15}),
        ("t5_1_0_bin", {}, {"tied": True, "scale_decoder_outputs": True}),
        ("t5_1_1", {}, {"tied": False, "scale_decoder_outputs": False, "activation": "gelu_new", "buckets": 10}),
        ("t5_1_1_v5", {}, {"tied": True, "scale_decoder_outputs": False}),
        ("t5_1_1_resaved_v5", {}, {"tied": False, "scale_decoder_outputs": False}),
        ("gelu_ungated", {}, {"activation": "gelu", "gated": False}),
        ("gated_silu", {}, {"activation": "silu", "gated": True, "dropout_rate": 0.1}),
        ("umt5", {}, {"per_layer_bias": True, "tied": True, "scale_decoder_outputs": True}),
        ("umt5_unscaled_v5", {}, {"tied": True, "scale_decoder_outputs": False}),
        ("umt5_unscaled_v5", {"scale_decoder_outputs": None}, {"scale_decoder_outputs": True}),
        ("umt5_unscaled_v5", {"transformers_version": "5.23.0"}, {"scale_decoder_outputs": True}),
        ("t5_encoder", {}, {"encoder_only": True, "decoder_layers": 0, "tied": False, "layer_norm_epsilon": 1e-6}),
        # Which of both versions wrote the file decides what the same keys mean.
        ("t5_1_1_v5", {"transformers_version": "4.57.6"}, {"tied": True, "scale_decoder_outputs": True}),
        ("t5_1_1_v5", {"model_type": "mt5", "scale_decoder_outputs": None}, {"scale_decoder_outputs": False}),
        ("t5_1_1_v5", {"scale_decoder_outputs": None}, {"scale_decoder_outputs": True}),
        ("t5_1_1_v5", {"transformers_version": None}, {"scale_decoder_outputs": False}),
        ("t5_encoder", {"pad_token_id": None, "decoder_start_token_id": 5}, {"encoder_only": True}),
        ("t5_1_0", {"model_type": "mt5", "tie_word_embeddings": True}, {"tied": True, "scale_decoder_outputs": True}),
        ("t5_1_0", {"layer_norm_epsilon": 1e-3, "dropout_rate": None}, {"layer_norm_epsilon": 1e-3}),
        ("gelu_ungated", {"dense_act_fn": None, "is_gated_act": None, "transformers_version": None}, {}),
        ("gated_silu", {"feed_forward_proj": "gated-swish", "dense_act_fn": "swish"}, {"activation": "silu"}),
    ],
)
def test_config_json_decides_the_function(tmp_path, kind, change, wanted):
    found = config_of(copy_with(tmp_path, kind, change))
    assert {key: getattr(found, key) for key in wanted} == wanted


@pytest.mark.parametrize(
    ("kind", "change", "match"),
    [
        ("longt5_local", {}, "encoder_attention_type: 'local'"),
        ("switch_tied", {}, "num_experts: 3"),
        ("t5_token", {}, "architectures: \\['T5ForTokenClassification'\\]"),
        ("t5_1_0", {"model_type": "pop2piano"}, "model_type: 'pop2piano'"),
        ("t5_1_0", {"feed_forward_proj": "mish"}, "feed_forward_proj: 'mish'.*relu, gelu"),
        ("t5_1_0", {"feed_forward_proj": "gated-relu", "is_gated_act": True}, "feed_forward_proj: 'gated-relu'.*wi"),
        ("t5_1_0", {"dense_act_fn": "silu"}, "dense_act_fn: 'silu'.*relu"),
        ("t5_1_0", {"d_model": 23}, "d_model: 23.*22"),
        ("t5_1_0", {"num_decoder_layers": 3}, "num_decoder_layers: 3.*2"),
        ("t5_1_0", {"tie_word_embeddings": False}, "tie_word_embeddings: False.*no lm_head"),
        ("t5_1_1", {"tie_word_embeddings": True}, "tie_word_embeddings: True.*lm_head that is not the embedding"),
        ("t5_1_1", {"num_decoder_layers": None}, "without num_decoder_layers.*1 decoder layer"),
        ("t5_encoder", {"architectures": ["T5ForConditionalGeneration"]}, "architectures.*no decoder"),
        ("t5_1_0", {"architectures": ["T5EncoderModel"]}, "architectures.*a decoder"),
        ("t5_1_0", {"model_type": "umt5"}, "model_type: 'umt5'.*bias"),
        ("t5_1_0", {"layer_norm_epsilon": "small"}, "layer_norm_epsilon: 'small'"),
        ("t5_1_0", {"relative_attention_max_distance": 1.5}, "relative_attention_max_distance: 1.5"),
        ("t5_1_0", {"pad_token_id": 3}, "pad_token_id: 3.*id 0"),
        ("t5_1_0", {"decoder_start_token_id": 2}, "decoder_start_token_id: 2.*id 0"),
        ("t5_1_0", {"relative_attention_max_distance": 4}, "relative_attention_max_distance: 4"),
    ],
)
def test_what_the_models_do_not_compute_is_refused_by_its_key(tmp_path, kind, change, match):
    with pytest.raises(ValueError, match=match):
        config_of(copy_with(tmp_path, kind, change))


def test_an_encoder_of_one_layer_may_have_a_bias_in_each(tmp_path):
    copy = copy_with(tmp_path, "umt5", {"num_layers": 1, "num_decoder_layers": 2})
    leaves = safetensors.numpy.load_file(copy / "model.safetensors")
    kept = {name: leaf for name, leaf in leaves.items() if not re.match(r"encoder\.block\.[12]\.", name)}
    kept |= {n.replace(".block.0.", ".block.1."): leaf for n, leaf in kept.items() if n.startswith("decoder.block.0.")}
    safetensors.numpy.save_file(kept, copy / "model.safetensors")
    found = config_of(copy)
    assert (found.per_layer_bias, found.encoder_layers, found.decoder_layers) == (True, 1, 2)


def test_a_config_that_is_no_json_is_no_config(tmp_path):
    copy = copy_with(tmp_path, "t5_1_0", {})
    (copy / "config.json").write_text("{")
    with pytest.raises(UnsupportedCheckpointError, match=r"config\.json decides"):
        config_of(copy)


def test_the_epsilon_of_gguf_counts(goldens, tmp_path):
    data = (goldens / "gguf" / "t5_mixed.gguf").read_bytes()
    key = b"t5.attention.layer_norm_rms_epsilon" + struct.pack("<I", 6)
    for epsilon in (1e-6, 3e-4):
        changed = data.replace(key + struct.pack("<f", 1e-6), key + struct.pack("<f", epsilon))
        (tmp_path / "t5.gguf").write_bytes(changed)
        assert config_of(tmp_path / "t5.gguf").layer_norm_epsilon == epsilon


@pytest.mark.parametrize("change", [0, 1])
def test_without_a_config_equal_numbers_are_tied(tmp_path, change):
    with np.load(KINDS / "t5_1_0" / "expected.npz"), ot.open_checkpoint(KINDS / "t5_1_0") as opened:
        leaves = {name: np.asarray(leaf) for name, leaf in opened.leaves.items()}
    head = leaves["shared.weight"].copy()
    head[-1, -1] += change
    safetensors.numpy.save_file({**leaves, "lm_head.weight": head}, tmp_path / "model.safetensors")
    found = config_of(tmp_path)
    assert (found.tied, found.scales_decoder_outputs) == (not change, not change)


def test_an_activation_without_a_name_is_refused():
    with pytest.raises(ValueError, match="activation='mish'"):
        T5Config(activation="mish")
