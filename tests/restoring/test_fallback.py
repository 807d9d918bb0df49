"""A fallback function gives what calling it gives: the tree that it returns is the oracle of values and problems."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from orbax_t5x.trees.flat import flatten
from tests.support.memory_checkpoint import checkpoint

S = jax.ShapeDtypeStruct
MESH = Mesh(np.asarray(jax.devices()), ("x",))
SIZE = 8
DTYPES = (
    *("bool", "int4", "int8", "uint8", "int32", "uint32", "int64", "uint64"),
    *("float8_e4m3fn", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)


def targets(shape):
    """Leaves of every dtype and place, and a scalar of each type where there is one element."""
    for name in DTYPES:
        dtype = jnp.dtype(name)
        yield f"numpy {name}", np.zeros(shape, dtype)
        yield f"single {name}", S(shape, dtype)
        yield f"sharded {name}", S(shape, dtype, sharding=NamedSharding(MESH, P("x") if shape else P()))
    if not shape:
        for scalar in (False, 0, 0.0, 0j, np.int64(0), np.float64(0), np.float32(0), np.uint8(0)):
            yield f"scalar {type(scalar).__name__}", scalar


MADE = {
    "int64": lambda: np.full(SIZE, 2**40),
    "uint64": lambda: np.full(SIZE, 2**63 + 1, np.uint64),
    "float64": lambda: np.full(SIZE, 1 / 3),
    "complex128": lambda: np.full(SIZE, 1 / 3 + 1j / 3),
    "int32": lambda: np.full(SIZE, 300, np.int32),
    "bool": lambda: np.ones(SIZE, bool),
    "weak int": lambda: jnp.full(SIZE, 300),
    "weak float": lambda: jnp.full(SIZE, 70000.0),
    "weak third": lambda: jnp.full(SIZE, 1 / 3),
    "weak complex": lambda: jnp.full(SIZE, 1j / 3),
    # No division: compiled, some versions of XLA multiply by the reciprocal.
    "strong": lambda: jnp.arange(SIZE, dtype=jnp.float32) * 0.3,
    "narrow": lambda: jnp.full(SIZE, 1.5, jnp.bfloat16),
    "converted": lambda: jnp.asarray(np.full(SIZE, 3)),
    "jitted": lambda: jax.jit(lambda: np.full(SIZE, 3))(),
    "Python int": lambda: 300,
    "Python wide": lambda: 2**40,
    "Python negative": lambda: -1,
    "Python float": lambda: 0.1,
    "Python complex": lambda: 0.1j,
    "Python bool": lambda: True,
    "NumPy int": lambda: np.int64(2**40),
    "NumPy float": lambda: np.float64(0.1),
    "weak scalar": lambda: jnp.asarray(300),
    "weak tenth": lambda: jnp.asarray(0.1),
    "key data": lambda: jax.random.PRNGKey(0),
    "key": lambda: jax.random.key(0),
}


def comparable(value):
    """As an array of a dtype that NumPy knows NaN of."""
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype.kind == "V" else array


def attempt(target, fallback, **keywords):
    """What can be restored, and the problems with the rest as text."""
    wrong = {}
    try:
        ot.plan_restore(checkpoint({}), target, fallback_for=[".*"], fallback=fallback, **keywords)
    except ot.RestorePlanError as error:
        wrong = {(problem.leaf, problem.kind): str(problem) for problem in error.problems}
    left = {name: leaf for name, leaf in target.items() if name not in {leaf for leaf, _ in wrong}}
    return ot.restore(checkpoint({}), left, fallback_for=[".*"], fallback=fallback, **keywords), wrong


@pytest.mark.parametrize("x64, lossy", [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("made", MADE)
def test_a_function_gives_what_its_tree_gives(made, x64, lossy):
    keywords = {"allow_lossy_cast": True} if lossy else {}
    with jax.enable_x64(True) if x64 else contextlib.nullcontext():
        target = dict(targets(np.shape(MADE[made]())))

        def function():
            value = MADE[made]()
            return dict.fromkeys(target, value)

        expected, wrong = attempt(target, function(), **keywords)
        got, problems = attempt(target, function, **keywords)
    assert problems == wrong
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert type(got[name]) is type(value), name
        assert getattr(got[name], "dtype", None) == getattr(value, "dtype", None), name
        np.testing.assert_array_equal(comparable(got[name]), comparable(value), err_msg=name, strict=True)
        if isinstance(value, jax.Array):
            assert got[name].sharding == value.sharding, name


def test_values_that_jax_cannot_hold_arrive_in_a_new_run(tmp_path):
    """Written out, so that a tree that loses them would not hide it."""
    target = {"count": np.zeros(2, np.int64), "rate": 0.0, "large": np.uint64(0), "w": S((2,), np.float32)}

    def init():
        return {"count": np.full(2, 2**40), "rate": 0.1, "large": 2**63 + 1, "w": jnp.ones(2)}

    with ocp.CheckpointManager(tmp_path / "run") as manager:
        state, _, how = ot.restore_or_initialize(manager, target, init_fn=init)
    restored = ot.restore(checkpoint({"w": np.zeros(2, np.float32)}), target, fallback=init)
    assert how == "scratch"
    for got in (state, restored):
        assert got["count"].tolist() == [2**40, 2**40] and got["count"].dtype == np.int64
        assert got["rate"] == 0.1 and got["large"] == 2**63 + 1
    assert np.asarray(state["w"]).tolist() == [1, 1] and np.asarray(restored["w"]).tolist() == [0, 0]


def test_without_a_target_a_run_begins_with_what_the_function_gives(tmp_path):
    held = jnp.ones(2)

    def init():
        return {"count": np.full(2, 2**40), "rate": 0.1, "w": jnp.zeros(2), "held": held}

    with ocp.CheckpointManager(tmp_path / "run") as manager:
        got = ot.restore_or_initialize(manager, None, init_fn=init).state
    for name, value in init().items():
        assert type(got[name]) is type(value)
        np.testing.assert_array_equal(got[name], value, strict=True)


@pytest.mark.parametrize("place", ["numpy", "scalar", "single", "sharded"])
def test_the_value_of_a_computed_step_is_checked(place):
    """A step may narrow where its value fits, which nobody knows before it is computed."""
    leaf = {
        "numpy": np.zeros((), np.int32),
        "scalar": np.int32(0),
        "single": S((), np.int32),
        "sharded": S((), np.int32, sharding=NamedSharding(MESH, P())),
    }[place]
    target = {"step": leaf, "w": S((8,), np.float32, sharding=NamedSharding(MESH, P("x")))}

    def init(step):
        return lambda: {"step": jnp.asarray(step), "w": jnp.ones(8, np.float32)}

    with jax.enable_x64(True):
        got = ot.restore(checkpoint({}), target, fallback_for=[".*"], fallback=init(5))
        assert got["step"].dtype == np.int32 and int(got["step"]) == 5
        assert not isinstance(leaf, S) or leaf.sharding is None or got["step"].sharding == leaf.sharding
        for fallback in (init(2**40), init(2**40)()):
            with pytest.raises(ot.errors.RestorePlanError, match=f"the value {2**40} does not fit int32"):
                ot.restore(checkpoint({}), target, fallback_for=[".*"], fallback=fallback)
    got = ot.restore(checkpoint({}), target, fallback_for=[".*"], fallback=lambda: {**init(5)(), "step": np.int64(5)})
    assert got["step"].dtype == np.int32 and int(got["step"]) == 5


def test_what_nobody_wants_of_a_function_is_not_computed():
    """Calling this function takes more memory than any machine has."""
    sharding = NamedSharding(MESH, P("x"))

    def init():
        return {"w": jnp.arange(8.0), "huge": jnp.arange(2.0**45), "stored": jnp.arange(2.0**45) + 1}

    target = {"w": S((8,), np.float32, sharding=sharding), "stored": S((8,), np.float32)}
    got = ot.restore(checkpoint({"stored": np.ones(8, np.float32)}), target, fallback=init)
    np.testing.assert_array_equal(got["w"], np.arange(8.0))
    assert got["w"].sharding == sharding


def test_new_rows_keep_64_bits():
    source = checkpoint({"ids": np.arange(2, dtype=np.int64)})
    grow = ot.transforms.Pad("ids", (4,), ot.transforms.FALLBACK)

    def init():
        return {"ids": np.arange(4) + 2**40}

    got = ot.restore(source, {"ids": np.zeros(4, np.int64)}, grow, fallback=init)
    assert got["ids"].tolist() == [0, 1, 2**40 + 2, 2**40 + 3]


def test_new_rows_are_cast_as_those_of_a_tree():
    source = checkpoint({"rows": np.ones((2, 2), np.int8)})
    target = {"rows": S((4, 2), np.int8)}
    grow = ot.transforms.Pad("rows", (4, None), ot.transforms.FALLBACK)
    for fallback in (lambda: {"rows": jnp.full((4, 2), 300)}, {"rows": jnp.full((4, 2), 300)}):
        with pytest.raises(ot.RestorePlanError, match="the fallback has dtype int32, the target int8"):
            ot.restore(source, target, grow, fallback=fallback)
        got = ot.restore(source, target, grow, fallback=fallback, allow_lossy_cast=True)
        assert np.asarray(got["rows"]).tolist() == [[1, 1], [1, 1], [44, 44], [44, 44]]


@pytest.mark.slow
def test_arrays_and_keys_from_outside_are_values():
    held = {
        "a": jax.device_put(jnp.arange(8.0), NamedSharding(MESH, P("x"))),
        "key": jax.random.split(jax.random.key(3, impl="rbg"), 2),
        "text": np.array([b"one", b"two"], object),
    }
    other = NamedSharding(Mesh(np.asarray(jax.devices())[::-1], ("y",)), P("y"))
    target = {"a": S((8,), np.float32, sharding=other), "key": held["key"], "text": np.zeros(2, object)}
    got = ot.restore(checkpoint({}), target, fallback_for=[".*"], fallback=lambda: held)
    np.testing.assert_array_equal(got["a"], np.arange(8.0))
    assert got["a"].sharding == other
    np.testing.assert_array_equal(jax.random.key_data(got["key"]), jax.random.key_data(held["key"]))
    assert got["text"].tolist() == [b"one", b"two"]


def test_an_abstract_array_has_no_values():
    with pytest.raises(ot.RestorePlanError) as caught:
        ot.plan_restore(
            checkpoint({}), {"a": S((2,), np.float32)}, fallback_for=[".*"], fallback=lambda: {"a": S((2,), np.float32)}
        )
    assert [(problem.kind, problem.leaf) for problem in caught.value.problems] == [("fallback", "a")]


@pytest.mark.parametrize("later", [np.full(2, 2**40), 0.1, jnp.ones(3), jnp.ones(2, jnp.bfloat16), None])
def test_a_function_that_gives_something_else_later_is_a_problem(later):
    values = [jnp.ones(2), later]

    def init():
        value = values.pop(0)
        return {"a": jnp.negative(value) if isinstance(value, jax.Array) else value}

    plan = ot.plan_restore(checkpoint({}), {"a": S((2,), np.float32)}, fallback_for=[".*"], fallback=init)
    with pytest.raises(ot.RestorePlanError, match=r"and gave float32 of shape \(2,\) when the plan was made") as caught:
        plan.execute()
    assert [(problem.kind, problem.leaf) for problem in caught.value.problems] == [("fallback", "a")]


def test_a_function_planned_with_32_bits_is_not_executed_with_64():
    target = {"a": S((2,), np.float32)}
    plan = ot.plan_restore(checkpoint({}), target, fallback_for=[".*"], fallback=lambda: {"a": jnp.full(2, 1 / 3)})
    with jax.enable_x64(True), pytest.raises(ot.RestorePlanError, match="the fallback gives float64"):
        plan.execute()


def head_checkpoint():
    """A classifier of three classes after steps of Adam."""
    params = {"body": {"w": np.full((4, 8), 2, np.float32)}, "head": {"w": np.full((8, 3), 3, np.float32)}}
    moments = jax.tree.map(lambda array: array + 10, params)
    state = {"params": params, "opt_state": {"0": {"mu": moments, "count": np.int32(5)}}, "step": np.int32(5)}
    return checkpoint(flatten(state)), state


def head_target(classes):
    _, state = head_checkpoint()
    shape = (8, classes)
    for params in (state["params"], state["opt_state"]["0"]["mu"]):
        params["head"]["w"] = np.zeros(shape, np.float32)
    return state


NAMED = ["params/head/.*", ".*/mu/head/.*"]


@pytest.mark.parametrize("transforms", [(), "auto"])
def test_a_named_leaf_of_another_shape_is_filled_and_told(transforms):
    source, saved = head_checkpoint()
    target = head_target(7)
    init = jax.tree.map(lambda array: jnp.ones(array.shape, array.dtype), target)
    plan = ot.plan_restore(source, target, transforms, fallback=lambda: init, fallback_for=NAMED)
    assert set(plan.filled) == {"params/head/w", "opt_state/0/mu/head/w"}
    shapes, moments = plan.warnings
    assert "params/head/w (the checkpoint has (8, 3))" in shapes and shapes.startswith("2 leaves are taken")
    assert "1 leaf of the optimizer" in moments and "opt_state/0/mu/head/w" in moments
    assert "1 of 2 model parameters from the checkpoint, 1 from fallback" in str(plan)
    got = plan.execute()
    for params, old in ((got["params"], saved["params"]), (got["opt_state"]["0"]["mu"], saved["opt_state"]["0"]["mu"])):
        np.testing.assert_array_equal(params["head"]["w"], np.ones((8, 7)))
        np.testing.assert_array_equal(params["body"]["w"], old["body"]["w"])


def test_a_named_leaf_of_the_same_shape_is_the_checkpoints():
    source, saved = head_checkpoint()
    plan = ot.plan_restore(source, head_target(3), fallback=lambda: head_target(3), fallback_for=NAMED)
    assert plan.filled == () and plan.warnings == ()
    np.testing.assert_array_equal(plan.execute()["params"]["head"]["w"], saved["params"]["head"]["w"])


@pytest.mark.parametrize("named", [None, ["params/body/.*"]])
def test_a_leaf_of_another_shape_that_nobody_named_is_a_problem(named):
    source, _ = head_checkpoint()
    with pytest.raises(ot.RestorePlanError) as caught:
        ot.plan_restore(source, head_target(7), fallback=lambda: head_target(7), fallback_for=named)
    assert [problem.kind for problem in caught.value.problems] == ["shape", "shape"]


def test_moments_of_a_new_parameter_are_to_be_named_too():
    source, _ = head_checkpoint()
    keywords = {"fallback": lambda: head_target(7), "fallback_for": ["params/head/.*"]}
    with pytest.raises(ot.RestorePlanError) as caught:
        ot.plan_restore(source, head_target(7), **keywords)
    (problem,) = caught.value.problems
    assert (problem.kind, problem.leaf) == ("shape", "opt_state/0/mu/head/w")
    plan = ot.plan_restore(source, head_target(7), **{**keywords, **problem.fix.arguments})
    assert set(plan.filled) == {"params/head/w", "opt_state/0/mu/head/w"}


def test_a_new_kind_of_moments_is_no_warning():
    """Of all parameters alike: an average of parameters that the optimizer did not keep before."""
    source, saved = head_checkpoint()
    target = {**saved, "opt_state": {**saved["opt_state"], "1": {"ema": saved["params"]}}}
    plan = ot.plan_restore(source, target, fallback=target, fallback_for=["opt_state/1/.*"])
    assert len(plan.filled) == 2 and plan.warnings == ()
