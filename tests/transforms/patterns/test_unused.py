"""Rules that matched nothing, or that another rule always comes before."""

import dataclasses

import pytest

from orbax_t5x import transforms as tr
from orbax_t5x.testing.transform_suite import assert_same, run
from tests.support.transform_cases import AB, TWO, only_problem


def test_unused_patterns_have_t5x_text_and_the_closest_names():
    problem = only_problem(tr.AssignmentMap([("encodr/w", "a")]), AB, {"encoder/w": 0})
    assert problem.kind == "unused_rule"
    assert "Unused patterns in `assignment_map`: {'encodr/w'}" in problem.message
    assert "encoder/w" in str(problem.fix)


def test_shadowed_and_repeated_rules_are_warnings():
    rules = [("a|b", "z/\\g<0>"), ("a", "x"), ("a|b", "y")]
    result, diagnostics = run(tr.Rename(rules), AB)
    assert sorted(result) == ["c", "z/a", "z/b"] and not diagnostics.problems
    assert [("shadowed" in text, "given twice" in text) for text in diagnostics.warnings] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize(
    "transform",
    [
        tr.Rename([("q", "r")]),
        tr.Drop("q"),
        tr.Keep(["q"]),
        tr.StackLayers(r"q(\d)", "r", 0),
        tr.UnstackLayers("q", "r{i}", 0),
        tr.Split("q", ["r", "s"], 0),
        tr.Concat(["q"], "r", 0),
        tr.Reshape("q", (1,)),
        tr.Transpose("q"),
        tr.Cast("q", "float32"),
        tr.Repeat("q", 2, 0),
        tr.Pad("q", (3,)),
        tr.Slice("q", 0),
        tr.AddLowRank("q", "a", "b", 1),
        tr.Dequantize("q", "s"),
        tr.Average({"x": 1, "y": 1}, pattern="q"),
    ],
    ids=lambda transform: type(transform).__name__,
)
def test_a_pattern_that_matches_nothing_is_a_problem(transform):
    problem = only_problem(transform, TWO)
    assert problem.kind == "unused_rule" and "'q" in problem.message
    if hasattr(transform, "require_match"):
        allowed = dataclasses.replace(transform, require_match=False)
        result, diagnostics = run(allowed, TWO)
        assert diagnostics.problems == [] and len(diagnostics.warnings) == 1
        if not isinstance(transform, tr.Keep):
            assert_same(result, TWO)


def test_where_no_name_is_close_the_problem_shows_some_of_the_model():
    state = {"opt_state/0/mu/w": 0, "params/w": 0}
    problem = only_problem(tr.Rename([("something/else", "x")]), state)
    assert "matches no name in the state dict; the names are such as ['params/w', 'opt_state" in problem.message
