"""One leaf of a target: its dtype, sharding and kind of key."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from tests.support.failed_plans import problems
from tests.support.given_values import given_by, key
from tests.support.memory_checkpoint import checkpoint

S = jax.ShapeDtypeStruct


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
    assert problem.kind == "shape" and "ot.transforms.Slice('k', np.s_[:2])" in str(problem.fix)
    part = ot.restore(source, {"k": S((2,), keys.dtype)}, ot.transforms.Slice("k", np.s_[:2]))["k"]
    np.testing.assert_array_equal(jax.random.key_data(part), jax.random.key_data(keys[:2]))
    new = key((5,))[::-1]
    problem = the_problem(source, {"k": new})
    call = "ot.transforms.Pad('k', [5], value=ot.transforms.FALLBACK)"
    assert problem.kind == "shape" and call in str(problem.fix) and "value=0" not in str(problem.fix)
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
