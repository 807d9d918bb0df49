"""Optimizer leaves are assigned to parameters by their names."""

import numpy as np
import pytest

from orbax_t5x import transforms as tr
from orbax_t5x.optim.moments import SlotNames
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


def test_slots_are_found_by_their_endings():
    names = [
        "target/w",
        "target/mu/w",
        "state/param_states/0/mu/w",
        "state/param_states/0/mu/mu/w",
        "state/param_states/0/nu/w",
        "state/param_states/0/nu/mu/w",
        "state/param_states/0/count",
        "state/param_states/w/v_row",
        "state/param_states/mu/w/v_row",
        "state/param_states/w",
        "state/step",
    ]
    found = {name: (slot.kind, slot.param) for name, slot in SlotNames().slots(dict.fromkeys(names)).items()}
    assert found == {
        "state/param_states/0/mu/w": ("mu", "w"),
        "state/param_states/0/mu/mu/w": ("mu", "mu/w"),
        "state/param_states/0/nu/w": ("nu", "w"),
        "state/param_states/0/nu/mu/w": ("nu", "mu/w"),
        "state/param_states/w/v_row": ("v_row", "w"),
        "state/param_states/mu/w/v_row": ("v_row", "mu/w"),
        "state/param_states/w": ("", "w"),
    }
    assert all(SlotNames().slot_name(slot) == name for name, slot in SlotNames().slots(dict.fromkeys(names)).items())
    more = dict.fromkeys(["params/a", "opt_state/0/mu/a", "state/x/a"])
    assert SlotNames().slots(more).keys() == {"opt_state/0/mu/a"}
