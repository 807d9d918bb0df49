"""Plans and their execution, over checkpoints in memory: NumPy is the oracle, and leaves record what is read from
them."""

import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from tests.support.failed_plans import failing
from tests.support.memory_checkpoint import checkpoint
from tests.support.placed_arrays import SPECS, mesh, sharded, values


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_shards_land_on_their_devices(kind, spec):
    array = values((16, 24))
    source = checkpoint({"a": array}, kind)
    got = ot.restore(source, {"a": sharded((16, 24), spec=spec)})
    assert got["a"].sharding == NamedSharding(mesh(), spec)
    for shard in got["a"].addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), array[shard.index])


def test_both_axes_of_a_mesh(kind):
    grid = mesh((2, 4), ("a", "b"))
    array = values((6, 8))
    got = ot.restore(checkpoint({"w": array}, kind), {"w": sharded((6, 8), spec=P("a", "b"), on=grid)})
    np.testing.assert_array_equal(np.asarray(got["w"]), array)


def test_kinds_of_targets_come_back_as_they_are(kind):
    key = jax.random.key(7)
    source = checkpoint(
        {
            "jax": values((4,)),
            "numpy": values((4,), np.float64),
            "int": np.int64(2**40),
            "float": np.float32(1.5),
            "bool": np.bool_(True),
            "numpy_scalar": np.int16(3),
            "key": np.asarray(jax.random.key_data(key)),
            "kept": values((2,)),
        },
        kind,
    )
    target = {
        "jax": jnp.zeros(4),
        "numpy": np.zeros(4),
        "int": 0,
        "float": 0.0,
        "bool": False,
        "numpy_scalar": np.int16(0),
        "key": jax.random.key(0),
        "kept": ...,
    }
    got = ot.restore(source, target)
    assert isinstance(got["jax"], jax.Array) and got["jax"].sharding == target["jax"].sharding
    assert type(got["numpy"]) is np.ndarray and got["numpy"].dtype == np.float64 and got["numpy"] is not target["numpy"]
    assert got["int"] == 2**40 and type(got["int"]) is int
    assert got["float"] == 1.5 and type(got["float"]) is float
    assert got["bool"] is True
    assert got["numpy_scalar"] == 3 and type(got["numpy_scalar"]) is np.int16
    assert got["kept"] is ... and source.made["kept"].boxes == []
    assert jnp.array_equal(jax.random.key_data(got["key"]), jax.random.key_data(key))
    assert got["key"].dtype == key.dtype


@pytest.mark.slow
def test_sharded_keys():
    keys = jax.random.split(jax.random.key(1, impl="rbg"), 8)
    placed = jax.device_put(keys, NamedSharding(mesh(), P("x")))
    got = ot.restore(checkpoint({"k": np.asarray(jax.random.key_data(keys))}), {"k": placed})
    assert jnp.array_equal(jax.random.key_data(got["k"]), jax.random.key_data(keys))
    assert got["k"].sharding.is_equivalent_to(placed.sharding, 1)


def test_no_target_is_everything_as_numpy(kind):
    source = checkpoint({"a/b": values((3,)), "c": np.int64(5)}, kind, empties={"none": None, "empty": {}})
    got = ot.restore(source, None)
    assert set(got) == {"a", "c", "none", "empty"} and got["none"] is None and got["empty"] == {}
    np.testing.assert_array_equal(got["a"]["b"], values((3,)))
    assert got["c"].dtype == np.int64 and got["c"].shape == ()


def test_a_leaf_whose_name_is_another_ones_path():
    got = ot.restore(checkpoint({"a": values((1,)), "a/b": values((2,))}), None)
    assert got["a"].shape == (1,) and got["a/b"].shape == (2,)


def test_names_are_those_of_state_dicts():
    params = {"layers": [{"w": jnp.zeros((2,))}, {"w": jnp.zeros((2,))}]}
    state = flax.training.train_state.TrainState.create(apply_fn=None, params=params, tx=optax.adam(0.1))
    plan_names = {
        "step",
        "params/layers/0/w",
        "params/layers/1/w",
        "opt_state/0/count",
        *(f"opt_state/0/{moment}/layers/{layer}/w" for moment in ("mu", "nu") for layer in (0, 1)),
    }
    arrays = {name: values((2,)) if name.endswith("w") else np.int32(4) for name in plan_names}
    got = ot.restore(checkpoint(arrays), state)
    assert type(got) is type(state) and int(got.step) == 4
    assert type(got.opt_state[0]) is type(state.opt_state[0])
    np.testing.assert_array_equal(got.opt_state[0].nu["layers"][1]["w"], values((2,)))
    assert set(arrays) == {entry.name for entry in ot.plan_restore(checkpoint(arrays), state).entries}


def test_a_key_that_holds_a_slash_and_a_clash():
    got = ot.restore(checkpoint({"a/b": values((2,))}), {"a/b": np.zeros(2, np.float32)})
    np.testing.assert_array_equal(got["a/b"], values((2,)))
    problems = failing(
        checkpoint({"a/b": values((2,))}), {"a/b": np.zeros(2, np.float32), "a": {"b": np.zeros(2, np.float32)}}
    )
    assert [problem.kind for problem in problems] == ["duplicate"]


def test_one_device_without_sharding():
    got = ot.restore(checkpoint({"a": values((4,))}), {"a": jax.ShapeDtypeStruct((4,), np.float32)})
    assert got["a"].devices() == {jax.devices()[0]}


def test_unknown_leaf_types_are_named():
    (problem,) = failing(checkpoint({}), {"a": object()})
    assert problem.kind == "target" and "object" in problem.message


def test_arguments_are_checked():
    source = checkpoint({"a": values((4,))})
    with pytest.raises(ValueError, match="verify"):
        ot.restore(source, None, verify="maybe")
    with pytest.raises(ValueError, match="memory_limit_bytes"):
        ot.restore(source, None, memory_limit_bytes=0)


def test_plain_functions_with_and_without_the_keyword():
    seen = []

    def with_keyword(state, target, *, is_resuming=False):
        seen.append(is_resuming)
        return {"b": state["a"]}

    source, target = checkpoint({"a": values((2,))}), {"b": np.zeros(2, np.float32)}
    np.testing.assert_array_equal(ot.restore(source, target, [with_keyword])["b"], values((2,)))
    np.testing.assert_array_equal(
        ot.restore(source, target, lambda state, target: {"b": state["a"]})["b"], values((2,))
    )
    assert seen == [False]


def test_values_that_a_transform_puts_in():
    plan = ot.plan_restore(
        checkpoint({"a": values((2,))}),
        {"a": sharded((2,)), "new": sharded((8,), spec=P("x"))},
        lambda state, target: {**state, "new": np.arange(8, dtype=np.float32)},
    )
    assert {entry.name: entry.action for entry in plan.entries} == {"a": "read", "new": "value"}
    np.testing.assert_array_equal(np.asarray(plan.execute()["new"]), np.arange(8))
