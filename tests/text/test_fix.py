"""Fixes: the text is made of the data, and another interface may have other words for the same data."""

import json

import pytest

import orbax_t5x as ot
from orbax_t5x.text.fix import Arguments, Fix

RENAME = ot.transforms.Rename([("a", "b")])
RENAME_CODE = "ot.transforms.Rename([('a', 'b')])"


@pytest.mark.parametrize(
    ("fix", "text"),
    [
        (Fix.setting("pass {}", strict=False), "pass strict=False"),
        (Fix.setting("give {} values", fallback=...), "give fallback= values"),
        (Fix.adding(RENAME), f"add transforms=[{RENAME_CODE}]"),
        (Fix.adding(RENAME, to_others=True), f"pass transforms=[*transforms, {RENAME_CODE}]"),
        (Fix.adding(RENAME).also_setting("pass {}", item="x"), f"add transforms=[{RENAME_CODE}] and pass item='x'"),
        (Fix.writing("x", None), "write the rule as ('x', None)"),
        (Fix.removing(ot.transforms.Translate(), "if so"), "leave ot.transforms.Translate() out if so"),
        (Fix.any_of(Fix("one"), Fix.in_program("two")), "one, or two"),
        (Fix.any_of(Fix("one")), "one"),
    ],
)
def test_the_text_is_made_of_the_data(fix, text):
    assert str(fix) == fix.text == text


def test_arguments_cannot_be_changed():
    given = {"strict": False}
    arguments = Arguments(given)
    given["strict"] = True
    assert dict(arguments) == {"strict": False} and len(arguments) == 1
    with pytest.raises(TypeError):
        arguments["item"] = "x"


def test_a_call_with_other_keywords_gets_the_same_fix_in_its_words():
    ways = Fix.any_of(Fix.setting("give {} values", fallback=...), Fix.setting("pass {}", strict=False), Fix("rest"))
    renamed = ways.with_keywords({"fallback": "init_fn"})
    assert renamed.text == "give init_fn= values, or pass strict=False, or rest"
    assert [dict(way.arguments) for way in renamed.ways] == [{"init_fn": ...}, {"strict": False}, {}]
    assert ways.ways[0].text == "give fallback= values"


def test_advice_has_the_words_of_the_data_and_the_keyword_of_the_call():
    """No program follows it."""
    fix = Fix.setting("if new, give {fallback} values and pass {set}", fallback=..., fallback_for=["a"])
    advice = fix.in_words()
    assert advice.text == fix.text == "if new, give fallback= values and pass fallback_for=['a']"
    assert dict(fix.arguments) == {"fallback": ..., "fallback_for": ["a"]} and not advice.arguments
    for one in (fix, advice):
        assert "give init_fn= values" in one.with_keywords({"fallback": "init_fn"}).text


def test_json_has_the_data_of_each_way():
    fix = Fix.any_of(Fix.adding(RENAME), Fix.writing("x", "y"), Fix.setting("pass {}", dtype=RENAME))
    data = json.loads(json.dumps(fix.as_data()))
    assert data["transforms"] == [RENAME_CODE]
    first, second, third = data["alternatives"]
    assert first["text"] == f"add transforms=[{RENAME_CODE}]" and "rule" not in first
    assert second["rule"] == ["x", "y"] and third["arguments"] == {"dtype": RENAME_CODE}
