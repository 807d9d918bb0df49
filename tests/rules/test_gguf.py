"""llama.cpp's names of T5, against its own table of names and a golden of its own writer."""

import re

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import RestorePlanError

# Out of `gguf.get_tensor_name_map(MODEL_ARCH.T5, …)` of the package gguf 0.19.0.
NAMES = {
    "shared": "token_embd",
    "lm_head": "output",
    "encoder.final_layer_norm": "enc.output_norm",
    "decoder.final_layer_norm": "dec.output_norm",
    "encoder.block.7.layer.0.layer_norm": "enc.blk.7.attn_norm",
    "encoder.block.7.layer.0.SelfAttention.q": "enc.blk.7.attn_q",
    "encoder.block.7.layer.0.SelfAttention.k": "enc.blk.7.attn_k",
    "encoder.block.7.layer.0.SelfAttention.v": "enc.blk.7.attn_v",
    "encoder.block.7.layer.0.SelfAttention.o": "enc.blk.7.attn_o",
    "encoder.block.7.layer.0.SelfAttention.relative_attention_bias": "enc.blk.7.attn_rel_b",
    "encoder.block.7.layer.1.layer_norm": "enc.blk.7.ffn_norm",
    "encoder.block.7.layer.1.DenseReluDense.wi_0": "enc.blk.7.ffn_gate",
    "encoder.block.7.layer.1.DenseReluDense.wi_1": "enc.blk.7.ffn_up",
    "encoder.block.7.layer.1.DenseReluDense.wo": "enc.blk.7.ffn_down",
    "decoder.block.12.layer.0.layer_norm": "dec.blk.12.attn_norm",
    "decoder.block.12.layer.0.SelfAttention.o": "dec.blk.12.attn_o",
    "decoder.block.12.layer.0.SelfAttention.relative_attention_bias": "dec.blk.12.attn_rel_b",
    "decoder.block.12.layer.1.layer_norm": "dec.blk.12.cross_attn_norm",
    "decoder.block.12.layer.1.EncDecAttention.q": "dec.blk.12.cross_attn_q",
    "decoder.block.12.layer.1.EncDecAttention.o": "dec.blk.12.cross_attn_o",
    "decoder.block.12.layer.2.layer_norm": "dec.blk.12.ffn_norm",
    "decoder.block.12.layer.2.DenseReluDense.wi_1": "dec.blk.12.ffn_up",
    "decoder.block.12.layer.2.DenseReluDense.wo": "dec.blk.12.ffn_down",
}


@pytest.mark.parametrize("gated", [True, False])
def test_names_there_and_back(gated):
    names = {f"{ours}.weight": f"{theirs}.weight" for theirs, ours in NAMES.items() if gated or "wi_0" not in theirs}
    if not gated:
        names = {ours: theirs.replace("wi_1", "wi") for ours, theirs in names.items()}
    state = {ours: number for number, ours in enumerate(names)}
    pack = ot.rules.gguf_t5_to_hf_t5()
    mapped = pack(state, {})
    assert mapped == {theirs: state[ours] for ours, theirs in names.items()}
    assert pack.inverse()(mapped, {}) == state


def expected_leaf(name, values):
    """T5X's name and value of one of llama.cpp's, by hand."""
    norms = {"encoder": ("attention", "mlp"), "decoder": ("self_attention", "cross_attention", "mlp")}
    value = values[name]
    if name in ("token_embd.weight", "output.weight"):
        return ("token_embedder/embedding", value) if "token" in name else ("decoder/logits_dense/kernel", value.T)
    tower = {"enc": "encoder", "dec": "decoder"}[name[:3]]
    if "output_norm" in name:
        return f"{tower}/{tower}_norm/scale", value
    part = re.fullmatch(r"...\.blk\.0\.(.*)\.weight", name)[1]
    if part == "attn_rel_b":
        return f"{tower}/relpos_bias/rel_embedding", value.T
    module, kind = part.rsplit("_", 1)
    order = ("attn", "ffn") if tower == "encoder" else ("attn", "cross_attn", "ffn")
    if kind == "norm":
        return f"{tower}/layers_0/pre_{norms[tower][order.index(module)]}_layer_norm/scale", value
    if module == "ffn":
        return f"{tower}/layers_0/mlp/{dict(gate='wi_0', up='wi_1', down='wo')[kind]}/kernel", value.T
    attention = {"cross_attn": "encoder_decoder_attention"}.get(module) or norms[tower][0]
    return f"{tower}/layers_0/{attention}/{dict(q='query', k='key', v='value', o='out')[kind]}/kernel", value.T


def test_a_model_of_llama_cpp_becomes_t5xs(goldens):
    path = goldens / "gguf" / "t5_mixed.gguf"
    with np.load(goldens / "gguf" / "t5_mixed_expected.npz") as stored:
        values = {name: stored[name] for name in stored.files if name.endswith("weight")}
    expected = {f"target/{name}": value for name, value in (expected_leaf(name, values) for name in values)}
    target = {name: np.zeros_like(value) for name, value in expected.items()}
    with ot.open_checkpoint(path) as checkpoint:
        model = {name: view for name, view in checkpoint.leaves.items() if name.endswith("weight")}
        pack = ot.rules.infer(model, target)
    restored = ot.restore(path, target, (ot.transforms.Drop((r"test\..*",)), pack))
    assert len(restored) == len(values) == 29
    for name, value in expected.items():
        np.testing.assert_array_equal(restored[name], value, err_msg=name)


def test_a_tensor_of_another_model_is_a_problem():
    with pytest.raises(RestorePlanError, match="no tensor of this name"):
        ot.rules.gguf_t5_to_hf_t5()({"enc.blk.0.attn_q.weight": 1, "enc.blk.0.attn_q.bias": 2}, {})
