"""Hugging Face's T5 files get T5X's names and come back."""

import json

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x import rules
from orbax_t5x.testing.transform_suite import as_numpy, assert_same, run
from tests.conftest import GOLDENS


def hugging_face_table():
    """mappings.md section 5, line by line: T5X name -> (Hugging Face name, transposed)."""
    table = {
        "token_embedder/embedding": ("shared.weight", False),
        "encoder/encoder_norm/scale": ("encoder.final_layer_norm.weight", False),
        "decoder/decoder_norm/scale": ("decoder.final_layer_norm.weight", False),
    }
    bias = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    for tower, depth in (("encoder", 2), ("decoder", 3)):
        table[f"{tower}/relpos_bias/rel_embedding"] = (f"{tower}.{bias}", True)
        for i in range(depth):
            ours, theirs = f"{tower}/layers_{i}", f"{tower}.block.{i}.layer"
            attention = "attention" if tower == "encoder" else "self_attention"
            for a, b in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o")):
                table[f"{ours}/{attention}/{a}/kernel"] = (f"{theirs}.0.SelfAttention.{b}.weight", True)
                if tower == "decoder":
                    name = f"{ours}/encoder_decoder_attention/{a}/kernel"
                    table[name] = (f"{theirs}.1.EncDecAttention.{b}.weight", True)
            last = 1 if tower == "encoder" else 2
            for name in ("wi_0", "wi_1", "wo"):
                table[f"{ours}/mlp/{name}/kernel"] = (f"{theirs}.{last}.DenseReluDense.{name}.weight", True)
            table[f"{ours}/pre_{attention}_layer_norm/scale"] = (f"{theirs}.0.layer_norm.weight", False)
            table[f"{ours}/pre_mlp_layer_norm/scale"] = (f"{theirs}.{last}.layer_norm.weight", False)
            if tower == "decoder":
                table[f"{ours}/pre_cross_attention_layer_norm/scale"] = (f"{theirs}.1.layer_norm.weight", False)
    return table


def t5x_names(values):
    return {
        name: values[theirs].T if transposed else values[theirs]
        for name, (theirs, transposed) in hugging_face_table().items()
    }


@pytest.mark.parametrize("prefix", ["", "target/", "params/", "params/params/"])
def test_hugging_face_files_get_the_names_of_the_table(hf, expected_hf, prefix):
    expected = {prefix + name: value for name, value in t5x_names(expected_hf).items()}
    momenta = {f"state/param_states/0/mu/{name.removeprefix(prefix)}": 0 for name in expected}
    result, diagnostics = run(rules.hf_t5_to_t5x(), hf, {**momenta, **expected})
    assert diagnostics.problems == [] and diagnostics.warnings == []
    assert_same(result, expected)


def test_hugging_face_without_a_target_and_back(hf, expected_hf):
    result, diagnostics = run(rules.hf_t5_to_t5x(), hf)
    assert_same(result, {"target/" + name: value for name, value in t5x_names(expected_hf).items()})
    state = {**result, "state/step": np.int32(3), "state/param_states/0/mu/token_embedder/embedding": np.zeros(2)}
    back, diagnostics = run(rules.t5x_to_hf_t5(), state)
    assert diagnostics.problems == []
    assert_same(back, {name: as_numpy(value) for name, value in hf.items()})


HEAD = "target/decoder/logits_dense/kernel"


@pytest.mark.slow
def test_a_tied_head_is_the_transposed_embedding_if_outputs_are_not_scaled(hf, expected_hf):
    assert (
        json.loads((GOLDENS / "safetensors" / "t5_1_1" / "config.json").read_text())["scale_decoder_outputs"] is False
    )
    target = {**dict.fromkeys("target/" + name for name in hugging_face_table()), HEAD: 0}
    for pack, warnings in ((rules.hf_t5_to_t5x(scale_decoder_outputs=False), 0), (rules.hf_t5_to_t5x(), 1)):
        result, diagnostics = run(pack, hf, target)
        assert diagnostics.problems == [] and len(diagnostics.warnings) == warnings
        np.testing.assert_array_equal(result[HEAD], expected_hf["shared.weight"].T)
    (problem,) = run(rules.hf_t5_to_t5x(scale_decoder_outputs=True), hf, target)[1].problems
    assert (problem.kind, problem.leaf) == ("missing", HEAD) and "scales the decoder's output" in problem.message
    # T5.1.0 (`wi`) scales; nothing else says so.
    old = {n.replace("wi_0", "wi"): v for n, v in hf.items() if "wi_1" not in n}
    (problem,) = run(rules.hf_t5_to_t5x(), old, target)[1].problems
    assert problem.leaf == HEAD and "logits_via_embedding" in str(problem.fix)
    assert not run(rules.hf_t5_to_t5x(), old, {name: 0 for name in target if name != HEAD})[1].problems


def test_a_head_of_its_own_is_used(hf):
    head = np.random.default_rng(0).standard_normal((128, 32)).astype(np.float32)
    result, _ = run(rules.hf_t5_to_t5x(), {**hf, "lm_head.weight": head}, {HEAD: 0})
    np.testing.assert_array_equal(result[HEAD], head.T)
    back, _ = run(rules.t5x_to_hf_t5(), result)
    np.testing.assert_array_equal(back["lm_head.weight"], head)


def test_repeated_and_renamed_embeddings(hf):
    copies = {f"{tower}.embed_tokens.weight": hf["shared.weight"] for tower in ("encoder", "decoder")}
    result, diagnostics = run(rules.hf_t5_to_t5x(), {**hf, **copies})
    assert diagnostics.problems == []
    assert_same(result, run(rules.hf_t5_to_t5x(), hf)[0])
    only_copy = {name: value for name, value in {**hf, **copies}.items() if name != "shared.weight"}
    assert_same(run(rules.hf_t5_to_t5x(), only_copy)[0], result)


def test_the_way_back_gives_a_classifiers_t5_its_prefix_again(goldens, tmp_path):
    """Transformers calls a T5ForTokenClassification corrupted whose T5 is not below `transformer.`."""
    model = goldens / "hf_models" / "t5_token"
    ot.convert(model, tmp_path / "ours", rules.hf_t5_to_t5x(), strict=False)
    ot.convert(tmp_path / "ours", tmp_path / "back", rules.t5x_to_hf_t5(), format="safetensors")
    with ot.open_checkpoint(model) as theirs, ot.open_checkpoint(tmp_path / "back") as back:
        copies = {"transformer.encoder.embed_tokens.weight", "transformer.decoder.embed_tokens.weight"}
        assert back.leaves.keys() - copies == theirs.leaves.keys() - copies
        for name, value in back.leaves.items():
            np.testing.assert_array_equal(value.get(), theirs.leaves[name].get(), err_msg=name)


def test_a_tied_model_fills_a_projection_as_the_targets_config_says(hf):
    """T5X scales a tied model's logits by E ** -0.5; Transformers does for tied models only."""
    ours, _ = run(rules.hf_t5_to_t5x(), hf)
    target = {**hf, "lm_head.weight": np.zeros((128, 32), np.float32)}
    (problem,) = run(rules.t5x_to_hf_t5(), ours, target)[1].problems
    assert problem.leaf == "lm_head.weight" and len(problem.fix.ways) == 2
    for tied, scale in ((True, 1), (False, 32**-0.5)):
        result, diagnostics = run(rules.t5x_to_hf_t5(tie_word_embeddings=tied), ours, target)
        assert diagnostics.problems == []
        np.testing.assert_allclose(result["lm_head.weight"], as_numpy(hf["shared.weight"]) * scale, rtol=1e-6)
