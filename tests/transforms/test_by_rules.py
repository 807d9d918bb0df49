"""Rules of transforms: what cannot work is an error at once, what matches nothing is a problem."""

import re

import numpy as np
import pytest

from orbax_t5x import transforms as tr
from tests.support.transform_cases import AB, problems


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
