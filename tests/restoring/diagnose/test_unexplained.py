"""Leaves without an explanation: the closest names, and one problem for all that is left over."""

import numpy as np

import orbax_t5x as ot
from tests.support.failed_plans import problems_of
from tests.support.memory_checkpoint import checkpoint

_ARRAY = np.ones(2, np.float32)


def test_a_missing_leaf_lists_the_closest_names():
    (problem,) = problems_of(checkpoint({"encoder/norm/scale": _ARRAY}), {"encoder/norm/scales": _ARRAY}, strict=False)
    assert problem.message == "the checkpoint has no such leaf; closest: encoder/norm/scale"
    assert not problem.fix.transforms and "fallback=" in str(problem.fix)


def test_closest_names_are_looked_up_for_the_first_leaves_only():
    source = checkpoint({f"a{i}/x{i}/kernel": _ARRAY for i in range(30)})
    found = problems_of(source, {f"a{i}/y{i}/scale": np.ones(3, np.float32) for i in range(30)}, strict=False)
    assert ["closest" in problem.message for problem in found] == [True] * 20 + [False] * 10


def test_leftovers_are_one_problem_with_an_argument_as_its_fix():
    source = checkpoint({"a": _ARRAY, **{f"b{i}": _ARRAY for i in range(9)}})
    (problem,) = problems_of(source, {"a": _ARRAY})
    assert problem.message.startswith("9 leaves of the checkpoint have no place in the target: b0, b1,")
    assert dict(problem.fix.arguments) == {"strict": False}
    ot.plan_restore(source, {"a": _ARRAY}, **problem.fix.arguments)
    (problem,) = problems_of(checkpoint({"a": _ARRAY, "b": _ARRAY}), {"a": _ARRAY})
    assert (problem.leaf, problem.message) == ("b", "the target has no place for this leaf of the checkpoint")
