"""Leaves are matched by name; what is missing or misfits is one list of problems."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from tests.support.failed_plans import failing
from tests.support.memory_checkpoint import checkpoint
from tests.support.placed_arrays import sharded, values


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
    assert problems["leftover"].leaf == "left" and "strict=False" in str(problems["leftover"].fix)
    assert "(7,)" in problems["sharding"].message
    assert all(problem.fix for problem in problems.values())
    assert not any(leaf.boxes for leaf in source.made.values())


def test_a_missing_leaf_names_the_closest_and_the_rule():
    (problem,) = failing(
        checkpoint({"encoder/kernel_": values((2,))}), {"encoder": {"kernel": np.zeros(2, np.float32)}}, strict=False
    )
    assert problem.kind == "missing" and "'kernel_'" in problem.message
    assert "Rename" in str(problem.fix) and "kernel_" in str(problem.fix)


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
    (problem,) = failing(source, target, fallback={"a": jnp.zeros(3)}, fallback_for=[".*"])
    assert problem.kind == "shape" and "fallback" in problem.message
    kinds = [
        problem.kind for problem in failing(source, target, fallback=lambda: {"a": np.zeros(int(jnp.ones(())) + 1)})
    ]
    assert "fallback" in kinds
    assert [problem.kind for problem in failing(source, target, fallback={"b": jnp.zeros(3)})] == ["missing"]


def test_what_a_transform_takes_out_is_dropped_not_left_over():
    plan = ot.plan_restore(
        checkpoint({"a": values((2,)), "b": values((2,))}),
        {"a": sharded((2,))},
        lambda state, target: {"a": state["a"]},
    )
    assert plan.dropped == ("b",) and plan.unused == ()
