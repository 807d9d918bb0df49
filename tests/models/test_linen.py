"""The linen T5: T5X's names, one function in all its layouts, Transformers' logits, and decoding with a cache."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.models import T5Config, config_of
from orbax_t5x.models.attention import empty_cache
from orbax_t5x.models.linen import T5, decode_greedily
from orbax_t5x.trees.flat import flatten
from tests.support import t5_model
from tests.support.t5x_goldens import golden

UNROLLED = T5Config(encoder_layers=1, decoder_layers=2)
SCANNED = T5Config(encoder_layers=1, decoder_layers=2, scan_layers=True)


def test_names_and_shapes_are_t5xs(goldens):
    leaves = json.loads((goldens / "train_state" / "d1_inference_params_only.json").read_text())["leaves"]
    _, variables = t5_model.init()
    expected = {
        name.removeprefix("target/"): tuple(leaf["shape"]) for name, leaf in leaves.items() if "target/" in name
    }
    assert {name: leaf.shape for name, leaf in flatten(variables["params"]).items()} == expected


@pytest.mark.slow
def test_a_t5x_checkpoint_restores_without_rules():
    source = golden("d1_adafactor").step
    model = T5(config_of(source))
    ids = jnp.ones((1, 4), jnp.int32)
    target = {"target": jax.eval_shape(model.init, jax.random.key(0), ids, ids)["params"], "state": ...}
    plan = ot.plan_restore(source, target)
    assert all(entry.sources == (entry.name,) for entry in plan.entries if entry.action == "read")
    assert sum(entry.action == "read" for entry in plan.entries) > 40


@pytest.mark.slow
def test_scanned_and_unrolled_agree():
    unrolled, variables = t5_model.init(UNROLLED)
    inputs, targets = t5_model.batch(3)
    expected = jax.jit(unrolled.apply)({"params": variables["params"]}, inputs, targets)
    params = t5_model.scanned_from(variables["params"], SCANNED)
    found = jax.jit(T5(SCANNED).apply)({"params": params}, inputs, targets)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert np.std(expected) > 0.1


@pytest.mark.slow
def test_no_target_sees_a_later_one():
    model, variables = t5_model.init(T5Config(encoder_layers=1, decoder_layers=1))
    apply = jax.jit(lambda inputs, targets: model.apply({"params": variables["params"]}, inputs, targets))
    inputs, targets = t5_model.batch(0)
    logits = apply(inputs, targets)
    later = apply(inputs, targets.at[:, 6].set(5))
    np.testing.assert_array_equal(logits[:, :7], later[:, :7])
    assert not np.allclose(logits[:, 7], later[:, 7])
    assert not np.allclose(logits, apply(inputs.at[:, 0].set(7), targets))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tied_gated", "untied_relu"])
def test_logits_of_transformers(goldens, kind):
    source = goldens / "hf_logits" / kind
    model = T5(config_of(source))
    with np.load(source / "logits.npz") as golden:
        ids = golden["inputs"], golden["targets"]
        target = {"target": jax.eval_shape(model.init, jax.random.key(0), *ids)["params"]}
        params = ot.restore(source, target, "auto")["target"]
        logits = jax.jit(model.apply)({"params": params}, *ids)
        np.testing.assert_allclose(logits, golden["logits"], rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(T5Config(encoder_layers=1, decoder_layers=1), id="unrolled"),
        pytest.param(SCANNED, id="scanned"),
        pytest.param(T5Config(tied=True, gated=False), id="tied"),
    ],
)
def test_decoding_with_a_cache_equals_decoding_without(config):
    """One position at a time, and several; in a cache that is longer than what is decoded."""
    model, variables = t5_model.init(config)
    params = {"params": variables["params"]}
    inputs, targets = t5_model.batch(1, size=2, length=6)
    expected = jax.jit(model.apply)(params, inputs, targets)
    seen = jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1]

    @jax.jit
    def cached(inputs, seen):
        encoded = model.apply(params, inputs, method="encode")
        cache, logits = empty_cache(config, 2, 9), []
        for start, end in ((0, 1), (1, 6)):
            found, cache = model.apply(params, seen[:, start:end], encoded, inputs, cache, method="decode")
            logits.append(found)
        return jnp.concatenate(logits, axis=1), cache["index"]

    logits, index = cached(inputs, seen)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
    assert index == 6


@pytest.mark.slow
def test_greedy_tokens_are_those_of_the_whole_model():
    model, variables = t5_model.init(T5Config(encoder_layers=1, decoder_layers=1))
    inputs, _ = t5_model.batch(2, size=3, length=5)
    tokens = jax.jit(lambda params: decode_greedily(model, params, inputs, steps=4))(variables["params"])
    apply = jax.jit(model.apply)
    expected = np.zeros((3, 4), np.int32)
    for step in range(4):
        logits = apply({"params": variables["params"]}, inputs, expected)
        ended = (expected[:, :step] == 1).any(axis=1)
        expected[:, step] = np.where(ended, 0, np.argmax(logits[:, step], axis=-1))
    np.testing.assert_array_equal(tokens, expected)


def test_every_parameter_has_axes():
    _, variables = t5_model.init()
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    abstract = ot.with_shardings(jax.eval_shape(lambda: variables), mesh)["params"]
    split = {name for name, leaf in flatten(abstract).items() if not leaf.sharding.is_fully_replicated}
    assert split == {name for name in flatten(abstract) if not name.endswith("scale")}
