"""Transforms that compute leaves: shapes that do not fit, leaves that are no arrays."""

import jax
import numpy as np
import pytest

import orbax_t5x as ot
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


def test_affine_is_lazy_and_follows_only_a_scale_of_one(tmp_path):
    state = {"params": {"norm": np.zeros(3, np.float32)}, "opt_state": {"0": {"mu": {"norm": np.ones(3, np.float32)}}}}
    plus_one = ot.transforms.Affine("params/norm", offset=1.0)
    result = plus_one(state, {})
    np.testing.assert_array_equal(np.asarray(result["params"]["norm"]), np.ones(3))
    np.testing.assert_array_equal(np.asarray(result["opt_state"]["0"]["mu"]["norm"]), np.ones(3))
    leaves = {"params/norm": state["params"]["norm"], "opt_state/0/mu/norm": np.ones(3, np.float32)}
    target = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
    checkpoint = tmp_path / "state.npz"
    np.savez(checkpoint, **leaves)
    with pytest.raises(ot.RestorePlanError, match="its parameter was computed anew") as refused:
        ot.plan_restore(checkpoint, target, [ot.transforms.Affine("params/norm", scale=2.0)])
    assert [problem.kind for problem in refused.value.problems] == ["optimizer"]
    alone = ot.restore(checkpoint, target, [ot.transforms.Affine("params/norm", scale=2.0, follow=False)])
    np.testing.assert_array_equal(alone["opt_state/0/mu/norm"], np.ones(3))


@pytest.mark.parametrize("values", [np.arange(3), np.ones(2, bool), np.ones(2, np.complex64)])
def test_affine_takes_floating_leaves(values):
    with pytest.raises(ot.RestorePlanError, match="Cast them to a floating dtype first"):
        ot.transforms.Affine("x", 2.0)({"x": values}, {})
    with pytest.raises(ValueError, match="not both finite"):
        ot.transforms.Affine("x", float("inf"))
