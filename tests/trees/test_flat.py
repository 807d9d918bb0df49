"""State dicts as flat mappings, and back."""

import itertools

import pytest

from orbax_t5x import transforms as tr
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.trees.flat import NameClashError, flatten, unflatten, unwrapped
from tests.support.transform_cases import AB


def test_names_that_clash_when_nested_are_told():
    with pytest.raises(RestorePlanError, match="'a'"):
        tr.Rename([("b", "a/b")])(AB, {})
    with pytest.raises(NameClashError):
        unflatten({"a/b": 1, "a": 2})
    joined = unflatten({"a/b/c": 1, "a": 2, "a/b": 3, "a/d": 4}, join_clashes=True)
    assert flatten(joined) == {"a/b/c": 1, "a": 2, "a/b": 3, "a/d": 4}
    with pytest.raises(NameClashError):
        flatten({"a": {"b": 1}, "a/b": 2})


@pytest.mark.parametrize("count", [2, 3, 4])
def test_any_names_nest_and_come_back(count):
    for names in itertools.permutations(["", "/", "/a", "a", "a/", "a/b", "a//b", "a/b/c"], count):
        flat = {name: object() for name in names}
        assert flatten(unflatten(flat, join_clashes=True)) == flat
        if any(longer.startswith(f"{name}/") for name, longer in itertools.permutations(names, 2)):
            with pytest.raises(NameClashError):
                unflatten(flat)


def test_only_what_has_no_name_is_the_whole_tree():
    assert [unwrapped(unflatten(flat)) for flat in ({"": 1}, {"": {}}, {"/a": 1})] == [1, {}, {"": {"a": 1}}]
