"""`AssignmentMap` swaps, rotates and shares leaves; its problems have T5X's text and a fix."""

import pytest

from orbax_t5x import transforms as tr
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.testing.transform_suite import assert_same, run
from tests.support.transform_cases import AB, problems


def test_assignment_maps_swap_rotate_and_share():
    target = dict.fromkeys(("a", "b", "c"))
    swapped, _ = run(tr.AssignmentMap([("a", "b"), ("b", "a")]), AB, target)
    assert_same(swapped, {"a": AB["b"], "b": AB["a"], "c": AB["c"]})
    rotated, _ = run(tr.AssignmentMap([("a", "b"), ("b", "c"), ("c", "a")]), AB, target)
    assert_same(rotated, {"a": AB["b"], "b": AB["c"], "c": AB["a"]})


def test_in_a_restore_a_rule_wins_over_a_leaf_that_nothing_takes(caplog):
    """T5X keeps the checkpoint's `a` and the rule does nothing; the answer by hand stays T5X's, with a warning."""
    transform, target = tr.AssignmentMap([("a", "b")]), dict.fromkeys(("a", "b"))
    result, _ = run(transform, AB, target)
    assert_same(result, {"a": AB["b"], "b": AB["b"], "c": AB["c"]})
    assert not caplog.records
    assert_same(transform(AB, target), AB)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "keeps the checkpoint's 'a', as T5X does" in warning


def test_a_missing_name_lists_what_there_is_and_the_rule_that_would_mend_it():
    source = {"decoder/layers_0/query/kernel": AB["a"], "decoder/layers_1/query/kernel": AB["b"]}
    transform = tr.AssignmentMap([("n", "decoder/layer_0/query/kernel")])
    (problem,) = problems(transform, source, {"n": 0})
    assert (problem.kind, problem.leaf) == ("missing", "n")
    assert "does not exist in restore checkpoint; closest: decoder/layers_0/query/kernel" in problem.message
    assert "('n', 'decoder/layers_0/query/kernel')" in str(problem.fix)
    with pytest.raises(RestorePlanError) as caught:
        transform(source, {"n": 0})
    (problem,) = caught.value.problems
    assert "does not exist in restore checkpoint. Must be one of: ['decoder/layers_0/" in problem.message
