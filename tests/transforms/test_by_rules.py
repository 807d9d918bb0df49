"""Rules of transforms: what cannot work is an error at once, what matches nothing is a problem."""

import dataclasses
import re

import numpy as np
import pytest

from orbax_t5x import transforms as tr
from orbax_t5x.testing.transform_suite import assert_same, run
from tests.support.transform_cases import AB, TWO, only_problem, problems


def test_bad_groups_are_problems_that_name_the_rule():
    for transform, target in (
        (tr.AssignmentMap([("a", r"\1")]), {"a": 0}),
        (tr.Rename([("a", r"\1")]), {}),
        (tr.Rename([("(a)", r"\2")]), {}),
        (tr.Rename([("a", r"\g<name>")]), {}),
        (tr.Concat(["a", "b"], r"\1", 0), {}),
        (tr.Split("a", [r"\1", "x"], 0), {}),
        (tr.UnstackLayers("a", r"\1{i}", 0), {}),
    ):
        found = problems(transform, AB, target)
        assert found and {problem.kind for problem in found} <= {"rule", "missing"}, transform
        assert (found[0].kind == "rule" and "'a'" in found[0].message) or "'(a)'" in found[0].message


@pytest.mark.parametrize(
    "make",
    [
        lambda: tr.AssignmentMap([("(", "x")]),
        lambda: tr.Rename([("[", "x")]),
        lambda: tr.Drop("*"),
        lambda: tr.StackLayers("(", "x", 0),
        lambda: tr.Average({"a": 1}, pattern="("),
        lambda: tr.Rename(["ab"]),
        lambda: tr.StackLayers("no group", "x", 0),
        lambda: tr.StackLayers(r"l(\d+)/m(\d+)", "x", 0),
        lambda: tr.StackLayers(r"l(\d+)", r"\1", 0),
        lambda: tr.UnstackLayers("a", "b", 0),
        lambda: tr.Split("a", [], 0),
        lambda: tr.Split("a", "bc", 0),
        lambda: tr.Split("a", ["b"], 0, [1, 2]),
        lambda: tr.Repeat("a", -1, 0),
        lambda: tr.Slice("a", np.s_[::0]),
        lambda: tr.Pad("(", (1,)),
        lambda: tr.AddLowRank("(", "a", "b", 1),
        lambda: tr.Dequantize("(", "a"),
        lambda: tr.Average({"a": 1.0, "b": -1.0}),
        lambda: tr.Average({}),
        lambda: tr.FollowOptimizer(tr.Drop("a"), factors=[("a", ("ROW", "ROW"))]),
    ],
)
def test_what_can_never_work_is_an_error_at_once(make):
    with pytest.raises(ValueError, match=r"\w"):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: tr.Rename([(b"a", "x")]),
        lambda: tr.Rename([("a", 1)]),
        lambda: tr.Drop([1]),
        lambda: tr.Cast("a", "no dtype"),
        lambda: tr.Repeat("a", 1.5, 0),
        lambda: tr.Pad("a", (1.5,)),
        lambda: tr.Pad("a", (1,), "zero"),
        lambda: tr.Pad("a", (1,), np.zeros(3)),
        lambda: tr.Slice("a", [1, 2]),
        lambda: tr.Slice("a", True),
        lambda: tr.Slice("a", (1.5,)),
        lambda: tr.Slice("a", ((1, 2),)),
        lambda: tr.AddLowRank("a", "b", None, 1),
        lambda: tr.Dequantize("a", None),
        lambda: tr.Overlay("ab"),
    ],
)
def test_wrong_types_are_type_errors(make):
    with pytest.raises(TypeError):
        make()


@pytest.mark.parametrize("rules", ["ab", [("a", "b", "c")], ("a", "b")], ids=["text", "three", "one pair"])
@pytest.mark.parametrize("transform", [tr.Rename, tr.AssignmentMap])
def test_rules_that_are_no_pairs_say_how_to_give_them(transform, rules):
    name = transform.__name__
    with pytest.raises(ValueError, match=re.escape(f"as in {name}([('old', 'new')])")) as raised:
        transform(rules)
    assert f"{name}: a rule is a pair (pattern, replacement), not " in str(raised.value)


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


def test_names_of_variables_are_told_with_the_pattern_for_them():
    """NNX saves names that end in `/value`."""
    state = {"layer/kernel/value": 0, "layer/bias/value": 0}
    problem = only_problem(tr.Cast("layer/kernel", np.float16), state, {})
    assert problem.kind == "unused_rule" and "'layer/kernel(?:/value)?'" in str(problem.fix)
    assert "/value" not in str(only_problem(tr.Drop(["layer/kernels"]), state, {}).fix)
