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
from flax import nnx
from flax.training.train_state import TrainState
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from orbax_t5x.restoring.targets import flatten_target
from tests.support.memory_checkpoint import checkpoint
from tests.support.training import fresh

S = jax.ShapeDtypeStruct


def mesh(devices=None, names=("x",)):
    devices = jax.devices() if devices is None else devices
    return Mesh(np.asarray(devices).reshape((-1,) + (1,) * (len(names) - 1)), names)


def problems(*arguments, **keywords):
    with pytest.raises(ot.RestorePlanError) as caught:
        ot.plan_restore(*arguments, **keywords)
    return [(problem.kind, problem.leaf) for problem in caught.value.problems]


# -- names


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


# -- states inside containers


def test_an_nnx_state_inside_a_dict_has_names_without_value(tmp_path):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    state = nnx.state(model)
    abstract = nnx.eval_shape(lambda: nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(1))))
    target = {"model": abstract, "step": 0}
    assert set(flatten_target(target).leaves) == {"model/bias", "model/kernel", "step"}
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "stock", {"model": state, "step": 7})
        saver.save(tmp_path / "pure", {"model": nnx.to_pure_dict(state), "step": 7})
    for name in ("stock", "pure"):
        got = ot.restore(tmp_path / name, target)
        assert got["step"] == 7 and isinstance(got["model"], nnx.State)
        assert isinstance(got["model"]["kernel"], nnx.Param)
        np.testing.assert_array_equal(got["model"]["kernel"].get_value(), model.kernel.get_value())


def test_an_abstract_nnx_module_comes_back_as_a_module_that_computes():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    source = checkpoint({f"m/{name}": np.asarray(model_value) for name, model_value in _linear(model).items()})
    abstract = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(1)))
    got = ot.restore(source, {"m": abstract})["m"]
    inputs = jnp.ones((4, 2))
    np.testing.assert_array_equal(got(inputs), model(inputs))


def test_states_and_modules_stand_in_sequences_and_in_fallbacks():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    values = {name: np.asarray(value) for name, value in _linear(model).items()}
    source = checkpoint({f"models/{i}/{name}": value + i for i in range(2) for name, value in values.items()})
    given = nnx.Linear(2, 3, rngs=nnx.Rngs(1))
    before = np.asarray(given.kernel.get_value())
    got = ot.restore(source, {"models": (nnx.state(given), given)})["models"]
    assert type(got[0]) is nnx.State and type(got[1]) is nnx.Linear and got[1] is not given
    for i, kernel in enumerate((got[0]["kernel"].get_value(), got[1].kernel.get_value())):
        np.testing.assert_array_equal(kernel, values["kernel"] + i)
    np.testing.assert_array_equal(given.kernel.get_value(), before)
    abstract = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(1)))
    fallbacks = (
        {"new": model},
        {"new": nnx.state(model)},
        lambda: {"new": nnx.Linear(2, 3, rngs=nnx.Rngs(0))},
        lambda: {"new": nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))},
    )
    for fallback in fallbacks:
        target = {"models": [..., nnx.state(abstract)], "new": abstract}
        new = ot.restore(source, target, fallback=fallback)["new"]
        np.testing.assert_allclose(new.kernel.get_value(), values["kernel"], rtol=1e-6)


def test_parts_of_an_nnx_state_may_be_placeholders():
    state = nnx.state(nnx.Dict(a=nnx.Linear(2, 3, rngs=nnx.Rngs(0)), b=nnx.Linear(2, 3, rngs=nnx.Rngs(0))))
    source = checkpoint({name: np.ones(leaf.shape, leaf.dtype) for name, leaf in flatten_target(state).leaves.items()})
    state["a"] = ...
    state["b"]["bias"] = state["b"]["bias"].replace(...)
    got = ot.restore(source, {"in": state}, lambda names, _: {"in": names})["in"]
    assert got["a"] is ... and got["b"]["bias"].get_value() is ...
    np.testing.assert_array_equal(got["b"]["kernel"].get_value(), np.ones((2, 3)))


def _linear(model):
    return {"kernel": model.kernel.get_value(), "bias": model.bias.get_value()}


def test_dtype_concerns_the_parameters_of_an_nnx_state_inside_a_dict():
    abstract = {"m": nnx.eval_shape(lambda: nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(1))))}
    source = checkpoint({"m/kernel": np.ones((2, 3), np.float32), "m/bias": np.ones(3, np.float32)})
    assert ot.restore(source, abstract, dtype="bfloat16")["m"]["bias"].get_value().dtype == jnp.bfloat16


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


# -- leaves


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
        ot.restore(checkpoint({}), {"a": place}, fallback={"a": np.zeros((8, 2), np.float32)})


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


# -- dtypes


def test_dtype_lets_no_integer_and_no_complex_number_through():
    source = checkpoint(
        {
            "params/w": np.arange(300, 312, dtype=np.int32),
            "params/c": np.ones(2, np.complex128),
            "params/i": np.arange(2**24, 2**24 + 2, dtype=np.int32),
            "params/f": np.ones(2, np.float32),
        }
    )
    target = {
        "params": {
            "w": np.zeros(12, np.int8),
            "c": np.zeros(2, np.complex64),
            "i": np.zeros(2, np.float32),
            "f": np.zeros(2, np.float32),
        }
    }
    expected = [("dtype", "params/c"), ("dtype", "params/i"), ("dtype", "params/w")]
    assert sorted(problems(source, target, dtype="bfloat16")) == expected
    assert sorted(problems(source, target)) == expected
    got = ot.restore(source, target, allow_lossy_cast=True)
    np.testing.assert_array_equal(got["params"]["w"], np.arange(300, 312, dtype=np.int32).astype(np.int8))


@pytest.mark.parametrize(
    "target", [None, {"other": {"w": np.zeros(2, np.float32)}}, {"params": {"n": np.zeros(2, int)}}]
)
def test_dtype_without_floating_point_parameters_says_to_use_cast(target):
    source = checkpoint(
        {"other/w": np.zeros(2, np.float32)} if target is None or "other" in target else {"params/n": np.zeros(2, int)}
    )
    with pytest.raises(ot.RestorePlanError, match=r"ot\.transforms\.Cast"):
        ot.plan_restore(source, target, dtype="bfloat16")


def test_dtype_concerns_the_parameters_of_a_restore_of_everything():
    source = checkpoint({"params/w": np.ones(2, np.float32), "state/v": np.ones(2, np.float32)})
    got = ot.restore(source, None, dtype="bfloat16")
    assert got["params"]["w"].dtype == jnp.bfloat16 and got["state"]["v"].dtype == np.float32


# -- values that a transform or a fallback gives


def given_by(how, value):
    """(source, transforms, keywords) by which a target leaf `k` gets a value."""
    source = checkpoint({"other": np.zeros(1, np.float32)})
    keep = [ot.transforms.Drop(["other"])]
    if how == "transform":
        return source, [lambda state, target: {"k": value}], {}
    if how == "merge":
        return source, [*keep, ot.transforms.Merge({"k": value})], {}
    if how == "tree":
        return source, keep, {"fallback": {"k": value}}
    return source, keep, {"fallback": lambda: {"k": value}}


HOW = pytest.mark.parametrize("how", ["transform", "merge", "tree", "function"])


def key(shape=(), impl="threefry2x32"):
    return jax.random.split(jax.random.key(5, impl=impl), shape) if shape else jax.random.key(5, impl=impl)


@HOW
@pytest.mark.parametrize("shape", [(), (4,)])
def test_a_typed_key_fills_a_typed_key(how, shape):
    source, transforms, keywords = given_by(how, key(shape))
    got = ot.restore(source, {"k": S(shape, key().dtype)}, transforms, **keywords)
    assert got["k"].dtype == key().dtype
    np.testing.assert_array_equal(jax.random.key_data(got["k"]), jax.random.key_data(key(shape)))


@HOW
@pytest.mark.parametrize(
    "value, target, kind",
    [
        (key(), S((4,), key().dtype), "shape"),
        (key(impl="rbg"), S((), key().dtype), "dtype"),
        (key(impl="unsafe_rbg"), S((), key(impl="rbg").dtype), "dtype"),
        (key(), S((2,), np.uint32), "dtype"),
        (key(), np.zeros(2, np.uint32), "dtype"),
        (np.array([1.7, 2.9], np.float32), S((2,), np.int32), "dtype"),
        (np.array([300, 301], np.int32), S((2,), np.float16), "dtype"),
        (np.ones(3, np.float32), S((2,), np.float32), "shape"),
        (2.5, S((), np.int32), "dtype"),
    ],
)
def test_what_does_not_fit_is_the_same_problem_wherever_it_comes_from(how, value, target, kind):
    source, transforms, keywords = given_by(how, value)
    assert problems(source, {"k": target}, transforms, **keywords) == [(kind, "k")]


@HOW
def test_an_integer_that_does_not_fit_is_a_problem(how):
    source, transforms, keywords = given_by(how, 300)
    assert problems(source, {"k": S((), np.int8)}, transforms, **keywords) == [("dtype", "k")]


@pytest.mark.parametrize("how", ["tree", "function"])
def test_raw_key_data_of_a_fallback_is_no_typed_key(how):
    source, transforms, keywords = given_by(how, jax.random.PRNGKey(0))
    assert problems(source, {"k": S((), key().dtype)}, transforms, **keywords) == [("dtype", "k")]


@pytest.mark.parametrize("how", ["tree", "function"])
def test_allow_lossy_cast_never_makes_integers_of_a_fallbacks_floats(how):
    source, transforms, keywords = given_by(how, np.array([1.7, 2.9], np.float32))
    keywords["allow_lossy_cast"] = True
    assert problems(source, {"k": S((2,), np.int32)}, transforms, **keywords) == [("dtype", "k")]


@HOW
@pytest.mark.parametrize("value", [3, 3.5, 2**24 + 1])
@pytest.mark.parametrize("target", ["float32", "bfloat16", "int32", "complex64"])
def test_python_scalars_are_weakly_typed_as_in_jax(how, value, target):
    like = jnp.zeros((), target)
    with jax.numpy_dtype_promotion("standard"):
        expected = like + value
    source, transforms, keywords = given_by(how, value)
    if expected.dtype != like.dtype:
        assert problems(source, {"k": S((), target)}, transforms, **keywords) == [("dtype", "k")]
    else:
        got = ot.restore(source, {"k": S((), target)}, transforms, **keywords)["k"]
        assert got.dtype == like.dtype
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("how", ["transform", "tree", "merge"])
def test_an_abstract_leaf_is_a_problem(how):
    source, transforms, keywords = given_by(how, S((2,), np.float32))
    ((kind, leaf),) = problems(source, {"k": S((2,), np.float32)}, transforms, **keywords)
    assert leaf == "k" and kind == ("fallback" if how == "tree" else "transform")


# -- where a fallback function's leaves lie


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

    got = ot.restore(checkpoint({}), target, fallback=init)
    for name, value in init().items():
        np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(value))
    assert got["front"].sharding == target["front"].sharding and got["back"].sharding == target["back"].sharding
    assert got["layout"].format.layout.major_to_minor == (1, 0)
    assert got["single"].devices() == {jax.devices()[0]}
    assert type(got["wide"]) is np.ndarray and got["wide"].dtype == np.int64
    assert type(got["scalar"]) is np.float64


# -- several sources


def test_two_sources_whose_leaves_have_one_name_are_a_problem():
    source = {"a": checkpoint({"b/x": np.zeros(2)}), "a/b": checkpoint({"x": np.ones(2)})}
    assert problems(source, None) == [("duplicate", "a/b/x")]


@pytest.mark.parametrize("name", [0, "", None])
def test_a_source_is_named_by_text(name):
    with pytest.raises(ValueError, match="a source's name is text"):
        ot.restore({name: checkpoint({"x": np.zeros(2)}), "b": checkpoint({"x": np.zeros(2)})}, None)


# -- stored keys


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


def test_more_or_fewer_keys_keep_their_data_whole(saved):
    keys = key((3,))
    source = saved({"k": keys})
    problem = the_problem(source, {"k": S((2,), keys.dtype)})
    assert problem.kind == "shape" and "ot.transforms.Slice('k', np.s_[:2, :])" in str(problem.fix)
    part = ot.restore(source, {"k": S((2,), keys.dtype)}, ot.transforms.Slice("k", np.s_[:2, :]))["k"]
    np.testing.assert_array_equal(jax.random.key_data(part), jax.random.key_data(keys[:2]))
    new = key((5,))[::-1]
    problem = the_problem(source, {"k": new})
    call = "ot.transforms.Pad('k', [5, None], value=ot.transforms.FALLBACK)"
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
