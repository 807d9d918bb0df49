"""The NNX T5: the linen one's function with the names of `nnx.List`; Transformers' logits; decoding with a cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import orbax_t5x as ot
from orbax_t5x.models import T5Config, config_of
from orbax_t5x.models import linen as linen_module
from orbax_t5x.models.attention import empty_cache
from orbax_t5x.models.nnx import T5, decode_greedily
from tests.support import t5_model
from tests.support.failed_plans import BUNDLE

# From T5X's names of layers to those of nnx.List.
LISTS = ot.transforms.Rename([(r"(.*)/layers_(\d+)/(.*)", r"\1/layers/\2/\3")])


def restored(source, transforms):
    """The model of a checkpoint."""
    abstract = nnx.eval_shape(lambda: T5(config_of(source), rngs=nnx.Rngs(0)))
    return ot.restore(source, abstract, transforms)


class Wrapped(nnx.Module):
    """The linen T5 inside an NNX module."""

    def __init__(self, config, ids):
        self.backbone = nnx.bridge.ToNNX(linen_module.T5(config), rngs=nnx.Rngs(0))
        self.backbone.lazy_init(ids, ids)


@pytest.mark.slow
def test_a_linen_model_inside_nnx_is_restored_in_one_call():
    ids = np.ones((1, 2), np.int32)
    config = config_of(BUNDLE)
    linen = jax.eval_shape(linen_module.T5(config).init, jax.random.key(0), ids, ids)["params"]
    wanted = ot.restore(BUNDLE, {"params": linen}, "auto")["params"]
    state = nnx.state(nnx.eval_shape(lambda: Wrapped(config, ids)))
    found = ot.restore(BUNDLE, nnx.filter_state(state, nnx.Param), "auto")
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(found)["backbone"], wanted)
    # The whole state has the names of the parameters' axes, too, and keys, which no checkpoint of T5X has.
    whole = ot.restore(BUNDLE, state, "auto", fallback=lambda: nnx.state(Wrapped(config, ids)))
    jax.tree.map(
        np.testing.assert_array_equal, nnx.to_pure_dict(nnx.filter_state(whole, nnx.Param))["backbone"], wanted
    )
    scale = whole["backbone"]["decoder"]["decoder_norm"]
    assert scale["scale_axes"].get_value().names == ("embed",) and scale["scale"].shape == (config.embed,)
    assert whole["backbone"]["to_nnx__rngs"]["default"]["count"].get_value().dtype == np.uint32


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tied_relu", "untied_gated"])
def test_logits_of_transformers(goldens, kind):
    source = goldens / "hf_logits" / kind
    prefix = ot.transforms.Rename([("(?:target/)?(.*)", r"\1")], require_match=False)
    graph, state = nnx.split(restored(source, [ot.rules.hf_t5_to_t5x(), prefix, LISTS]))
    with np.load(source / "logits.npz") as golden:
        logits = jax.jit(lambda state, *ids: nnx.merge(graph, state)(*ids))(state, golden["inputs"], golden["targets"])
        np.testing.assert_allclose(logits, golden["logits"], rtol=2e-5, atol=2e-5)


def same_model(config):
    """The NNX and the linen model with equal parameters, by a checkpoint's names."""
    linen, variables = t5_model.init(config)
    abstract = nnx.eval_shape(lambda: T5(config, rngs=nnx.Rngs(0)))
    state = nnx.state(abstract)
    flat = {tuple(name): leaf for name, leaf in nnx.to_flat_state(state)}
    values = {}
    for path in flat:
        at = variables["params"]
        parts = [*path]
        while parts:
            key = parts.pop(0)
            at = at[f"layers_{parts.pop(0)}"] if key == "layers" else at[key]
        values[path] = flat[path].replace(at)
    nnx.update(abstract, nnx.from_flat_state(list(values.items())))
    return abstract, linen, variables["params"]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(T5Config(encoder_layers=1, decoder_layers=1), id="untied"),
        pytest.param(T5Config(tied=True, gated=False), id="tied"),
        pytest.param(T5Config(per_layer_bias=True, activation="silu", scale_decoder_outputs=True), id="bias-per-layer"),
    ],
)
@pytest.mark.slow
def test_it_is_the_linen_model_and_decodes_with_a_cache(config):
    model, linen, params = same_model(config)
    inputs, targets = t5_model.batch(1, size=2, length=6)
    expected = jax.jit(linen.apply)({"params": params}, inputs, targets)
    graph, state = nnx.split(model)

    @jax.jit
    def both(state, inputs, targets):
        model = nnx.merge(graph, state)
        seen = jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1]
        encoded = model.encode(inputs)
        cache, logits = empty_cache(config, 2, 8), []
        for start, end in ((0, 1), (1, 6)):
            found, cache = model.decode(seen[:, start:end], encoded, inputs, cache)
            logits.append(found)
        return model(inputs, targets), jnp.concatenate(logits, axis=1)

    whole, cached = both(state, inputs, targets)
    np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(cached, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_greedy_tokens_are_those_of_the_linen_model():
    config = T5Config(encoder_layers=1, decoder_layers=1)
    model, linen, params = same_model(config)
    inputs, _ = t5_model.batch(2, size=2, length=5)
    graph, state = nnx.split(model)
    tokens = jax.jit(lambda state: decode_greedily(nnx.merge(graph, state), inputs, steps=4))(state)
    expected = jax.jit(lambda params: linen_module.decode_greedily(linen, params, inputs, steps=4))(params)
    np.testing.assert_array_equal(tokens, expected)


def test_every_parameter_has_axes_and_trains_where_it_is_split():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = ot.with_shardings(nnx.eval_shape(lambda: T5(T5Config(), rngs=nnx.Rngs(0))), mesh)
    for path, leaf in nnx.to_flat_state(nnx.state(split)):
        assert leaf.get_value().sharding.is_fully_replicated == (path[-1] == "scale")


@pytest.mark.parametrize("option", ["scan_layers", "split_heads"])
def test_layouts_that_it_has_not_are_refused(option):
    with pytest.raises(ValueError, match="unrolled layers"):
        T5(T5Config(**{option: True}), rngs=nnx.Rngs(0))
