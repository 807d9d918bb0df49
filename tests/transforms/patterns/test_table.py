"""Tables of rules equal trying the rules one by one."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orbax_t5x.transforms.patterns.table import RuleTable, expand_match, plain_parts

PARTS = st.sampled_from(["a", "b", "ab", "w", "layers_0", "layers_1", "layers_2", "layers_10", "0", "1"])
NAMES = st.lists(PARTS, min_size=1, max_size=3).map("/".join)
# Pieces that patterns are made of; each is valid on its own, wherever it stands.
PIECES = st.sampled_from(
    [
        *(
            "a",
            "b",
            "w",
            "layers_",
            "/",
            "/",
            r"\d+",
            r"(\d+)",
            r"(.*)",
            ".*",
            ".",
            "(a|b)",
            "(?:a|ab)",
            "[ab]",
            "[^/]+",
            r"\w",
        ),
        *(
            "(a)?",
            "b?",
            "a*",
            "a+",
            "a{2}",
            "b{0,2}",
            "w{1,}",
            r"(?:/(\w+))?",
            r"\/",
            "(?=a)a",
            "(?!b)",
            r"\b",
            "^",
            "$",
            "(/|_)",
            "b??",
        ),
        *(
            "(?P<x>a)",
            "[]a]",
            r"[\]b]",
            "(?i:A)",
            "(a(b)?)",
            "w*+",
            "(?>a|ab)",
            "x|a",
            "|",
            r"a\Z",
            "{",
            "a{",
            r"\x61",
            "[(]",
            "(?#note)",
        ),
    ]
)


@st.composite
def patterns(draw):
    text = "".join(draw(st.lists(PIECES, min_size=1, max_size=4)))
    flags = draw(st.sampled_from([None, None, None, 0, re.IGNORECASE, re.VERBOSE]))
    try:
        compiled = re.compile(text, flags or 0)
    except re.error:
        text, compiled = re.escape(text), re.compile(re.escape(text), flags or 0)
    return text if flags is None else compiled


@pytest.mark.slow
@given(st.lists(patterns(), max_size=8), st.lists(NAMES, min_size=1, max_size=12))
@example([r"a\|b"], ["a|b", "a", "b"])
@example([re.compile("A", re.IGNORECASE)], ["a"])
@example(["a b", re.compile("a b", re.VERBOSE)], ["ab", "a b"])
@example(["a{", "a{,2}b"], ["a{", "aab", "b"])
@example([r"a\Z|b", "[(]a"], ["a", "b", "(a"])
@example(["a", ".*"], ["a"])
@example([".*", "a"], ["a"])
@example(["a/(.*)", "(.*)"], ["a/b"])
@example(["(.*)/a/(.*)", "(.*)b", "b/a/b"], ["b/a/b"])
@example(["x*?y", "x+?y", "x??y"], ["y", "xy", "xxy"])
def test_rule_tables_equal_trying_rules_one_by_one(rules, names):
    table = RuleTable(rules)
    for name in names:
        matches = [(index, re.fullmatch(pattern, name)) for index, pattern in enumerate(rules)]
        first = next(((index, match) for index, match in matches if match), None)
        found = table.first(name)
        assert (first is None) == (found is None)
        if first is not None:
            assert found[0] == first[0]
            assert (found[1].string, found[1].groups()) == (name, first[1].groups())


@pytest.mark.slow
@given(patterns(), NAMES)
def test_a_matching_name_has_every_plain_part(pattern, name):
    if re.fullmatch(pattern, name):
        assert plain_parts(pattern) <= set(name.split("/"))


def test_plain_parts_are_found_where_they_help():
    assert plain_parts(r"target/(enc|dec(oder)?)/layers_(?P<i>\d+)/mlp/w[io/|(]/kernel\.v") == {"target", "mlp"}
    assert plain_parts("(?:a/b)/c/?d/e{2}/f") == {"f"} and plain_parts("a/b/+c") == {"a", "b"}
    assert plain_parts(re.compile("a/b")) == {"a", "b"}
    for pattern in ("a/b|c/d", "(?i:a)/b", "(?!x)a/b", re.compile("a/b", re.IGNORECASE)):
        assert plain_parts(pattern) == set()


_TEMPLATES = st.lists(
    st.sampled_from(
        ["x", "/", r"\1", r"\2", r"\g<1>", r"\g<x>", r"\g<0>", r"\\", r"\n", r"\10", r"\01", "1", "{i}", r"\q", "ä"]
    ),
    max_size=5,
).map("".join)


@pytest.mark.slow
@given(
    _TEMPLATES,
    st.sampled_from([r"(a)(b)?", r"(?P<x>a)b?", "ab?", r"(a)(b?)" + r"()" * 8]),
    st.sampled_from(["a", "ab"]),
)
def test_parsed_replacements_equal_expand(template, pattern, name):
    match = re.fullmatch(pattern, name)
    try:
        expected = match.expand(template)
    except (re.error, IndexError):
        with pytest.raises(ValueError, match=r"\w"):
            expand_match(match, template)
    else:
        assert expand_match(match, template) == expected
