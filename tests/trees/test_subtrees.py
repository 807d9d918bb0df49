"""Patterns for some of many names match these and no others."""

import re

from hypothesis import given
from hypothesis import strategies as st

from orbax_t5x.trees.subtrees import exact_patterns, whole_subtrees

NAMES = st.lists(st.sampled_from(["a", "b.c", "h_0", "h_1", "0", "1", "12", "w+"]), min_size=1, max_size=4).map(
    "/".join
)


@given(every=st.sets(NAMES, min_size=1), data=st.data(), subtrees=st.booleans())
def test_patterns_match_the_names_alone(every, data, subtrees):
    names = data.draw(st.sets(st.sampled_from(sorted(every)), min_size=1))
    patterns = exact_patterns(sorted(names), every, subtrees=subtrees)
    assert {name for name in every if any(re.fullmatch(one, name) for one in patterns)} == names


def test_all_layers_are_one_pattern():
    names = [f"layers_{i}/new/{one}" for i in range(30) for one in "ab"]
    every = [*names, *(f"layers_{i}/w" for i in range(30))]
    assert exact_patterns(names, every) == [r"layers_\d+/new/.*"]
    assert exact_patterns(names[:2], every) == ["layers_0/new/.*"]
    assert whole_subtrees(names[:2], every) == {"layers_0/new/**": 2}
