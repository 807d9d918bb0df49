"""What hypotheses are given: the leaves of either side without a counterpart."""

import re

import numpy as np

from orbax_t5x.lazy import as_view
from orbax_t5x.restoring.diagnose.hypothesis import UnmatchedLeaves, as_template
from orbax_t5x.restoring.targets import MissingLeaf, flatten_target

ARRAY = np.zeros((2, 3), np.float32)


def missing(target, name, **flags):
    return MissingLeaf(name, target.leaves[name], flags.get("is_none", False), flags.get("is_reset", False))


def example():
    target = flatten_target({"a": ARRAY, "b": ARRAY, "c": ARRAY, "d": ARRAY})
    stored = {"a": as_view(ARRAY), "x": as_view(ARRAY[:1]), "text": "no array"}
    absent = (missing(target, "b"), missing(target, "c", is_none=True), missing(target, "d", is_reset=True))
    return UnmatchedLeaves(stored, target, ("b", "c", "d"), absent, leftovers=("x",))


def test_free_leaves_fill_nothing_and_have_a_shape():
    unmatched = example()
    assert set(unmatched.arrays) == {"a", "x"} and {name: one.shape for name, one in unmatched.free.items()} == {
        "x": (1, 3)
    }
    assert unmatched.unfilled_shapes == dict.fromkeys("bcd", (2, 3))


def test_only_leaves_without_a_known_reason_may_be_under_another_name():
    assert list(example().wanted) == ["b"]


def test_what_is_explained_is_left_out_and_the_rest_stays():
    unmatched = example()
    rest = unmatched.without({"b", "x"})
    assert [one.name for one in rest.missing] == ["c", "d"] and rest.leftovers == () and rest.wanted == {}
    assert rest.stored is unmatched.stored and [one.name for one in unmatched.missing] == ["b", "c", "d"]


def test_a_template_gives_the_text_itself():
    text = r"a\1\g<0>/b"
    assert re.sub("x", as_template(text), "x") == text
