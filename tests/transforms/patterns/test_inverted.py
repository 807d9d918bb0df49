"""Rules turned around match the new names and give the old ones."""

import re

import hypothesis
import hypothesis.strategies as st
import pytest

from orbax_t5x.transforms.patterns.inverted import escaped, inverted_rule


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ((r"a/(\d+)/(.*)", r"b/\2/\1"), (r"b/(.*)/(\d+)", r"a/\2/\1")),
        ((r"(?P<x>q|k)\.weight", r"\g<x>/kernel"), (r"(q|k)/kernel", r"\1.weight")),
        ((r"(\w+)", r"\1/\1"), (r"(\w+)/(?:\1)", r"\1")),
        ((r"l(\d)", r"a.\1[0]"), (r"a\.(\d)\[0\]", r"l\1")),
        ((r"(\d)0", r"x\1"), (r"x(\d)", r"\g<1>0")),
        (("([^)]+)/([]a]*)", r"\2-\1"), ("([]a]*)-([^)]+)", r"\2/\1")),
    ],
)
def test_rules_turned_around(rule, expected):
    assert inverted_rule(*rule, "Rename") == expected


@hypothesis.given(st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=8))
def test_escaped_text_matches_itself(text):
    assert re.fullmatch(escaped(text), text)


PIECES = st.sampled_from(["a", "b_", "/", ".", "-", "0", "+"])
GROUPS = st.sampled_from([r"\d+", "[a-c]+", "x|y", r"\w"])


@hypothesis.given(st.data())
def test_names_come_back(data):
    """Of random rules: texts and groups in any order."""
    groups = data.draw(st.lists(GROUPS, max_size=3))
    texts = data.draw(st.lists(PIECES, min_size=len(groups) + 1, max_size=len(groups) + 1))
    order = data.draw(st.permutations(range(1, len(groups) + 1)))
    pairs = list(zip(groups, texts[1:], strict=True))
    pattern = escaped(texts[0]) + "".join(f"({group}){escaped(text)}" for group, text in pairs)
    template = "".join(f"~\\g<{number}>~" for number in order)
    samples = {r"\d+": "12", "[a-c]+": "bc", "x|y": "y", r"\w": "q"}
    name = texts[0] + "".join(samples[group] + text for group, text in pairs)
    match = re.fullmatch(pattern, name)
    new = match.expand(template)
    back, again = inverted_rule(pattern, template, "Rename")
    found = re.fullmatch(back, new)
    assert (found and found.expand(again) == name) or not groups
