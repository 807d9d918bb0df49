"""Transforms of names: clashes and empty names are problems, and nothing is lost silently."""

import numpy as np

from orbax_t5x import transforms as tr
from orbax_t5x.lazy import as_view
from orbax_t5x.testing.transform_suite import run
from tests.support.transform_cases import AB, only_problem, problems


def test_a_name_with_an_empty_part_is_a_problem():
    for transform in (
        tr.Rename([("a", "")]),
        tr.Rename([("a", "x//y")]),
        tr.Rename([("a", "x/")]),
        tr.Concat(["a", "b"], "/x", 0),
        tr.Split("a", ["x", ""], 0),
        tr.UnstackLayers("a", "x//{i}", 0),
        tr.StackLayers("(?P<i>[0])|a", "x//y", 0),
    ):
        source = {"0": AB["a"]} if isinstance(transform, tr.StackLayers) else AB
        assert [(problem.kind, problem.leaf) for problem in problems(transform, source)][:1] == [
            ("rule", next(iter(source)))
        ]
    kept, diagnostics = run(tr.Rename([("(.*)//(.*)", r"\2//\1")]), {"a//b": AB["a"]})
    assert list(kept) == ["b//a"] and not diagnostics.problems


def test_renames_that_collide_lose_nothing_silently():
    problem = only_problem(tr.Rename([("a", "b")]), AB)
    assert problem.kind == "duplicate" and "'a'" in problem.message and "'b'" in problem.message


def test_merge_refuses_a_leaf_below_a_leaf():
    problem = only_problem(tr.Merge({"a": {"b": 2}}), AB)
    assert problem.kind == "duplicate" and "'a'" in problem.message and "'a/b'" in problem.message


def test_merge_is_equal_by_numbers_and_keeps_the_callers_arrays():
    array = np.arange(3.0)
    transform = tr.Merge({"x": array})
    assert transform == tr.Merge({"x": array.copy()}) and transform != tr.Merge({"x": array + 1})
    assert transform != tr.Merge({"x": array.astype(np.float32)})
    assert transform({}, {})["x"] is array
    lazy = as_view(array)
    assert tr.Merge({"x": lazy}) == tr.Merge({"x": lazy}) and tr.Merge({"x": lazy}) != tr.Merge({"x": as_view(array)})
