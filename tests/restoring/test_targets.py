"""Which leaves a target has, what they are called and what may fill them: Flax's names and JAX's rules are the
oracles."""

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from orbax_t5x.restoring.targets import flatten_target
from tests.support.failed_plans import problems
from tests.support.memory_checkpoint import checkpoint
from tests.support.training import fresh

S = jax.ShapeDtypeStruct


def mesh(devices=None, names=("x",)):
    devices = jax.devices() if devices is None else devices
    return Mesh(np.asarray(devices).reshape((-1,) + (1,) * (len(names) - 1)), names)


@pytest.mark.parametrize("key", [None, 3, 1.5, True, "a", (1, 2)])
def test_a_key_is_named_as_flax_names_it(key):
    tree = {key: np.zeros(2)}
    assert list(flatten_target(tree).leaves) == list(flax.serialization.to_state_dict(tree))


def test_two_keys_with_one_name_are_a_problem():
    assert problems(checkpoint({"0": np.zeros(2)}), {0: np.zeros(2), "0": np.zeros(2)}) == [("duplicate", "0")]


def test_keys_that_jax_cannot_sort_are_restored_in_the_dicts_own_order():
    source = checkpoint({"b": np.ones(2), "1/c": np.zeros(2)})
    target = {"b": np.zeros(2), 1: {"c": np.ones(2), "none": None}, None: None}
    got = ot.restore(source, {"in": target}, lambda state, _: {"in": state})
    assert list(got["in"]) == ["b", 1, None] and got["in"][1]["none"] is None
    np.testing.assert_array_equal(got["in"]["b"], np.ones(2))
    np.testing.assert_array_equal(got["in"][1]["c"], np.zeros(2))


def test_a_t5x_state_inside_a_dict_has_the_names_of_its_state_dict():
    state = fresh("adafactor")
    names = set(flatten_target(state).leaves)
    assert set(flatten_target({"model": state}).leaves) == {f"model/{name}" for name in names}
    arrays = {name: np.asarray(leaf) for name, leaf in flatten_target(state).original.items() if leaf is not None}
    got = ot.restore(checkpoint({f"model/{name}": array for name, array in arrays.items()}), {"model": state})
    assert type(got["model"]) is type(state)
    restored = flatten_target(got["model"]).original
    for name, array in arrays.items():
        np.testing.assert_array_equal(restored[name], array)


def test_optimizer_leaves_under_an_inference_state_inside_a_dict_stay_unread():
    state = ot.train_state.InferenceState.create({"params": {"w": np.zeros(2, np.float32)}})
    source = checkpoint(
        {
            "model/target/w": np.ones(2, np.float32),
            "model/state/step": np.int32(3),
            "model/state/param_states/w/v": np.ones(2, np.float32),
        }
    )
    plan = ot.plan_restore(source, {"model": state})
    assert plan.dropped == ("model/state/param_states/w/v",)


@pytest.mark.parametrize("target", [{"a": ..., "b": np.zeros(2)}, {"a": ocp.PLACEHOLDER, "b": np.zeros(2)}])
def test_a_placeholder_covers_the_subtree_that_it_stands_for(target):
    source = checkpoint({"a/x/y": np.zeros(2), "a/z": np.zeros(2), "b": np.ones(2)})
    plan = ot.plan_restore(source, target)
    assert plan.dropped == ("a/x/y", "a/z") and plan.unused == ()
    assert ot.restore(source, target)["a"] is ...
    assert problems(checkpoint({"ab": np.zeros(2), "b": np.ones(2)}), target) == [("leftover", "ab")]


@pytest.mark.slow
def test_an_abstract_linen_state_of_a_mesh_as_jax_makes_it(tmp_path):
    """The axes of `jax.make_mesh` are Explicit: what `jax.eval_shape` gives lies on an abstract mesh."""
    model = nn.Dense(8)

    def create():
        params = model.init(jax.random.key(0), jnp.ones((1, 16)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", create())
    used = jax.make_mesh((4, 2), ("x", "y"))
    with jax.set_mesh(used):
        target = jax.eval_shape(create)
        assert isinstance(target.params["kernel"].sharding.mesh, AbstractMesh)
        got = ot.restore(tmp_path / "state", target)
        split = ot.with_shardings(target, jax.sharding.get_abstract_mesh(), [(".*/kernel", P("x", "y"))])
        shards = ot.restore(tmp_path / "state", split)
    assert got.params["kernel"].sharding == NamedSharding(used, P(None, None))
    assert shards.opt_state[0].mu["kernel"].sharding == NamedSharding(used, P("x", "y"))
    for found, expected in zip(jax.tree.leaves((got, shards)), jax.tree.leaves((create(),) * 2), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_a_functions_leaves_lie_on_the_meshes_of_their_targets():
    front, back = mesh(jax.devices()[:4]), mesh(jax.devices()[4:][::-1])
    layout = Format(Layout((1, 0)), NamedSharding(front, P()))
    target = {
        "front": S((8,), np.float32, sharding=NamedSharding(front, P("x"))),
        "back": S((8,), np.float32, sharding=NamedSharding(back, P("x"))),
        "layout": S((2, 3), np.float32, sharding=layout),
        "single": S((2,), np.float32),
        "wide": np.zeros(2, np.int64),
        "scalar": np.float64(0),
    }

    def init():
        return {
            "front": jnp.arange(8.0),
            "back": jnp.arange(8.0) + 1,
            "layout": jnp.arange(6.0).reshape(2, 3),
            "single": jnp.ones(2),
            "wide": jnp.array([1, 2]),
            "scalar": 2.5,
        }

    got = ot.restore(checkpoint({}), target, fallback_for=[".*"], fallback=init)
    for name, value in init().items():
        np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(value))
    assert got["front"].sharding == target["front"].sharding and got["back"].sharding == target["back"].sharding
    assert got["layout"].format.layout.major_to_minor == (1, 0)
    assert got["single"].devices() == {jax.devices()[0]}
    assert type(got["wide"]) is np.ndarray and got["wide"].dtype == np.int64
    assert type(got["scalar"]) is np.float64


def test_two_sources_whose_leaves_have_one_name_are_a_problem():
    source = {"a": checkpoint({"b/x": np.zeros(2)}), "a/b": checkpoint({"x": np.ones(2)})}
    assert problems(source, None) == [("duplicate", "a/b/x")]


@pytest.mark.parametrize("name", [0, "", None])
def test_a_source_is_named_by_text(name):
    with pytest.raises(ValueError, match="a source's name is text"):
        ot.restore({name: checkpoint({"x": np.zeros(2)}), "b": checkpoint({"x": np.zeros(2)})}, None)
