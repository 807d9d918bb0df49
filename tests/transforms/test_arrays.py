"""Transforms that compute leaves: shapes that do not fit, leaves that are no arrays."""

import numpy as np

from orbax_t5x import transforms as tr
from orbax_t5x.lazy import ValueLeaf, as_view
from orbax_t5x.testing.transform_suite import run
from tests.support.transform_cases import AB, only_problem, problems


def test_shapes_that_do_not_fit_are_problems_and_the_rest_goes_on():
    for transform in (
        tr.Reshape("a", (3,)),
        tr.Transpose("a", (1, 0)),
        tr.Repeat("a", 2, 4),
        tr.Pad("a", (1,)),
        tr.Pad("a", (3, 3)),
        tr.Slice("a", 2),
        tr.Slice("a", (0, 0)),
        tr.AddLowRank("a", "b", "c", 1),
        tr.Dequantize("a", "b"),
        tr.Split("a", ["x", "y", "z"], 0),
        tr.Split("a", ["x", "y"], 0, [1, 2]),
        tr.Split("a", ["x", "y"], 1),
        tr.UnstackLayers("a", "a{i}", 1),
        tr.Concat(["a", "b"], "x", 1),
    ):
        problem = only_problem(transform, AB)
        assert problem.kind == "shape" and problem.message, transform


def test_none_leaves_and_strings_pass_through_what_cannot_compute_them():
    result, diagnostics = run(tr.Cast(".*", "float32"), {"n": None, "x": AB["a"]})
    assert result["n"] is None and not diagnostics.problems
    strings = {"s": as_view(ValueLeaf(np.array([b"x"], object), "s"))}
    assert [p.kind for p in problems(tr.Cast(".*", "float32"), strings)] == ["shape"]
