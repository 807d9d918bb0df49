"""Tables keep the rows that both sides have; a module that alone has other shapes is new."""

import numpy as np
import pytest

import orbax_t5x as ot
from tests.support.failed_plans import problems_of
from tests.support.memory_checkpoint import checkpoint
from tests.support.small_models import FILL, empty, fallback_of, model

T = ot.transforms


def test_a_new_head_is_named_whole_and_never_padded():
    source, target = checkpoint(model()), empty(model(head=7))
    problems = problems_of(source, target)
    assert {problem.leaf for problem in problems} == {"head/kernel", "head/bias"}
    for problem in problems:
        assert "Pad" not in str(problem.fix)
        first, *_ = problem.fix.ways
        assert dict(first.arguments) == {"fallback": ..., "fallback_for": ["head/.*"]}
    plan = ot.plan_restore(source, target, fallback=fallback_of(target), fallback_for=first.arguments["fallback_for"])
    assert set(plan.execute()["head"]["bias"]) == {FILL} and any("another shape" in text for text in plan.warnings)


@pytest.mark.parametrize("vocab", [10, 15])
def test_a_table_is_cut_or_grown_first(vocab):
    (problem,) = problems_of(checkpoint(model()), empty(model(vocab=vocab)))
    first, *others = problem.fix.ways
    assert isinstance(first.transforms[0], T.Slice if vocab < 12 else T.Pad)
    assert not any("fallback_for" in way.arguments for way in (first, *others))


def test_two_modules_of_other_shapes_are_a_question():
    """A program follows none of its answers."""
    target = {**model(head=7), "final/scale": np.ones(9, np.float32)}
    for problem in problems_of(checkpoint(model()), empty(target)):
        assert not any(way.transforms or way.arguments for way in problem.fix.ways)
