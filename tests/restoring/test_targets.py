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
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from orbax_t5x.restoring.targets import flatten_target
from tests.support.failed_plans import problems
from tests.support.given_values import given_by, key
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


def test_a_numpy_string_comes_back_as_one():
    source = checkpoint({"s": np.asarray(b"text", object), "t": np.asarray(b"text", object)})
    got = ot.restore(source, {"s": np.str_("old"), "t": np.bytes_(b"old")})
    assert type(got["s"]) is np.str_ and got["s"] == "text"
    assert type(got["t"]) is np.bytes_ and got["t"] == b"text"


def test_a_leaf_of_a_foreign_dtype_is_a_problem():
    class Foreign:
        shape = (2,)
        dtype = "weird"

    assert problems(checkpoint({"a": np.zeros(2)}), {"a": Foreign()})[0] == ("target", "a")


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_a_sharding_over_an_abstract_mesh_is_resolved_by_the_mesh_in_use(axis_type):
    source = checkpoint({"a": np.arange(16, dtype=np.float32).reshape(8, 2)})
    explicit = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(explicit):
        target = jax.eval_shape(lambda: {"a": jax.reshard(jnp.zeros((8, 2)), P("x"))})
    used = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    with jax.set_mesh(used):
        got = ot.restore(source, target)
    assert got["a"].sharding == NamedSharding(used, P("x", None))
    assert problems(source, target) == [("sharding", "a")]
    with jax.set_mesh(jax.make_mesh((4,), ("x",), axis_types=(axis_type,))):
        assert problems(source, target) == [("sharding", "a")]


def test_a_partition_spec_takes_the_mesh_in_use():
    """A misspelt axis, or no mesh at all, is a problem of the leaf."""
    source = checkpoint({"a": np.arange(16, dtype=np.float32).reshape(8, 2)})
    target = {"a": jax.ShapeDtypeStruct((8, 2), np.float32, sharding=P("x"))}
    assert problems(source, target) == [("sharding", "a")]
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        assert ot.restore(source, target)["a"].sharding == NamedSharding(mesh, P("x"))
        with pytest.raises(ot.RestorePlanError, match=r"\[sharding\] a: .*modle.*not found in mesh: \('x',\)"):
            ot.restore(source, {"a": jax.ShapeDtypeStruct((8, 2), np.float32, sharding=P("modle"))})


MIXED = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Manual))
MANUAL = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Manual, AxisType.Manual))
EXPLICIT = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))


@pytest.mark.parametrize(
    "sharding",
    [
        NamedSharding(EXPLICIT, P(unreduced={"x"})),
        NamedSharding(MIXED, P("x")),
        NamedSharding(MIXED, P("y")),
        NamedSharding(MANUAL, P()),
    ],
)
def test_a_sharding_that_jax_gives_no_indices_for_is_a_problem(sharding):
    source = checkpoint({"a": np.arange(16, dtype=np.float32).reshape(8, 2), "b": np.zeros(2)})
    place = S((8, 2), np.float32, sharding=sharding)
    with pytest.raises(ot.RestorePlanError) as caught:
        ot.plan_restore(source, {"a": place, "c": S((2,), np.float32)}, strict=False)
    found = {problem.leaf: problem for problem in caught.value.problems}
    assert {leaf: problem.kind for leaf, problem in found.items()} == {"a": "sharding", "c": "missing"}
    assert str(sharding) in found["a"].message
    with pytest.raises(ot.RestorePlanError):
        ot.restore(checkpoint({}), {"a": place}, fallback_for=[".*"], fallback={"a": np.zeros((8, 2), np.float32)})


HOW = pytest.mark.parametrize("how", ["transform", "merge", "tree", "function"])


@HOW
@pytest.mark.parametrize("shape", [(), (4,)])
def test_a_typed_key_fills_a_typed_key(how, shape):
    source, transforms, keywords = given_by(how, key(shape))
    got = ot.restore(source, {"k": S(shape, key().dtype)}, transforms, **keywords)
    assert got["k"].dtype == key().dtype
    np.testing.assert_array_equal(jax.random.key_data(got["k"]), jax.random.key_data(key(shape)))


@pytest.mark.parametrize("how", ["transform", "tree", "merge"])
def test_an_abstract_leaf_is_a_problem(how):
    source, transforms, keywords = given_by(how, S((2,), np.float32))
    ((kind, leaf),) = problems(source, {"k": S((2,), np.float32)}, transforms, **keywords)
    assert leaf == "k" and kind == ("fallback" if how == "tree" else "transform")


KEYS = ("threefry2x32", "rbg", "unsafe_rbg")


@pytest.fixture
def saved(tmp_path):
    """Saves a tree as stock Orbax does."""

    def save(tree):
        with ocp.StandardCheckpointer() as saver:
            saver.save(tmp_path / "saved", tree)
        return tmp_path / "saved"

    return save


def the_problem(source, target, *transforms):
    with pytest.raises(ot.RestorePlanError) as caught:
        ot.plan_restore(source, target, transforms)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize("wanted", KEYS)
@pytest.mark.parametrize("stored", KEYS)
@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_stored_key_of_another_implementation_is_a_problem(saved, stored, wanted, shape):
    """Whether its data have another shape or the same: what has to change is the implementation."""
    keys = key(shape, impl=stored)
    source, target = saved({"k": keys}), {"k": S(shape, key(impl=wanted).dtype)}
    if stored == wanted:
        np.testing.assert_array_equal(jax.random.key_data(ot.restore(source, target)["k"]), jax.random.key_data(keys))
        return
    problem = the_problem(source, target)
    assert problem.kind == "dtype" and repr(stored) in problem.message and repr(wanted) in problem.message
    called = str(problem.fix).removeprefix("give the target keys of that implementation: ")
    assert eval(called, {"jax": jax, "seed": 0}).dtype == keys.dtype


@pytest.mark.slow
def test_more_or_fewer_keys_keep_their_data_whole(saved):
    keys = key((3,))
    source = saved({"k": keys})
    problem = the_problem(source, {"k": S((2,), keys.dtype)})
    assert problem.kind == "shape" and "shape (3, 2)" in problem.message
    part = ot.restore(source, {"k": S((2,), keys.dtype)}, ot.transforms.Slice("k", np.s_[:2]))["k"]
    np.testing.assert_array_equal(jax.random.key_data(part), jax.random.key_data(keys[:2]))
    new = key((5,))[::-1]
    problem = the_problem(source, {"k": new})
    call = "ot.transforms.Pad('k', [5], value=ot.transforms.FALLBACK)"
    assert problem.kind == "shape" and "transforms" not in str(problem.fix)
    for fallback in ({"k": new}, lambda: {"k": key((5,))[::-1]}):
        grown = ot.restore(source, {"k": new}, eval(call, {"ot": ot}), fallback=fallback)["k"]
        expected = jnp.concatenate([keys, new[3:]])
        np.testing.assert_array_equal(jax.random.key_data(grown), jax.random.key_data(expected))


@pytest.mark.parametrize(
    "data, impls", [((2, 4), "'rbg' or 'unsafe_rbg'"), ((2, 2), "'threefry2x32'"), ((2, 3), None), ((), None)]
)
def test_key_data_whose_implementation_is_not_recorded_are_never_cut(saved, data, impls):
    source = saved({"k": np.ones(data, np.uint32)})
    other = "rbg" if data[-1:] == (2,) else "threefry2x32"
    problem = the_problem(source, {"k": S((2,), key(impl=other).dtype)})
    assert problem.kind == "shape" and "PRNG key data of shape" in problem.message
    assert "Slice" not in str(problem.fix) and "Pad" not in str(problem.fix)
    if impls is not None:
        called = str(problem.fix).removeprefix(
            f"give the target keys of the implementation that made the data, {impls}: "
        )
        assert jax.random.key_data(eval(called, {"jax": jax, "seed": 0})).shape == data[-1:]


def test_typed_keys_are_named_where_the_target_wants_other_data(saved):
    source = saved({"k": key((3,), impl="rbg")})
    problem = the_problem(source, {"k": S((3, 2), np.uint32)})
    assert problem.kind == "shape" and "PRNG keys of 'rbg'" in problem.message
    assert "Slice" not in str(problem.fix) and "jax.random.key(seed, impl='rbg')" in str(problem.fix)
    data = ot.restore(source, {"k": S((3, 4), np.uint32)})["k"]
    np.testing.assert_array_equal(data, jax.random.key_data(key((3,), impl="rbg")))


def test_types_of_scalars_are_leaves_and_abstract_ones_are_problems():
    source = checkpoint({"a": np.asarray(3), "b": np.asarray(2.5, np.float32), "c": np.asarray(True)})
    got = ot.restore(source, {"a": int, "b": np.float32, "c": bool})
    assert got == {"a": 3, "b": 2.5, "c": True} and [type(leaf) for leaf in got.values()] == [int, np.float32, bool]
    assert problems(source, {"a": np.generic, "b": 0.0, "c": False}) == [("target", "a")]
