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
    take = tr.Rename([("y/target/(.*)", r"target/\1"), ("x/.*", None), ("y/(state/step)", r"\1")])
    result, _ = run(take, source, state({"a": W}, {"0/mu/a": W}))
    assert sorted(result) == ["state/param_states/0/mu/a", "state/step", "target/a"]
    assert np.array_equal(result["state/param_states/0/mu/a"], W + 2)
    result, diagnostics = run(tr.Average([1, 1], pattern="target/.*"), source)
    np.testing.assert_array_equal(result["target/a"], 0 * W)
    assert diagnostics.lost.keys() == {f"{source}/state/param_states/0/mu/a" for source in "xy"}


def test_nested_states_by_hand():
    first, second = np.ones(1), np.ones(2)
    nested = {"target": {"a": 1, "b": first}, "state": {"param_states": {"0": {"mu": {"a": 3, "b": second[:1]}}}}}
    result = tr.Rename([("target/a", "target/c")])(nested, {})
    assert result["state"]["param_states"]["0"]["mu"] == {"c": 3, "b": second[:1]}
