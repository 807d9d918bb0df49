"""Both models compute what a checkpoint's owner computes: the logits of real Transformers for each kind of T5."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import orbax_t5x as ot
from orbax_t5x.models import T5Config, config_of, linen
from orbax_t5x.models import nnx as nnx_models
from tests.support import t5_model

KINDS = Path(__file__).parents[1] / "goldens" / "hf_models"
PAGE = Path(__file__).parents[2] / "docs" / "coming-from" / "transformers.md"
SHOWN = {
    "t5_1_0": "T5.1.0",
    "t5_1_0_bin": "T5.1.0, tied",
    "t5_1_1": "T5.1.1, mT5, Flan-T5",
    "t5_1_1_v5": "T5.1.1 by Transformers 5",
    "t5_1_1_resaved_v5": "T5.1.1 saved again by Transformers 5",
    "gated_silu": "UL2 (`gated-silu`)",
    "gelu_ungated": "`gelu` without a gate",
    "umt5": "umT5 (a bias in each layer)",
    "umt5_unscaled_v5": "umT5 by Transformers 5.24, unscaled",
    "t5_encoder": "`T5EncoderModel`",
    "longt5_local": "LongT5, local",
    "switch_tied": "Switch",
    "t5_token": "`T5ForTokenClassification`",
}


def expected(kind):
    """The models' arguments, and the numbers of Transformers."""
    with np.load(KINDS / kind / "expected.npz") as golden:
        ids = golden["input_ids"].astype(np.int32)
        if "last_hidden_state" in golden:
            return (ids,), golden["last_hidden_state"]
        seen = golden["decoder_input_ids"].astype(np.int32)
        targets = np.concatenate([seen[:, 1:], np.ones_like(seen[:, :1])], axis=1)
        return (ids, targets), golden["logits"]


def cell(found, logits):
    return (
        "equal" if np.allclose(found, logits, rtol=2e-5, atol=5e-5) else f"WRONG by {np.abs(found - logits).max():.1g}"
    )


def computed(kind):
    """The table's cells of linen and NNX: by config_of and "auto", against Transformers' numbers."""
    try:
        config = config_of(KINDS / kind)
    except ValueError as error:
        key = re.search(r"config\.json has (\w+)", str(error))[1]
        return (f"refused by `{key}`",) * 2
    ids, logits = expected(kind)
    model = linen.T5(config)
    target = {"params": jax.eval_shape(model.init, jax.random.key(0), *ids)["params"]}
    by_linen = jax.jit(model.apply)(ot.restore(KINDS / kind, target, "auto"), *ids)
    abstract = nnx.eval_shape(lambda: nnx_models.T5(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(ot.restore(KINDS / kind, abstract, "auto"))
    by_nnx = jax.jit(lambda state: nnx.merge(graph, state)(*ids))(state)
    return cell(by_linen, logits), cell(by_nnx, logits)


def back(kind, directory):
    """The cell of the way back: all values of the file, of which only copies of the embedding may be left out."""
    attention = "local" if kind == "longt5_local" else None
    ot.convert(KINDS / kind, directory / "t5x", ot.rules.hf_t5_to_t5x(), strict=kind != "t5_token")
    pack = ot.rules.t5x_to_hf_t5(encoder_attention_type=attention)
    ot.convert(directory / "t5x", directory / "back", pack, format="safetensors")
    with ot.open_checkpoint(KINDS / kind) as opened, ot.open_checkpoint(directory / "back") as written:
        theirs, ours = ({name: leaf.get() for name, leaf in one.leaves.items()} for one in (opened, written))
    (shared,) = [value for name, value in theirs.items() if name.endswith("shared.weight")]
    wanted = {name: value for name, value in theirs.items() if name in ours or not np.array_equal(value, shared)}
    is_equal = wanted.keys() == ours.keys() and all(np.array_equal(ours[name], wanted[name]) for name in ours)
    return "equal" if is_equal else f"WRONG: {wanted.keys() ^ ours.keys()}"


@pytest.mark.slow
def test_the_page_has_the_table_of_all_kinds(tmp_path):
    """A kind is computed as by its owner, or refused by a key of its config.json."""
    assert SHOWN.keys() == {path.name for path in KINDS.iterdir() if path.is_dir()}
    files = {".bin": ".bin", "index.json": "safetensors in parts"}
    rows = []
    for kind, text in SHOWN.items():
        names = [path.name for path in (KINDS / kind).iterdir()]
        file = next((files[end] for end in files if any(name.endswith(end) for name in names)), "safetensors")
        rows.append(f"| {text} | {file} | {' | '.join((*computed(kind), back(kind, tmp_path / kind)))} |")
    table = "\n".join(rows)
    assert "WRONG" not in table, table
    assert table in PAGE.read_text(), table


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [{"activation": "gelu_new"}, {"scale_decoder_outputs": True}, {"max_distance": 128}, {"layer_norm_epsilon": 1e-2}],
    ids=lambda change: next(iter(change)),
)
def test_the_tolerance_tells_functions_apart(change):
    kind = "gelu_ungated"
    config, (ids, logits) = config_of(KINDS / kind), expected(kind)
    model = linen.T5(dataclasses.replace(config, **change))
    target = {"params": jax.eval_shape(model.init, jax.random.key(0), *ids)["params"]}
    found = jax.jit(model.apply)(ot.restore(KINDS / kind, target, "auto"), *ids)
    assert np.abs(found - logits).max() > 1e-3


@pytest.mark.parametrize("kind", ["t5_1_0_bin", "t5_encoder"])
def test_a_tied_file_converts_without_a_projection(tmp_path, kind):
    """PyTorch's files hold the embedding under four names; T5X's tied model has no `logits_dense`."""
    ot.convert(KINDS / kind, tmp_path / "t5x", [ot.rules.hf_t5_to_t5x()])
    with ot.open_checkpoint(tmp_path / "t5x") as opened:
        assert not [name for name in opened.leaves if "logits_dense" in name or "decoder/token" in name]
        assert "target/token_embedder/embedding" in opened.leaves


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", [False, True])
def test_dropout_needs_a_key(scan_layers):
    config = T5Config(dropout_rate=0.4, encoder_layers=2, decoder_layers=2, scan_layers=scan_layers)
    model, variables = t5_model.init(config)
    params, batch = {"params": variables["params"]}, t5_model.batch(1, size=2, length=6)
    quiet = linen.T5(dataclasses.replace(config, dropout_rate=0.0))
    apply = jax.jit(lambda key: model.apply(params, *batch, rngs={"dropout": key}))
    first, again, other = (apply(jax.random.key(seed)) for seed in (0, 0, 1))
    without_key, never = (jax.jit(one.apply)(params, *batch) for one in (model, quiet))
    np.testing.assert_array_equal(without_key, never)
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other) and not np.allclose(first, never)


@pytest.mark.slow
def test_dropout_of_nnx_needs_a_stream():
    model = nnx_models.T5(T5Config(dropout_rate=0.4, encoder_layers=1, decoder_layers=1), rngs=nnx.Rngs(0))
    batch = t5_model.batch(1, size=2, length=6)
    first, again, other = (model(*batch, rngs=nnx.Rngs(dropout=seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other) and not np.allclose(first, model(*batch))


def test_dropped_entries_are_equal_along_the_length_and_the_mean_stays():
    from_ones = np.asarray(linen.attention.dropped(jnp.ones((64, 3, 50)), 0.25, jax.random.key(0)))
    assert set(np.unique(from_ones)) == {np.float32(0), np.float32(1 / 0.75)}
    np.testing.assert_array_equal(from_ones[:, :1], from_ones[:, 1:2])
    assert abs(from_ones.mean() - 1) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_activations_in_bfloat16_stay_near(library):
    config = T5Config(dtype=jnp.bfloat16, encoder_layers=1, decoder_layers=1)
    exact, batch = dataclasses.replace(config, dtype=jnp.float32), t5_model.batch(1, size=2, length=6)
    if library == "linen":
        model, variables = t5_model.init(config)
        params = {"params": variables["params"]}
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
        found, wanted = model.apply(params, *batch), linen.T5(exact).apply(params, *batch)
    else:
        found, wanted = (nnx_models.T5(one, rngs=nnx.Rngs(0))(*batch) for one in (config, exact))
    assert found.dtype == jnp.float32
    assert 0 < np.abs(found - wanted).max() < 0.1 * np.abs(wanted).max()


@pytest.mark.parametrize("encoder_only", [False, True])
def test_arguments_are_those_of_the_kind(encoder_only):
    config, ids = T5Config(encoder_only=encoder_only), jnp.ones((1, 2), jnp.int32)
    wrong = (ids, ids) if encoder_only else (ids,)
    with pytest.raises(TypeError, match="is called with"):
        jax.eval_shape(linen.T5(config).init, jax.random.key(0), *wrong)
    with pytest.raises(TypeError, match="is called with"):
        nnx_models.T5(config, rngs=nnx.Rngs(0))(*wrong)


@pytest.mark.parametrize("kind", ["t5_1_1", "umt5"])
@pytest.mark.parametrize(
    "layout", [{}, {"split_heads": True}, {"scan_layers": True}], ids=["joined", "split", "scanned"]
)
def test_the_rules_that_are_found_lead_back_without_a_target(kind, layout, tmp_path):
    """Biases of each layer stay so, and a tower's beside stacked layers is found again."""
    config = config_of(KINDS / kind)
    config = dataclasses.replace(config, **layout, per_layer_bias=config.has_per_layer_bias)
    ids, logits = expected(kind)
    model = linen.T5(config)
    target = {"params": jax.eval_shape(model.init, jax.random.key(0), *ids)["params"]}
    plan = ot.plan_restore(KINDS / kind, target, "auto")
    assert cell(jax.jit(model.apply)(plan.execute(), *ids), logits) == "equal"
    ot.convert(KINDS / kind, tmp_path / "orbax", plan.found_rules)
    with ot.open_checkpoint(KINDS / kind) as opened:
        there = ot.plan_restore(tmp_path / "orbax", opened.tree(), "auto").found_rules
        ways = [there, ot.transforms.inverse(plan.found_rules, opened.leaves)]
    for number, rules in enumerate(ways):
        ot.convert(tmp_path / "orbax", tmp_path / f"back{number}", rules, format="safetensors")
        assert ot.diff(tmp_path / f"back{number}", KINDS / kind).equal
