"""Plans and their execution, over checkpoints in memory: NumPy is the oracle, and leaves record what is read from
them."""

import threading

import flax.training.train_state
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from orbax_t5x.errors import CorruptCheckpointError
from tests.support.memory_checkpoint import AwaitedLeaf, BlockedLeaf, FailingLeaf, checkpoint


def mesh(shape=(8,), names=("x",)):
    return Mesh(np.asarray(jax.devices()).reshape(shape), names)


REPLICATED = P()


def sharded(shape, dtype=np.float32, spec=REPLICATED, on=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(on if on is not None else mesh(), spec))


def values(shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


SPECS = {"rows": P("x"), "columns": P(None, "x"), "replicated": P()}


@pytest.fixture(params=[BlockedLeaf, AwaitedLeaf])
def kind(request):
    return request.param


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


def test_each_box_is_read_once_however_many_devices_want_it(kind):
    source = checkpoint({"a": values((8, 4)), "b": values((8, 4))}, kind)
    ot.restore(source, {"a": sharded((8, 4)), "b": sharded((8, 4), spec=P(None, "x"), on=mesh((4, 2), ("y", "x")))})
    assert source.made["a"].boxes == [((0, 8), (0, 4))]
    assert sorted(source.made["b"].boxes) == [((0, 8), (0, 2)), ((0, 8), (2, 4))]


def test_two_targets_of_one_source_read_it_once(kind):
    source = checkpoint({"a": values((8, 4))}, kind)

    def twice(state, target):
        return {"x": state["a"], "y": state["a"]}

    got = ot.restore(source, {"x": sharded((8, 4)), "y": np.zeros((8, 4), np.float32)}, twice)
    np.testing.assert_array_equal(np.asarray(got["x"]), got["y"])
    assert source.made["a"].boxes == [((0, 8), (0, 4))]


def test_only_what_the_target_names_is_read(kind):
    source = checkpoint({"a": values((8,)), "b": values((8,))}, kind)
    plan = ot.plan_restore(source, {"a": np.zeros(8, np.float32)}, strict=False)
    assert plan.unused == ("b",) and plan.bytes_to_read == 32
    plan.execute()
    assert source.made["b"].boxes == [] and plan.report.bytes_read == 32


def test_planning_reads_nothing(kind):
    source = checkpoint({"a": values((8,))}, kind)
    plan = ot.plan_restore(source, {"a": sharded((8,))})
    str(plan), plan.to_json(), plan.explain("a"), plan._repr_html_(), plan.bytes_to_read
    assert source.made["a"].boxes == []


# -- what a target may hold


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


def test_memory_kinds_and_layouts_are_used():
    pinned = NamedSharding(mesh(), P("x"), memory_kind="unpinned_host")
    got = ot.restore(checkpoint({"a": values((8,))}), {"a": jax.ShapeDtypeStruct((8,), np.float32, sharding=pinned)})
    assert got["a"].sharding.memory_kind == "unpinned_host"
    columns_first = Format(Layout(major_to_minor=(1, 0)), NamedSharding(mesh(), P("x")))
    array = values((8, 4))
    for target in (
        jax.ShapeDtypeStruct((8, 4), np.float32, sharding=columns_first),
        jax.device_put(array, columns_first),
    ):
        got = ot.restore(checkpoint({"a": array}), {"a": target})["a"]
        assert got.format.layout.major_to_minor == (1, 0)
        np.testing.assert_array_equal(np.asarray(got), array)


def test_buffers_are_adopted_not_copied():
    got = ot.restore(checkpoint({"a": values((8, 512))}), {"a": sharded((8, 512))})
    assert len({shard.data.unsafe_buffer_pointer() for shard in got["a"].addressable_shards}) == 1


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (0, 8)])
def test_scalars_and_empties(kind, shape):
    array = values(shape)
    got = ot.restore(checkpoint({"a": array}, kind), {"a": sharded(shape)})
    assert got["a"].shape == shape
    np.testing.assert_array_equal(np.asarray(got["a"]), array)


# -- dtypes


def test_lossless_conversions_are_done(kind):
    array = values((8, 4), ml_dtypes.bfloat16)
    got = ot.restore(checkpoint({"a": array}, kind), {"a": sharded((8, 4), np.float32, P("x"))})
    np.testing.assert_array_equal(np.asarray(got["a"]), array.astype(np.float32))


def test_large_casts_go_in_slabs(kind, monkeypatch):
    monkeypatch.setattr("orbax_t5x.restoring.execute.stages.SCRATCH_BYTES", 100)
    array = values((37, 5))
    source = checkpoint({"a": array}, kind)
    got = ot.restore(source, {"a": np.zeros((37, 5), np.float64)})
    np.testing.assert_array_equal(got["a"], array)
    assert len(source.made["a"].boxes) > 3 and sum(stop - start for (start, stop), _ in source.made["a"].boxes) == 37


def test_lossy_conversions_are_problems_unless_asked_for():
    source, target = checkpoint({"params/a": values((4,))}), {"params": {"a": sharded((4,), jnp.bfloat16)}}
    (problem,) = failing(source, target)
    assert (problem.kind, problem.leaf) == ("dtype", "params/a")
    assert "float32" in problem.message and "bfloat16" in problem.message and "allow_lossy_cast" in str(problem.fix)
    expected = values((4,)).astype(ml_dtypes.bfloat16)
    for keywords in ({"allow_lossy_cast": True}, {"dtype": jnp.bfloat16}):
        np.testing.assert_array_equal(np.asarray(ot.restore(source, target, **keywords)["params"]["a"]), expected)


def test_dtype_is_for_model_parameters_alone():
    source = checkpoint({"target/w": values((4,)), "state/step": np.int32(1100001), "state/v": values((4,))})
    target = {
        "target": {"w": sharded((4,))},
        "state": {"step": sharded((), np.int32), "v": sharded((4,))},
    }
    got = ot.restore(source, target, dtype=jnp.bfloat16)
    assert got["target"]["w"].dtype == jnp.bfloat16 and got["state"]["v"].dtype == np.float32
    assert int(got["state"]["step"]) == 1100001
    (problem,) = failing(checkpoint({"a": values((4,))}), {"a": sharded((4,))}, dtype=jnp.bfloat16)
    assert problem.kind == "dtype" and "Cast" in str(problem.fix)


@pytest.mark.parametrize(
    ("array", "dtype"), [(values((2,)), np.int32), (values((2,), np.complex64), np.float32), (np.arange(2), np.bool_)]
)
def test_some_conversions_always_need_cast(array, dtype):
    (problem,) = failing(checkpoint({"a": array}), {"a": np.zeros(2, dtype)}, allow_lossy_cast=True)
    assert problem.kind == "dtype" and "Cast" in str(problem.fix)


def test_a_step_may_narrow_when_its_value_fits():
    target = {"state": {"step": sharded((), np.int32)}}
    assert int(ot.restore(checkpoint({"state/step": np.int64(1000000)}), target)["state"]["step"]) == 1000000
    with pytest.raises(ot.errors.CheckpointError, match="state/step"):
        ot.restore(checkpoint({"state/step": np.int64(2**33)}), target)


def test_64_bit_targets_name_the_setting():
    (problem,) = failing(checkpoint({"a": values((2,), np.float64)}), {"a": sharded((2,), np.float64)})
    assert "jax_enable_x64" in problem.message and "jax_enable_x64" in str(problem.fix)


def test_strings_restore_as_numpy_only():
    array = np.array([b"a", b"\xff\0"], object)
    got = ot.restore(checkpoint({"s": array}), {"s": np.empty(2, object)})
    assert got["s"].tolist() == [b"a", b"\xff\0"]
    (problem,) = failing(checkpoint({"s": array}), {"s": sharded((2,))})
    assert problem.kind == "dtype"


# -- problems


def failing(source, target, *arguments, **keywords):
    with pytest.raises(ot.RestorePlanError) as caught:
        ot.plan_restore(source, target, *arguments, **keywords)
    assert isinstance(caught.value, ValueError)
    return caught.value.problems


def test_all_problems_come_at_once():
    source = checkpoint({"shape": values((3,)), "dtype": values((2,)), "left": values((1,)), "sharding": values((7,))})
    target = {
        "shape": np.zeros(4, np.float32),
        "dtype": np.zeros(2, np.int32),
        "missing": np.zeros(2, np.float32),
        "sharding": sharded((7,), spec=P("x")),
    }
    problems = {problem.kind: problem for problem in failing(source, target)}
    assert set(problems) == {"shape", "dtype", "missing", "sharding", "leftover"}
    assert "(3,)" in problems["shape"].message and "(4,)" in problems["shape"].message
    assert "left" in problems["leftover"].message and "strict=False" in str(problems["leftover"].fix)
    assert "(7,)" in problems["sharding"].message
    assert all(problem.fix for problem in problems.values())
    assert not any(leaf.boxes for leaf in source.made.values())


def test_a_missing_leaf_names_the_closest_and_the_rule():
    (problem,) = failing(
        checkpoint({"encoder/kernel_": values((2,))}), {"encoder": {"kernel": np.zeros(2, np.float32)}}, strict=False
    )
    assert problem.kind == "missing" and "encoder/kernel_" in problem.message
    assert "AssignmentMap" in str(problem.fix) and "encoder/kernel_" in str(problem.fix)


def test_untranslated_bundle_names_say_translate():
    source = checkpoint({"encoder/block_000/layer_000/SelfAttention/q": values((2, 2))}, format="tf_bundle")
    problems = failing(source, {"target": {"encoder": np.zeros((2, 2), np.float32)}})
    assert "Translate()" in str(problems[0].fix)


def test_unknown_leaf_types_are_named():
    (problem,) = failing(checkpoint({}), {"a": object()})
    assert problem.kind == "target" and "object" in problem.message


def test_a_read_that_fails_is_the_error_that_comes_out():
    error = CorruptCheckpointError("crc", path="/memory", leaf="bad")
    leaf = FailingLeaf("bad", values((4,)), error)
    source = checkpoint({"bad": leaf, **{f"good{index}": values((4,)) for index in range(50)}}, AwaitedLeaf)
    target = {name: np.zeros(4, np.float32) for name in source.made}
    with pytest.raises(CorruptCheckpointError) as caught:
        ot.restore(source, target)
    assert caught.value is error
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("orbax_t5x-restore")]
    np.testing.assert_array_equal(
        ot.restore(source, {"good7": np.zeros(4, np.float32)}, strict=False)["good7"], values((4,))
    )


def test_arguments_are_checked():
    source = checkpoint({"a": values((4,))})
    with pytest.raises(ValueError, match="verify"):
        ot.restore(source, None, verify="maybe")
    with pytest.raises(ValueError, match="memory_limit_bytes"):
        ot.restore(source, None, memory_limit_bytes=0)


# -- fallback


def test_fallback_tree_and_function():
    source = checkpoint({"a": values((8,))})
    target = {"a": sharded((8,), spec=P("x")), "b": sharded((8,), spec=P("x")), "c": np.zeros(2, np.float32)}
    tree = {"a": jnp.ones(8), "b": jnp.full((8,), 2.0), "c": jnp.full((2,), 3.0)}
    for fallback in (tree, lambda: tree):
        plan = ot.plan_restore(source, target, fallback=fallback)
        assert [entry.action for entry in plan.entries] == ["read", "fallback", "fallback"]
        got = plan.execute()
        np.testing.assert_array_equal(np.asarray(got["a"]), values((8,)))
        np.testing.assert_array_equal(np.asarray(got["b"]), np.full(8, 2.0))
        assert got["b"].sharding == target["b"].sharding and type(got["c"]) is np.ndarray


def test_only_missing_leaves_of_a_fallback_function_are_computed():
    text = []

    def init():
        big = jnp.sin(jnp.arange(8.0))
        jax.debug.callback(lambda value: text.append("computed"), big[0])
        return {"a": big, "b": jnp.zeros(2)}

    got = ot.restore(checkpoint({"a": values((8,))}), {"a": sharded((8,)), "b": sharded((2,))}, fallback=init)
    np.testing.assert_array_equal(np.asarray(got["b"]), np.zeros(2))


def test_fallback_problems():
    source, target = checkpoint({}), {"a": sharded((2,))}
    (problem,) = failing(source, target, fallback={"a": jnp.zeros(3)})
    assert problem.kind == "shape" and "fallback" in problem.message
    kinds = [
        problem.kind for problem in failing(source, target, fallback=lambda: {"a": np.zeros(int(jnp.ones(())) + 1)})
    ]
    assert "fallback" in kinds
    assert [problem.kind for problem in failing(source, target, fallback={"b": jnp.zeros(3)})] == ["missing"]


# -- transforms


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


def test_what_a_transform_takes_out_is_dropped_not_left_over():
    plan = ot.plan_restore(
        checkpoint({"a": values((2,)), "b": values((2,))}),
        {"a": sharded((2,))},
        lambda state, target: {"a": state["a"]},
    )
    assert plan.dropped == ("b",) and plan.unused == ()


def test_several_sources():
    got = ot.restore(
        {"one": checkpoint({"a": values((2,))}), "two": checkpoint({"a": values((2,), seed=1)})},
        {"x": np.zeros(2, np.float32), "y": np.zeros(2, np.float32)},
        lambda state, target: {"x": state["two"]["a"], "y": state["one"]["a"]},
    )
    np.testing.assert_array_equal(got["x"], values((2,), seed=1))
    np.testing.assert_array_equal(got["y"], values((2,)))


# -- budget and progress


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=30),
    limit=st.integers(1, 2000),
    kind=st.sampled_from([BlockedLeaf, AwaitedLeaf]),
)
def test_any_budget_gives_the_same_values(sizes, limit, kind):
    arrays = {f"a{index}": values((size,), seed=index) for index, size in enumerate(sizes)}
    got = ot.restore(checkpoint(arrays, kind), None, memory_limit_bytes=limit)
    for name, array in arrays.items():
        np.testing.assert_array_equal(got[name], array)


def test_progress_counts_to_the_total_from_one_thread_at_a_time(kind):
    arrays = {f"a{index}": values((100,), seed=index) for index in range(40)}
    calls, busy = [], threading.Lock()

    def progress(done, total, leaf):
        assert busy.acquire(blocking=False)
        calls.append((done, total, leaf))
        busy.release()

    ot.restore(checkpoint(arrays, kind), None, progress=progress)
    assert [done for done, _, _ in calls] == sorted(done for done, _, _ in calls)
    assert calls[-1][:2] == (16000, 16000) and {leaf for _, _, leaf in calls} == set(arrays)


def test_a_progress_that_raises_stops_the_restore():
    def progress(done, total, leaf):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ot.restore(checkpoint({"a": values((4,))}), None, progress=progress)


# -- provenance


def test_transforms_happen_once():
    rules = [ot.transforms.Rename([("a", "b")])]
    target = {"b": np.zeros(2, np.float32)}
    plan = ot.plan_restore(checkpoint({"a": values((2,))}), target, rules)
    metadata = {"custom_metadata": {"orbax_t5x": {"provenance": list(plan.provenance)}}}
    saved = checkpoint({"b": values((2,))}, metadata=metadata)
    again = ot.plan_restore(saved, target, rules)
    assert again.provenance == plan.provenance
    np.testing.assert_array_equal(again.execute()["b"], values((2,)))
    assert "is_resuming=False" in again.warnings[0]
    # A new run from another one's checkpoint: what was applied before does not matter, and is remembered.
    other = ot.plan_restore(saved, {"c": np.zeros(2, np.float32)}, [ot.transforms.Rename([("b", "c")])])
    assert [entry["transforms"] for entry in other.provenance] == [["Rename((('a', 'b'),))"], ["Rename((('b', 'c'),))"]]
    np.testing.assert_array_equal(other.execute()["c"], values((2,)))
    with pytest.raises(ot.RestorePlanError):
        ot.plan_restore(saved, target, rules, is_resuming=False)
