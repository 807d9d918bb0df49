"""Axes and names become shardings; Flax's own functions and JAX's own placement are the oracles."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.core.spmd import logical_axis_rules
from flax.linen.partitioning import AxisMetadata, get_axis_names
from flax.training.train_state import TrainState
from flax.traverse_util import ModelParamTraversal
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from orbax_t5x import STANDARD_LOGICAL_AXIS_RULES, with_shardings
from orbax_t5x.adafactor import Adafactor, standard_logical_factor_rules
from orbax_t5x.optimizers import MultiOptimizer, OptaxWrapper, adamw
from orbax_t5x.train_state import FlaxOptimTrainState, InferenceState
from orbax_t5x.trees.flat import flatten
from tests.support import t5_model

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


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_an_axis_of_a_users_own_spec_that_the_mesh_lacks_is_an_error():
    state = {"w": jax.ShapeDtypeStruct((8, 8), np.float32), "v": jax.ShapeDtypeStruct((8,), np.float32)}
    with pytest.raises(ValueError, match="2 leaves do not fit the mesh") as caught:
        with_shardings(state, mesh(), [("w", P(None, ("data", "modle"))), ("v", P("rows"))])
    text = str(caught.value)
    assert text.splitlines()[0].startswith("v: the rule") and text.splitlines()[-1].startswith("2 leaves do not fit")
    assert f"w: the rule 'w' has {P(None, ('data', 'modle'))}, and the mesh has no axis 'modle'" in text
    assert "but 'data', 'model'; did you mean 'model'?" in text
    assert f"v: the rule 'v' has {P('rows')}, and the mesh has no axis 'rows' but 'data', 'model'" in text
    split = with_shardings(state, mesh(), [("w", P(None, ("data", "model"))), ("v", P(None))])
    assert [split[name].sharding.spec for name in "wv"] == [P(None, ("data", "model")), P(None)]


WEIGHT = {"w": jax.ShapeDtypeStruct((8, 8), np.float32)}


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((mesh(), WEIGHT), TypeError, "takes a state and a mesh, and Mesh and dict were given"),
        ((WEIGHT, 8), TypeError, "dict and int were given"),
        ((WEIGHT, mesh(), "batch"), TypeError, "the rules are pairs"),
        ((WEIGHT, mesh(), ["w", "b"]), TypeError, "the rules are pairs"),
        ((WEIGHT, mesh(), [("w(", P("model"))]), ValueError, r"the rule 'w\(' is no regular expression"),
        ((WEIGHT, mesh(), [("w", P("model", "model"))]), ValueError, "which names 'model' more than once"),
    ],
)
def test_wrong_arguments_get_their_answer(arguments, error, match):
    with pytest.raises(error, match=match):
        with_shardings(*arguments)


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


# -- linen's boxes, NNX's metadata, names of leaves


class Boxed(nn.Module):
    """A linen model: one kernel with logical axes, one with those of the mesh, the rest without any."""

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        x = nn.Dense(16, kernel_init=nn.with_logical_partitioning(init, ("embed", "mlp")))(x)
        own = nn.with_logical_partitioning(init, ("wide", "mlp"), rules=(("wide", "data"),))
        x = nn.Dense(8, kernel_init=own)(x)
        return nn.Dense(4, kernel_init=nn.with_partitioning(init, (("data", "model"), None)))(nn.LayerNorm()(x))


def boxed_state():
    model = Boxed()
    variables = model.init(jax.random.key(0), jnp.ones((2, 8)))
    return TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optax.adam(1e-3))


@pytest.mark.slow
def test_boxes_of_linen_are_split_as_flax_says():
    abstract = jax.eval_shape(boxed_state)
    sharded = with_shardings(abstract, mesh())
    assert jax.tree.structure(sharded) == jax.tree.structure(abstract)
    rules = (*STANDARD_LOGICAL_AXIS_RULES, ("wide", "data"), ("data", "data"), ("model", "model"))
    expected = nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract), mesh(), rules)
    found = jax.tree.map(lambda leaf: leaf.sharding, nn.meta.unbox(sharded))
    # Flax's rules know no pair of mesh axes as one name.
    third = NamedSharding(mesh(), P(("data", "model"), None))
    assert jax.tree.all(jax.tree.map(lambda one, other: one in (other, third), found, expected))
    kernels = [found.params[f"Dense_{i}"]["kernel"].spec for i in range(3)]
    assert kernels == [P(None, "model"), P("data", "model"), P(("data", "model"), None)]
    assert found.opt_state[0].mu["Dense_2"]["kernel"] == third and found.step.spec == P()
    placed = jax.jit(boxed_state, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, sharded))()
    assert placed.params["Dense_0"]["kernel"].value.sharding.spec == P(None, "model")
    variables = with_shardings(jax.eval_shape(Boxed().init, jax.random.key(0), jnp.ones((2, 8))), mesh())
    assert variables["params"]["Dense_1"]["kernel"].value.sharding.spec == P("data", "model")


@pytest.mark.slow
def test_a_linen_state_restores_into_its_shardings_and_runs(tmp_path):
    """Saved by stock Orbax, restored here, trained there."""
    state = boxed_state()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    restored = ot.restore(tmp_path / "state", with_shardings(jax.eval_shape(boxed_state), mesh()))
    assert restored.params["Dense_0"]["kernel"].value.sharding.spec == P(None, "model")
    for found, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(found, expected)
    batch = jnp.ones((2, 8))
    np.testing.assert_allclose(
        jax.jit(restored.apply_fn)({"params": restored.params}, batch),
        state.apply_fn({"params": state.params}, batch),
        rtol=1e-5,
    )


class Variables(nnx.Module):
    """An NNX model of the same kind; its last kernel stands in two places."""

    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        self.first = nnx.Linear(8, 16, kernel_init=nnx.with_partitioning(init, ("embed", "mlp")), rngs=rngs)
        own = nnx.with_partitioning(init, ("wide", "mlp"), sharding_rules=(("wide", "data"),))
        self.second = nnx.Linear(16, 8, kernel_init=own, rngs=rngs)
        self.third = nnx.Linear(8, 8, kernel_init=nnx.with_partitioning(init, (None, "model")), rngs=rngs)
        self.again = self.third

    def __call__(self, x):
        return self.again(self.third(self.second(self.first(x))))


@pytest.fixture
def abstract_model():
    with nnx.use_eager_sharding(False):
        return nnx.eval_shape(lambda: Variables(nnx.Rngs(0)))


def test_variables_of_nnx_are_split_as_flax_says(abstract_model):
    state = nnx.state(abstract_model)
    sharded = with_shardings(state, mesh())
    with logical_axis_rules((("embed", None), ("mlp", "model"))):
        expected = nnx.get_named_sharding(state, mesh())
    for name in ("first", "second", "again"):
        found = sharded[name]["kernel"]
        assert type(found) is nnx.Param and type(found.get_value()) is jax.ShapeDtypeStruct
        assert found.get_value().sharding == expected[name]["kernel"].get_value()
        assert sharded[name]["bias"].get_value().sharding.spec == P()
    assert [sharded[name]["kernel"].get_value().sharding.spec for name in ("first", "second", "again")] == [
        P(None, "model"),
        P("data", "model"),
        P(None, "model"),
    ]
    nested = with_shardings({"model": state, "more": jax.ShapeDtypeStruct((4,), "float32")}, mesh())
    assert nested["model"]["first"]["kernel"].get_value().sharding.spec == P(None, "model")
    assert nested["more"].sharding.spec == P()


def test_an_nnx_module_and_its_optimizer(abstract_model):
    module = with_shardings(abstract_model, mesh())
    assert type(module) is Variables and module.again is module.third
    assert module.third.kernel.get_value().sharding.spec == P(None, "model")
    with nnx.use_eager_sharding(False):
        optimizer = nnx.eval_shape(lambda: nnx.Optimizer(Variables(nnx.Rngs(0)), optax.adam(1e-3), wrt=nnx.Param))
    state = with_shardings(nnx.state(optimizer), mesh())
    assert state["opt_state"][0]["mu"]["second"]["kernel"].get_value().sharding.spec == P("data", "model")
    assert state["step"].get_value().sharding.spec == P()


@pytest.mark.filterwarnings("ignore:'sharding.*deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"sharding": ("data", "model")}, P("data", "model")),
        ({"sharding_names": (None, "model")}, P(None, "model")),
        ({"out_sharding": ("embed", "mlp")}, P(None, "model")),
        ({"out_sharding": P(("data", "model"))}, P(("data", "model"))),
        ({"out_sharding": ("mlp", "mlp_activations")}, P("model", None)),
        ({"out_sharding": ("elsewhere",)}, P(None)),
        ({}, P()),
    ],
    ids=str,
)
def test_every_form_of_an_nnx_variables_metadata(metadata, expected):
    with nnx.use_eager_sharding(False):
        variables = {"w": nnx.Param(jnp.ones((8, 8)), **metadata), "v": nnx.Param(jnp.ones(8), out_sharding=("mlp",))}
    assert with_shardings(nnx.State(variables), mesh())["w"].get_value().sharding.spec == expected


def test_a_sharding_as_metadata_of_an_nnx_variable():
    with nnx.use_eager_sharding(False):
        variable = nnx.Param(jnp.ones((8, 8)), out_sharding=NamedSharding(mesh(), P("data")))
    assert with_shardings(nnx.State({"w": variable}), mesh())["w"].get_value().sharding.spec == P("data")


def test_metadata_that_does_not_fit_is_named():
    boxed = {
        "a": nn.Partitioned(np.ones(6), ("model",)),
        "b": nn.Partitioned(np.ones(8), ("data", "model")),
        "c": nn.LogicallyPartitioned(np.ones((4, 8)), ("data",)),
    }
    with pytest.raises(ValueError, match="2 leaves do not fit") as caught:
        with_shardings(boxed, mesh())
    text = str(caught.value)
    assert "a: a dimension has size 6, which mesh axis model of size 4" in text
    assert "b: 2 axes ('data', 'model') for shape (8,); give it a rule of its own: ('b', PartitionSpec())" in text
    found = with_shardings(boxed, mesh(), [("a|b", P())])
    assert found["c"].value.sharding.spec == P("data")
    with pytest.raises(ValueError, match=r"w: P\('data', 'model'\) for shape \(8,\)|w: PartitionSpec"):
        with_shardings({"w": np.ones(8)}, mesh(), [("w", P("data", "model"))])


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
