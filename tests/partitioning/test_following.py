"""Leaves of an optimizer are split as their parameters, whatever names them, and in the dimensions that they have."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen.partitioning import AxisMetadata
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from orbax_t5x.optimizers import OptaxWrapper, adamw
from orbax_t5x.train_state import FlaxOptimTrainState
from orbax_t5x.trees.flat import flatten
from tests.support import t5_model

MESH = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("data", "model"))
PARAMS = {
    "wide": {"kernel": jnp.ones((16, 32))},
    "tall": {"kernel": jnp.ones((32, 16))},
    "square": {"kernel": jnp.ones((16, 16))},
    "layers": {"kernel": jnp.ones((16, 2, 64)), "scale": jnp.ones((2, 16))},
    "bias": jnp.ones(16),
}
BY_NAME = [
    ("(.*/)?(wide|tall|square)/kernel", P("data", "model")),
    ("(.*/)?layers/kernel", P("data", None, "model")),
    ("(.*/)?bias", P("model")),
]


def state_of(params, tx=None):
    tx = tx or optax.chain(optax.adafactor(0.1, min_dim_size_to_factor=8, momentum=0.9), optax.ema(0.9))
    return jax.eval_shape(lambda: TrainState.create(apply_fn=None, params=params, tx=tx))


def specs(tree):
    """Partition specs without the Nones at their ends, by name."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        axes = list(leaf.sharding.spec)
        while axes and axes[-1] is None:
            axes.pop()
        found["/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", "")))) for key in path)] = P(
            *axes
        )
    return found


def ending(found, end):
    return {name: spec for name, spec in found.items() if name.endswith(end)}


def test_factored_and_full_slots_follow_rules_of_names():
    split = ot.with_shardings(state_of(PARAMS), MESH, BY_NAME)
    found = specs(split)
    assert found["params/wide/kernel"] == P("data", "model")
    assert set(ending(found, "v_row/wide/kernel").values()) == {P("data")}
    assert set(ending(found, "v_col/wide/kernel").values()) == {P("model")}
    # Of a tall matrix the rows are the larger dimension, which Optax's v_row lacks.
    assert set(ending(found, "v_row/tall/kernel").values()) == {P("model")}
    assert set(ending(found, "v_col/tall/kernel").values()) == {P("data")}
    # Of equal dimensions the last counts as the larger one.
    assert set(ending(found, "v_row/square/kernel").values()) == {P("data")}
    assert set(ending(found, "v_col/square/kernel").values()) == {P("model")}
    # (16, 2, 64) without 64, and without 16.
    assert set(ending(found, "v_row/layers/kernel").values()) == {P("data")}
    assert set(ending(found, "v_col/layers/kernel").values()) == {P(None, "model")}
    assert set(ending(found, "/v/wide/kernel").values()) == {P()}  # a placeholder
    assert set(ending(found, "/v/bias").values()) == set(ending(found, "ema/bias").values()) == {P("model")}
    assert {spec for name, spec in found.items() if name.endswith("ema/layers/kernel")} == {P("data", None, "model")}
    assert found["step"] == P() and set(ending(found, "scale").values()) == {P()}
    placed = jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), split)
    assert len(placed.params["wide"]["kernel"].addressable_shards) == 8


def test_a_stack_of_parameters_is_split_behind_its_first_dimension():
    found = specs(ot.with_shardings(state_of(PARAMS, optax.lbfgs(memory_size=3)), MESH, BY_NAME))
    assert set(ending(found, "diff_params_memory/wide/kernel").values()) == {P(None, "data", "model")}
    assert set(ending(found, "diff_updates_memory/bias").values()) == {P(None, "model")}


def test_a_rule_of_the_optimizers_own_goes_first():
    rules = [(".*/v_row/wide/kernel", P()), ("params/.*kernel", P("data"))]
    found = specs(ot.with_shardings(state_of(PARAMS), MESH, rules))
    assert set(ending(found, "v_row/wide/kernel").values()) == {P()}
    assert set(ending(found, "v_row/layers/kernel").values()) == {P("data")}


def test_a_model_beside_its_optimizer_without_a_name_for_parameters():
    optimizer = optax.adam(0.1).init(PARAMS)
    rules = [("model/wide/kernel", P("data", "model"))]
    found = specs(ot.with_shardings({"model": PARAMS, "opt": optimizer}, MESH, rules))
    assert found["opt/0/mu/wide/kernel"] == found["opt/0/nu/wide/kernel"] == P("data", "model")
    assert found["opt/0/mu/tall/kernel"] == P()


def test_boxes_and_variables_that_keep_all_axes_of_a_factored_parameter():
    with nnx.use_eager_sharding(False):
        model = nnx.Linear(
            16, 32, kernel_init=nnx.with_partitioning(nnx.initializers.ones, ("embed", "mlp")), rngs=nnx.Rngs(0)
        )
        tx = optax.adafactor(0.1, min_dim_size_to_factor=8)
        optimizer = nnx.eval_shape(lambda: nnx.Optimizer(model, tx, wrt=nnx.Param))
    both = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
    found = {name: spec for name, spec in specs(ot.with_shardings(both, MESH)).items() if "kernel" in name}
    assert {name.split("/")[-3]: spec for name, spec in found.items() if "v_" in name} == {
        "v_row": P(),
        "v_col": P("model"),
    }


def test_no_rules_split_nothing():
    with nnx.use_eager_sharding(False):
        boxed = {"w": nnx.Param(jnp.ones((8, 8)), out_sharding=("data", "model"))}
    unknown = FlaxOptimTrainState.create(adamw(0.1), {"params": PARAMS})
    for tree in (state_of(PARAMS), PARAMS, nnx.State(boxed), unknown):
        split = ot.with_shardings(tree, MESH, [])
        assert jax.tree.structure(split) == jax.tree.structure(tree)
        assert all(leaf.sharding.is_fully_replicated and leaf.sharding.mesh == MESH for leaf in jax.tree.leaves(split))


class StateWithAxes(TrainState):
    """As who trains T5X's network with Flax's state writes it."""

    params_axes: object


@pytest.mark.parametrize("form", ["field", "params", "variables"])
def test_axes_of_t5xs_networks(form):
    _, variables = t5_model.init()
    tx = optax.adafactor(0.1, min_dim_size_to_factor=8)
    make = {
        "field": lambda: StateWithAxes.create(apply_fn=None, tx=tx, **variables),
        "params": lambda: TrainState.create(apply_fn=None, tx=tx, params=variables),
        "variables": lambda: variables,
    }[form]
    abstract = jax.eval_shape(make)
    split = ot.with_shardings(abstract, MESH)
    assert jax.tree.structure(split) == jax.tree.structure(abstract)
    found = specs(split)
    wi = ending(found, "params/encoder/layers_0/mlp/wi_0/kernel")
    assert P(None, "model") in wi.values()
    assert set(ending(found, "params/token_embedder/embedding").values()) >= {P("model")}
    if form != "variables":
        assert set(ending({n: s for n, s in found.items() if "/v_row/" in n}, "layers_0/mlp/wi_0/kernel").values()) == {
            P()
        }
        assert set(ending({n: s for n, s in found.items() if "/v_col/" in n}, "layers_0/mlp/wi_0/kernel").values()) == {
            P("model")
        }


def test_axes_that_a_collection_does_not_have_are_not_needed():
    variables = {"params": {"w": jnp.ones(8), "new": jnp.ones(8)}, "params_axes": {"w_axes": AxisMetadata(("mlp",))}}
    found = specs(ot.with_shardings(variables, MESH))
    assert found == {"params/w": P("model"), "params/new": P()}


def test_a_rule_that_a_leafs_rank_cannot_take_names_the_leaf_and_the_way_out():
    tree = {"params": PARAMS}
    with pytest.raises(ValueError, match="1 leaf does not fit") as caught:
        ot.with_shardings(tree, MESH, [("params/bias", P("data", "model"))])
    assert "params/bias: " in str(caught.value)
    assert "put a rule of its own before it: ('params/bias', PartitionSpec())" in str(caught.value)
    ot.with_shardings(tree, MESH, [("params/bias", P()), ("params/(bias|wide/kernel)", P("data", "model"))])


# -- like another tree


def placed():
    split = ot.with_shardings({"params": PARAMS}, MESH, BY_NAME)["params"]
    return jax.tree.map(lambda leaf, like: jax.device_put(leaf, like.sharding), PARAMS, split)


@pytest.mark.slow
def test_names_of_a_tree_with_shardings_decide_for_all_that_end_in_them():
    by_rules = specs(ot.with_shardings(state_of(PARAMS), MESH, BY_NAME))
    assert specs(ot.with_shardings(state_of(PARAMS), MESH, like=placed())) == by_rules
    assert specs(ot.with_shardings(state_of(PARAMS), MESH, [], like={"params": placed()})) == by_rules
    # Before rules, which are for the rest.
    rules = [("params/bias", P("data")), ("params/layers/scale", P("data"))]
    found = specs(ot.with_shardings(state_of(PARAMS), MESH, rules, like=placed()))
    assert found["params/bias"] == P("model") and found["params/layers/scale"] == P()


@pytest.mark.slow
def test_a_t5x_state_like_its_parameters():
    factored = optax.adafactor(0.1, min_dim_size_to_factor=8)
    state = FlaxOptimTrainState.create(OptaxWrapper(optax.chain(factored, optax.ema(0.9))), {"params": PARAMS})
    with pytest.raises(ValueError, match="params_axes"):
        ot.with_shardings(state, MESH)
    split = ot.with_shardings(state, MESH, like=placed())
    found = {name: leaf.sharding.spec for name, leaf in flatten(split.state_dict()).items()}
    assert found["target/wide/kernel"] == P("data", "model")
    assert found["state/param_states/1/ema/wide/kernel"] == P("data", "model")
    assert [spec for name, spec in found.items() if name.endswith("v_col/wide/kernel")] == [P("model")]


@pytest.mark.slow
def test_an_nnx_module_like_another_and_on_another_mesh():
    model = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
    other = Mesh(np.asarray(jax.devices()), ("model",))
    like = {"kernel": jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=NamedSharding(MESH, P("data", "model")))}
    split = ot.with_shardings(nnx.eval_shape(lambda: model), other, like=like)
    assert split.kernel.get_value().sharding == NamedSharding(other, P(None, "model"))
    assert split.bias.get_value().sharding.spec == P()


def test_a_tree_without_shardings_is_like_nothing():
    with pytest.raises(TypeError, match="like= has no leaf with a NamedSharding"):
        ot.with_shardings({"params": PARAMS}, MESH, like=PARAMS)
