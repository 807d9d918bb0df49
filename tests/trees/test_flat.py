"""State dicts as flat mappings, and back."""

import pytest

from orbax_t5x import transforms as tr
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.trees.flat import NameClashError, flatten, unflatten
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
