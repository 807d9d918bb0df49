"""Replacements equal `re.Match.expand`."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_t5x.transforms.patterns.template import expand_match

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
