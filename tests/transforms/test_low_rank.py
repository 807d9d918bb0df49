"""`AddLowRank`: missing factors and integers are problems."""

import numpy as np

from orbax_t5x import transforms as tr
from orbax_t5x.testing.transform_suite import run
from tests.support.transform_cases import ADAPTED, only_problem, problems


def test_a_kernel_with_one_factor_alone_is_a_problem_and_one_without_stays():
    source = {name: value for name, value in ADAPTED.items() if name != "y/b"}
    problem = only_problem(tr.AddLowRank("(.)/kernel", r"\1/a", r"\1/b", 1), source)
    assert (problem.kind, problem.leaf) == ("missing", "y/kernel") and "'y/b'" in problem.message
    alone = {"x/kernel": ADAPTED["x/kernel"]}
    problem = only_problem(tr.AddLowRank("(.)/kernel", r"\1/a", r"\1/b", 1), alone)
    assert problem.kind == "unused_rule" and "'x/a'" in problem.message
    assert run(tr.AddLowRank("(.)/kernel", r"\1/a", r"\1/b", 1, require_match=False), alone)[1].problems == []
    integers = {name: value.astype(np.int32) for name, value in ADAPTED.items()}
    assert {p.kind for p in problems(tr.AddLowRank("(.)/kernel", r"\1/a", r"\1/b", 1), integers)} == {"dtype"}
