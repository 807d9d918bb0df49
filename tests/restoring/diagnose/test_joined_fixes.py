"""Fixes that add transforms of one kind are one list, whichever problem they are read from."""

import numpy as np

import orbax_t5x as ot
from orbax_t5x.errors import Fix, Problem
from orbax_t5x.restoring.diagnose.joined_fixes import with_joined_fixes
from tests.support.failed_plans import problems_of
from tests.support.memory_checkpoint import checkpoint

T = ot.transforms


def cast(name, dtype="int32"):
    return Problem("dtype", name, "lorem", Fix.any_of(Fix.adding(T.Cast(name, dtype)), Fix("ipsum")))


def test_each_problem_has_the_transforms_of_all():
    names = [f"layers_{i}/w" for i in range(30)]
    problems = [*map(cast, names), cast("step", "int64"), Problem("missing", "x", "dolor", None)]
    *casts, other = with_joined_fixes(problems, [*names, "step", "x", "layers_0/v"])
    assert {one.fix.transforms for one in casts} == {(T.Cast(r"layers_\d+/w", "int32"), T.Cast("step", "int64"))}
    assert all(str(one.fix).endswith(", or ipsum") for one in casts) and other.fix is None


def test_a_pattern_for_layers_matches_no_other_leaf():
    problems = [cast("layers_0/w"), cast("layers_1/w")]
    first, _ = with_joined_fixes(problems, ["layers_0/w", "layers_1/w", "layers_2/w"])
    assert first.fix.transforms == (T.Cast("layers_0/w", "int32"), T.Cast("layers_1/w", "int32"))


def test_ways_of_other_kinds_and_single_ones_stay():
    pad = Problem("shape", "a", "lorem", Fix.adding(T.Pad("a", (8,))))
    filled = Problem("shape", "b", "lorem", Fix.adding(T.Pad("b", (8,), T.FALLBACK)).also_setting("{}", fallback=...))
    assert with_joined_fixes([pad, filled, cast("c")], "abc") == [pad, filled, cast("c")]


def test_the_fix_of_one_table_slices_both():
    """As it is printed, pasted once, it is the whole cure."""
    source = {"embed/embedding": np.ones((12, 4)), "lm_head/kernel": np.ones((4, 12)), "norm": np.ones(4)}
    target = {"embed/embedding": np.ones((10, 4)), "lm_head/kernel": np.ones((4, 10)), "norm": np.ones(4)}
    for problem in problems_of(checkpoint(source), target):
        assert not ot.plan_restore(checkpoint(source), target, problem.fix.transforms).filled
