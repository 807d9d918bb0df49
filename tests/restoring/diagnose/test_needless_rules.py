"""A target in the names that the checkpoint has before the transforms."""

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.trees.flat import unflatten
from tests.support.failed_plans import ARRAYS, BUNDLE, problems_of
from tests.support.memory_checkpoint import checkpoint

T = ot.transforms


@pytest.mark.parametrize("transforms", [[T.Translate()], [T.Translate(), T.Rename([("target/(.*)", r"params/\1")])]])
def test_the_transforms_are_left_out(transforms):
    entries = ot.plan_restore(BUNDLE, None).entries
    target = unflatten({entry.name: np.zeros(entry.shape, entry.dtype) for entry in entries})
    (problem,) = problems_of(BUNDLE, target, transforms)
    assert problem.fix.arguments["transforms"] == () and "transforms=[]" in str(problem.fix)
    assert not ot.plan_restore(BUNDLE, target, problem.fix.arguments["transforms"]).unused


def test_rules_that_the_target_needs_stay():
    target = {**ARRAYS, "new": np.zeros(2, np.float32)}
    stored = {**ARRAYS, "old": np.zeros(2, np.float32)}
    rules = [T.Rename([("old", "new"), ("layer_0/bias", "bias")])]
    assert not any("transforms" in problem.fix.arguments for problem in problems_of(checkpoint(stored), target, rules))


def test_transforms_stay_where_moments_cannot_follow():
    """Leaving them out would give the leaf, and lose what they do to its parameter."""
    leaves = {"params/w": np.ones((2, 3)), "opt_state/0/mu/w": np.ones((2, 3)), "opt_state/0/nu/w": np.ones((2, 3))}
    doubled = [T.FollowOptimizer(T.Affine("params/w", 2.0))]
    problems = problems_of(checkpoint(leaves), unflatten(leaves), doubled)
    assert {problem.leaf for problem in problems} == {"opt_state/0/mu/w", "opt_state/0/nu/w"}
    assert not any("transforms" in problem.fix.arguments for problem in problems)
