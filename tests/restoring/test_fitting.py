"""Values fit leaves of the target: conversions that lose nothing are done, others are problems."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from orbax_t5x.trees.flat import flatten, unflatten
from tests.support.failed_plans import failing, problems
from tests.support.given_values import given_by, key
from tests.support.memory_checkpoint import checkpoint
from tests.support.placed_arrays import sharded, values


def test_lossless_conversions_are_done(kind):
    array = values((8, 4), ml_dtypes.bfloat16)
    got = ot.restore(checkpoint({"a": array}, kind), {"a": sharded((8, 4), np.float32, P("x"))})
    np.testing.assert_array_equal(np.asarray(got["a"]), array.astype(np.float32))


def test_large_casts_go_in_slabs(kind, monkeypatch):
    monkeypatch.setattr("orbax_t5x.restoring.execute.groups.SCRATCH_BYTES", 100)
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
    target = {"target": {"w": sharded((4,))}, "state": {"step": sharded((), np.int32), "v": sharded((4,))}}
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


@pytest.mark.parametrize("value", [0, 7, 2.0**24, 2.0**31 - 128])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, jnp.bfloat16, np.int64])
def test_a_step_with_a_whole_value_becomes_an_integer(value, dtype):
    """T5X writes a float step once it has resumed a run."""
    stored = np.asarray(value).astype(dtype)
    if not 0 <= stored.astype(np.float64) < 2**31:
        stored = np.zeros((), dtype)
    for name in ("state/step", "step/value", "global_step"):
        target = unflatten({name: np.zeros((), np.int32)})
        got = flatten(ot.restore(checkpoint({name: stored}), target))[name]
        assert got.dtype == np.int32 and int(got) == int(stored)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
@pytest.mark.parametrize("value", [6.5, -(2.0**31) - 512, 2.0**32, np.nan, np.inf, -np.inf])
def test_a_step_that_is_no_integer_of_the_target_is_a_problem_when_it_is_read(value, dtype):
    plan = ot.plan_restore(checkpoint({"step": np.float32(value)}), {"step": sharded((), dtype)})
    with pytest.raises(ot.errors.CheckpointError, match=r"step.*does not fit u?int32"):
        plan.execute()


def test_only_a_steps_float_becomes_an_integer():
    for name, array in {"state/count": np.float32(3), "step": np.ones(2, np.float32)}.items():
        target = unflatten({name: np.zeros(array.shape, np.int32)})
        (problem,) = failing(checkpoint({name: array}), target)
        assert problem.kind == "dtype" and "Cast" in str(problem.fix)


def test_64_bit_targets_name_the_setting():
    (problem,) = failing(checkpoint({"a": values((2,), np.float64)}), {"a": sharded((2,), np.float64)})
    assert "jax_enable_x64" in problem.message and "jax_enable_x64" in str(problem.fix)


def test_strings_restore_as_numpy_only():
    array = np.array([b"a", b"\xff\0"], object)
    got = ot.restore(checkpoint({"s": array}), {"s": np.empty(2, object)})
    assert got["s"].tolist() == [b"a", b"\xff\0"]
    (problem,) = failing(checkpoint({"s": array}), {"s": sharded((2,))})
    assert problem.kind == "dtype"


S = jax.ShapeDtypeStruct


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


HOW = pytest.mark.parametrize("how", ["transform", "merge", "tree", "function"])


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


LAYERED = ["target/decoder/layers/mlp/wi/kernel", "params/blocks/w", "decoder/decoder/w", "params/h/w", "ScanLayers/w"]


@pytest.mark.parametrize("name", LAYERED)
@pytest.mark.parametrize("shape, wanted", [((4, 2, 3), (4, 5, 3)), ((2, 3), (4, 3)), ((4, 5), (4, 2)), ((2,), (7,))])
def test_neither_pad_nor_slice_is_proposed_where_a_dimension_may_count_layers(name, shape, wanted):
    (problem,) = failing(checkpoint({name: np.zeros(shape)}), {name: np.zeros(wanted)})
    ways = problem.fix.ways
    assert problem.kind == "shape" and str(shape) in problem.message and str(wanted) in problem.message
    assert not any(way.transforms for way in ways) and "ot.transforms" not in str(problem.fix)


@pytest.mark.parametrize(
    "name, is_table", [("emb", True), ("layers_0/mlp/wi", False), ("encoder_layer_norm/scale", False), ("h", False)]
)
def test_pad_is_proposed_for_tables(name, is_table):
    (problem,) = failing(checkpoint({name: np.zeros((4, 3))}), {name: np.zeros((6, 3))})
    assert ("ot.transforms.Pad(" in str(problem.fix)) == is_table


@pytest.mark.parametrize(
    "shape, wanted", [((10, 2, 12), (2, 2, 5, 12)), ((3, 4), (4, 3)), ((12,), (3, 4)), ((2, 6), (3, 4)), ((), (1,))]
)
def test_a_shape_that_names_do_not_explain_gets_no_transform(shape, wanted):
    (problem,) = failing(checkpoint({"a": np.zeros(shape)}), {"a": np.zeros(wanted)})
    assert str(shape) in problem.message and str(wanted) in problem.message
    assert not any(way.transforms for way in problem.fix.ways)
    assert "Reshape" not in str(problem.fix) and "Transpose" not in str(problem.fix)
