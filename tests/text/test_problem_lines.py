"""Like problems of several leaves are one entry; what differs in more than the leaf's own name stays apart."""

import re

import pytest

import orbax_t5x as ot
from orbax_t5x.errors import Fix, Problem
from orbax_t5x.text.problem_lines import problem_lines

T = ot.transforms


def lines(fixes):
    return problem_lines([Problem("shape", leaf, "lorem", fix) for leaf, fix in fixes.items()])


@pytest.mark.parametrize("make", [lambda name: T.Pad(name, (8,), 0), lambda name: T.Slice(name, ((None, 8, None),))])
def test_fixes_that_differ_in_the_leaf_are_one(make):
    leaves = ("a.b", "a/c", "d")
    fixes = {leaf: Fix.any_of(Fix("dolor"), Fix.adding(make(re.escape(leaf)))) for leaf in leaves}
    first, fix, *rest = lines(fixes)
    assert first == "  - [shape] 3 leaves: lorem." and rest == [f"      {leaf}" for leaf in leaves]
    assert fix == f"    Fix, for the first: {fixes['a.b']}"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Fix("an"), Fix("na")),
        (Fix("give it"), Fix.in_program("give it")),
        (Fix.setting("give {}", fallback=...), Fix.setting("give {}", item=...)),
        (Fix.adding(T.Pad("a", (8,), 0)), Fix.adding(T.Pad("n", (9,), 0))),
        (Fix.writing("x", "y"), Fix.writing("x", "z")),
        (Fix.removing(T.Translate(), "there"), Fix.removing(T.Cast("x", "float32"), "there")),
    ],
)
def test_other_fixes_are_apart(one, other):
    assert sum("[shape]" in line for line in lines({"a": one, "n": other})) == 2


def test_a_fix_of_no_leaf_is_that_of_all():
    assert lines({"a": Fix("an a"), "n": Fix("an a")})[1] == "    Fix: an a"
