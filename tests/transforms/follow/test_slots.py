"""Optimizer leaves are assigned to parameters by their names."""

import numpy as np
import pytest

from orbax_t5x import transforms as tr
from orbax_t5x.testing.transform_suite import run
from tests.support.followed_networks import state

pytestmark = pytest.mark.slow
W = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_sources_with_names_follow_too():
    one, two = state({"a": W}, {"0/mu/a": W + 1}), state({"a": -W}, {"0/mu/a": W + 2})
    source = {f"x/{n}": v for n, v in one.items()} | {f"y/{n}": v for n, v in two.items()}
    take = tr.FollowOptimizer(tr.Rename([("y/target/(.*)", r"target/\1"), ("x/.*", None), ("y/(state/step)", r"\1")]))
    result, _ = run(take, source)
    assert sorted(result) == ["state/param_states/0/mu/a", "state/step", "target/a"]
    assert np.array_equal(result["state/param_states/0/mu/a"], W + 2)
    mean = tr.FollowOptimizer(tr.Average([1, 1], pattern="target/.*"))
    result, diagnostics = run(mean, source)
    np.testing.assert_array_equal(result["state/param_states/0/mu/a"], W + 1.5)
    assert diagnostics.fidelity["state/param_states/0/mu/a"] == "approximate"


def test_scalars_and_nones_by_hand():
    nested = {"target": {"a": 1, "b": 2}, "state": {"param_states": {"0": {"mu": {"a": 3, "b": 4}}, "a": None}}}
    result = tr.FollowOptimizer(tr.Rename([("target/a", "target/c")]))(nested, {})
    assert result == {"target": {"c": 1, "b": 2}, "state": {"param_states": {"0": {"mu": {"c": 3, "b": 4}}, "c": None}}}
