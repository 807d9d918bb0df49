"""Logical axes become shardings; Flax's `logical_to_mesh_axes` and JAX's own placement are the oracles."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen.partitioning import AxisMetadata, get_axis_names
from flax.traverse_util import ModelParamTraversal
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from orbax_t5x import STANDARD_LOGICAL_AXIS_RULES, with_shardings
from orbax_t5x.adafactor import Adafactor, standard_logical_factor_rules
from orbax_t5x.optimizers import MultiOptimizer, OptaxWrapper, adamw
from orbax_t5x.train_state import FlaxOptimTrainState, InferenceState
from orbax_t5x.trees.flat import flatten
from tests import t5_model

# Flax deprecates the traversals that T5X's MultiOptimizer takes; T5X users have nothing else to pass.
pytestmark = pytest.mark.filterwarnings("ignore:.*flax.traverse_util.Traversal:DeprecationWarning")


def mesh(shape=(2, 4), names=("data", "model")):
    return Mesh(np.asarray(jax.devices()).reshape(shape), names)


@pytest.fixture(scope="module")
def variables():
    return t5_model.init()[1]


def adafactor():
    return Adafactor(0.1, logical_factor_rules=standard_logical_factor_rules(), min_dim_size_to_factor=8)


def mixed():
    def on(tower):
        return ModelParamTraversal(lambda path, _: path.startswith(f"/{tower}/"))

    return MultiOptimizer([(on("encoder"), adafactor()), (on("decoder"), adamw(0.1))])


STATES = {
    "inference": InferenceState.create,
    "adafactor": lambda variables: FlaxOptimTrainState.create(adafactor(), variables),
    "adamw": lambda variables: FlaxOptimTrainState.create(adamw(0.1), variables),
    "chain": lambda variables: FlaxOptimTrainState.create(
        OptaxWrapper(optax.chain(optax.clip_by_global_norm(1.0), optax.adafactor(0.1, min_dim_size_to_factor=8))),
        variables,
    ),
    "mixed": lambda variables: FlaxOptimTrainState.create(mixed(), variables),
}


def specs(state):
    """Partition specs by name in the state dict."""
    return {name: leaf.sharding.spec for name, leaf in flatten(state.state_dict()).items() if leaf is not None}


def state_of(shape, axes, **collections):
    """An InferenceState of one parameter `w`."""
    given = {"params": {"w": np.zeros(shape, np.float32)}, "params_axes": {"w_axes": AxisMetadata(axes)}}
    return InferenceState.create({**given, **collections})


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("abstract", [False, True])
def test_every_leaf_gets_a_sharding_that_jax_accepts(variables, name, abstract):
    state = STATES[name](variables)
    given = jax.eval_shape(lambda: state) if abstract else state
    sharded = with_shardings(given, mesh())
    assert type(sharded) is type(state)
    assert jax.tree.structure(sharded) == jax.tree.structure(state)
    for found, leaf in zip(jax.tree.leaves(sharded), jax.tree.leaves(state), strict=True):
        assert type(found) is jax.ShapeDtypeStruct
        assert (found.shape, found.dtype) == (leaf.shape, leaf.dtype)
        assert found.sharding.mesh == mesh()
    placed = jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, sharded))
    assert jax.tree.leaves(placed)[0].sharding.num_devices == 8


@pytest.mark.parametrize("name", STATES)
def test_parameters_are_split_as_flax_says(variables, name):
    found = specs(with_shardings(STATES[name](variables), mesh()))
    for parameter, names in flatten(get_axis_names(variables["params_axes"])).items():
        expected = nn.logical_to_mesh_axes(tuple(names), STANDARD_LOGICAL_AXIS_RULES)
        assert found[f"target/{parameter}"] == expected
        if name == "adamw":
            assert found[f"state/param_states/0/mu/{parameter}"] == expected
            assert found[f"state/param_states/0/nu/{parameter}"] == expected
    assert found["target/token_embedder/embedding"] == P("model", None)
    assert found["target/encoder/layers_0/attention/query/kernel"] == P(None, "model")
    assert found["target/encoder/layers_0/attention/out/kernel"] == P("model", None)
    assert found["target/decoder/layers_1/mlp/wi_0/kernel"] == P(None, "model")
    assert found["target/decoder/relpos_bias/rel_embedding"] == P("model", None)
    assert found["target/decoder/decoder_norm/scale"] == P(None)
    assert found["state/step"] == P()


def test_states_without_axes_are_replicated(variables):
    found = specs(with_shardings(STATES["adafactor"](variables), mesh()))
    embedding = "state/param_states/token_embedder/embedding"
    assert found[f"{embedding}/v_row"] == found[f"{embedding}/v_col"] == found[f"{embedding}/v"] == P()
    relpos = "state/param_states/decoder/relpos_bias/rel_embedding"
    assert found[f"{relpos}/v"] in (P(), P("model", None))


def test_scanned_layers():
    _, variables = t5_model.init(t5_model.T5Config(scan_layers=True))
    found = specs(with_shardings(InferenceState.create(variables), mesh()))
    assert found["target/encoder/encoder/attention/query/kernel"] == P(None, None, "model", None)
    assert found["target/encoder/encoder/attention/out/kernel"] == P("model", None, None, None)


def test_flax_mutables_with_and_without_axes():
    stats = {"batch_stats": {"mean": np.zeros(8, np.float32)}, "cache": {"x": np.zeros(3, np.float32)}}
    axes = {"batch_stats_axes": {"mean_axes": AxisMetadata(("mlp",))}}
    found = specs(with_shardings(state_of((4, 8), ("embed", "mlp"), **stats, **axes), mesh()))
    assert found["flax_mutables/batch_stats/mean"] == P("model")
    assert found["flax_mutables/cache/x"] == P()


def test_a_mesh_axis_that_the_mesh_lacks_splits_nothing():
    state = state_of((8, 8), ("batch", "mlp"))
    assert specs(with_shardings(state, mesh((8,), ("model",))))["target/w"] == P(None, "model")
    assert specs(with_shardings(state, mesh((8,), ("data",))))["target/w"] == P("data", None)
    assert specs(with_shardings(state, mesh((8,), ("x",))))["target/w"] == P(None, None)


def test_rules_of_the_caller():
    state = state_of((8, 16), ("a", "b"))

    def spec(*rules, on=None):
        return specs(with_shardings(state, on or mesh(), rules))["target/w"]

    assert spec(("b", ("data", "model"))) == P(None, ("data", "model"))
    assert spec(("a", "model"), ("b", "model"), ("b", "data")) == P("model", "data")
    assert spec(("b", "model"), ("a", "model")) == P(None, "model")
    # Of several mesh axes those count that exist; a rule without any leaves room for the next.
    assert spec(("b", ("data", "replica")), on=mesh((8,), ("data",))) == P(None, ("data",))
    assert spec(("b", "replica"), ("b", "data"), on=mesh((8,), ("data",))) == P(None, "data")
    assert spec() == P(None, None)


def test_uneven_dimensions_are_all_named(variables):
    with pytest.raises(ValueError, match="2 leaves do not fit the mesh") as caught:
        with_shardings(InferenceState.create(variables), mesh((1, 8)))
    text = str(caught.value)
    assert "decoder/relpos_bias/rel_embedding: logical axis 'heads' has size 4" in text
    assert "encoder/relpos_bias/rel_embedding" in text
    assert "mesh axis model of size 8" in text
    with pytest.raises(ValueError, match=r"size 6, which mesh axis data\*model of size 8"):
        with_shardings(state_of((6,), ("a",)), mesh(), [("a", ("data", "model"))])
    with pytest.raises(ValueError, match="and 90 more"):
        with_shardings(
            InferenceState.create(
                {
                    "params": {f"w{i}": np.zeros(3) for i in range(100)},
                    "params_axes": {f"w{i}_axes": AxisMetadata(("mlp",)) for i in range(100)},
                }
            ),
            mesh(),
        )


def test_axes_of_another_rank_are_an_error():
    with pytest.raises(ValueError, match=r"w: 1 logical axes \('mlp',\) for shape \(4, 8\)"):
        with_shardings(state_of((4, 8), ("mlp",)), mesh())


def test_a_parameter_that_the_axes_do_not_know_is_an_error():
    state = state_of((8,), ("mlp",)).replace_params({"w": np.zeros(8), "new": np.zeros(8)})
    with pytest.raises(ValueError, match="params/new: params_axes names no axes for it"):
        with_shardings(state, mesh())


def test_states_without_axes_say_what_to_do():
    with pytest.raises(ValueError, match="param_with_axes"):
        with_shardings(FlaxOptimTrainState.create(adamw(0.1), {"params": {"w": jnp.ones(2)}}), mesh())
    with pytest.raises(TypeError, match="ShapeDtypeStruct"):
        with_shardings({"w": jnp.ones(2)}, mesh())


def test_a_mesh_without_devices_will_do():
    found = with_shardings(
        state_of((8,), ("mlp",)), AbstractMesh((4, 64), ("data", "model"), (AxisType.Auto,) * 2), [("mlp", "data")]
    )
    assert found.params["w"].sharding.spec == P("data")


def test_the_public_names_are_these():
    assert ot.with_shardings is with_shardings
    assert ot.STANDARD_LOGICAL_AXIS_RULES[0] == ("batch", "data")
    assert dict(STANDARD_LOGICAL_AXIS_RULES) == {
        **dict.fromkeys(("vocab", "mlp", "heads", "joined_kv"), "model"),
        **dict.fromkeys(
            ("embed", "kv", "relpos_buckets", "abspos_buckets", "length", "layers", "stack", "mlp_activations")
        ),
        "batch": "data",
    }
