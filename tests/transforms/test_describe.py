"""Transforms as one line of text."""

import re

from orbax_t5x import transforms as tr
from orbax_t5x.transforms.describe import describe_transform


def a_function(state, target):
    return state


def test_fields_that_have_their_defaults_are_left_out():
    assert describe_transform(tr.Drop("a/.*")).startswith("Drop(")
    text = describe_transform(tr.Rename([("a", "b")]))
    assert text.startswith("Rename(") and "'a'" in text and "'b'" in text


def test_hundreds_of_rules_are_one_short_line():
    text = describe_transform(tr.Rename([(f"a{i}", f"b{i}") for i in range(500)]))
    assert "\n" not in text and len(text) < 200 and "500 in all" in text and "a499" not in text


def test_patterns_are_shown_as_text_and_functions_by_name():
    assert "re.compile" not in describe_transform(tr.Drop(re.compile("a/.*")))
    assert describe_transform(a_function).endswith("a_function (opaque)")
