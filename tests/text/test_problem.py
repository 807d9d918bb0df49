"""Problems as text and as data; like problems of several leaves are told by their data, not by their text."""

import pytest

from orbax_t5x.errors import Fix, Problem
from orbax_t5x.text.problem_lines import problem_lines


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem("shape", "a/b", "too long"), "[shape] a/b: too long."),
        (Problem("target", None, "is this it?"), "[target] is this it?"),
        (Problem("dtype", "a", "other", Fix("cast it")), "[dtype] a: other.\nFix: cast it"),
    ],
)
def test_the_text_has_kind_leaf_message_and_fix(problem, text):
    assert str(problem) == text


def test_json_has_the_fix_as_data_in_the_words_of_the_caller():
    problem = Problem("leftover", "a", "left", Fix.setting("pass {}", strict=False))
    data = problem.as_data(lambda fix: f"in other words: {fix.text}")
    assert (data["kind"], data["leaf"], data["message"]) == ("leftover", "a", "left")
    assert data["fix"]["text"] == "in other words: pass strict=False" and data["fix"]["arguments"] == {"strict": False}
    assert Problem("leftover", "a", "left").as_data()["fix"] is None


def test_a_source_is_no_difference_and_the_same_words_in_a_message_are_one():
    sources = [" (from x)", " (from y)"]
    as_data = [
        Problem("shape", leaf, f"lorem{source}", None, source) for leaf, source in zip("ab", sources, strict=True)
    ]
    as_words = [Problem("shape", leaf, f"lorem{source}") for leaf, source in zip("ab", sources, strict=True)]
    assert problem_lines(as_data) == ["[shape] 2 leaves: lorem.", "    a", "    b"]
    assert problem_lines(as_words) == ["[shape] a: lorem (from x).", "[shape] b: lorem (from y)."]
    assert problem_lines(as_data[:1]) == problem_lines(as_words[:1])
