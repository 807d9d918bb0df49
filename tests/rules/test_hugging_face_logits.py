"""Hugging Face to T5X and back: the logits that Transformers computed, and files equal byte for byte."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.cli.main import main
from tests.support import t5_model

GOLDENS = Path(__file__).parents[1] / "goldens" / "hf_logits"
KINDS = sorted(path.name for path in GOLDENS.iterdir() if path.is_dir())


def config_of(directory):
    theirs = json.loads((directory / "config.json").read_text())
    return t5_model.T5Config(
        vocab=theirs["vocab_size"],
        embed=theirs["d_model"],
        heads=theirs["num_heads"],
        head_dim=theirs["d_kv"],
        mlp=theirs["d_ff"],
        encoder_layers=theirs["num_layers"],
        decoder_layers=theirs["num_decoder_layers"],
        gated=theirs["is_gated_act"],
        tied=directory.name.startswith("tied"),
    )


def test_all_four_kinds_are_here():
    assert KINDS == ["tied_gated", "tied_relu", "untied_gated", "untied_relu"]
    for kind in KINDS:
        has_head = "lm_head.weight" in safetensors.numpy.load_file(GOLDENS / kind / "model.safetensors")
        assert has_head == kind.startswith("untied")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_from_transformers_to_t5x_and_back(tmp_path, capsys, kind):
    source, item, back = GOLDENS / kind, tmp_path / "t5x", tmp_path / "back"
    assert main(["convert", str(source), str(item), "--rules", "hf_t5_to_t5x"]) == 0
    model, variables = t5_model.init(config_of(source))
    abstract = jax.eval_shape(lambda: variables["params"])
    params = ot.restore(item, {"target": abstract})["target"]
    apply = jax.jit(model.apply)
    with np.load(source / "logits.npz") as golden:
        logits = apply({"params": params}, golden["inputs"], golden["targets"])
        np.testing.assert_allclose(logits, golden["logits"], rtol=2e-5, atol=2e-5)
        other = jax.tree.map(lambda array: array * 1.01, params)
        moved = apply({"params": other}, golden["inputs"], golden["targets"])
        assert np.abs(moved - golden["logits"]).max() > 1e-3, "the tolerance tells models apart"
    arguments = ["--rules", "t5x_to_hf_t5", "--format", "safetensors", "--config", str(source / "config.json")]
    assert main(["convert", str(item), str(back), *arguments]) == 0
    assert not capsys.readouterr().err
    for name in ("model.safetensors", "config.json"):
        assert (back / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("kind", ["tied_relu", "untied_gated"])
def test_scanned_parameters_have_the_same_way_back(tmp_path, kind):
    source = GOLDENS / kind
    scan = ot.rules.t5_minimal_to_scanned(3, 4)
    ot.convert(source, tmp_path / "scanned", [ot.rules.hf_t5_to_t5x(), scan])
    chain = [scan.inverse(), ot.rules.t5x_to_hf_t5()]
    ot.convert(tmp_path / "scanned", tmp_path / "back", chain, format="safetensors")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_model_that_is_its_base_with_adapters(tmp_path):
    """What is taken off Transformers' weights comes back with PEFT's adapters, and so do the golden logits."""
    source, rng = GOLDENS / "untied_gated", np.random.default_rng(0)
    base, adapter = safetensors.numpy.load_file(source / "model.safetensors"), {}
    for name in [name for name in base if "Attention.q." in name or ".wo." in name]:
        rows, columns = base[name].shape
        a, b = (rng.normal(size=size).astype(np.float32) for size in ((4, columns), (rows, 4)))
        base[name] = (base[name] - 0.5 * b.astype(np.float64) @ a).astype(np.float32)
        module = f"base_model.model.{name.removesuffix('.weight')}"
        adapter |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    for name, leaves in (("base", base), ("adapter", adapter)):
        safetensors.numpy.save_file(leaves, tmp_path / f"{name}.safetensors")
    model, variables = t5_model.init(config_of(source))
    abstract = {"target": jax.eval_shape(lambda: variables["params"])}
    pack = ot.rules.peft_lora({"r": 4, "lora_alpha": 2, "target_modules": ["q", "wo"]})
    chain = [pack, ot.rules.hf_t5_to_t5x()]
    sources = {name: tmp_path / f"{name}.safetensors" for name in ("base", "adapter")}
    apply = jax.jit(model.apply)
    with np.load(source / "logits.npz") as golden:
        for given, transforms, is_equal in ((sources, chain, True), (sources["base"], chain[1:], False)):
            params = ot.restore(given, abstract, transforms)["target"]
            logits = apply({"params": params}, golden["inputs"], golden["targets"])
            assert np.allclose(logits, golden["logits"], rtol=1e-4, atol=1e-4) == is_equal
