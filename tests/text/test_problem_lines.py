"""Like problems of several leaves are one entry; what differs in more than the leaf's own name stays apart."""

import pytest

import orbax_t5x as ot
from orbax_t5x.errors import Fix, Problem
from orbax_t5x.text.problem_lines import problem_lines

T = ot.transforms


def lines(fixes):
    return problem_lines([Problem("shape", leaf, "lorem", fix) for leaf, fix in fixes.items()])


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
    assert lines({"a": Fix("an a"), "n": Fix("an a")})[1] == "  Fix: an a"


def test_each_kind_keeps_three_entries():
    kinds = ["missing", "leftover", "shape", "dtype", "sharding", "collision", "rule", "provenance", "opaque", "memory"]
    words = ("alpha", "beta", "gamma", "delta")
    shown = problem_lines([Problem(kind, None, word) for kind in kinds for word in words])
    for kind in kinds:
        expected = [f"[{kind}] {word}." for word in words[:3]]
        expected.append(f"… and 1 problem more of kind [{kind}]: see `.problems`")
        assert [line for line in shown if f"[{kind}]" in line] == expected


@pytest.mark.parametrize(("count", "shown"), [(55, 55), (56, 55), (200, 55)])
def test_lines_are_fewer_than_56(count, shown):
    found = problem_lines([Problem("rule", None, "\n".join(["a."] * count))])
    assert len(found) == shown and (count == 55) == (found[-1] == "  a.")


def test_folded_leaves_are_all_counted():
    names = [f"layers_{layer}/{part}" for layer in range(5) for part in ("a", "b")]
    first, *rows = problem_lines([Problem("missing", name, "lorem") for name in names])
    assert first == "[missing] 10 leaves: lorem."
    assert rows == ["    layers_{0…4}/a ×5", "    layers_{0…4}/b ×5"]


def test_only_a_single_message_is_shown_whole():
    problem = Problem("missing", None, "x" * 2000)
    assert problem_lines([problem]) == [f"[missing] {'x' * 2000}."]
    assert problem_lines([problem, Problem("rule", None, "a")])[0] == f"[missing] {'x' * 600}… (1,400 characters more)."


def test_a_long_fix_is_printed_once():
    fix = Fix("lorem ipsum dolor sit amet " * 5)
    _, shown, *_, last = problem_lines([Problem("shape", "a", "one", fix), Problem("dtype", "b", "other", fix)])
    assert "lorem" in shown and last == "  Fix: as above"
