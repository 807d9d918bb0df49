"""Closest names are close, and found at little cost."""

import pytest

from orbax_t5x.transforms.patterns.closest import ClosestNames


@pytest.mark.slow
def test_closest_names_are_close_and_cheap():
    names = [f"target/decoder/layers_{i}/{m}/kernel" for i in range(5000) for m in ("query", "key", "value", "out")]
    assert ClosestNames(names).to("target/decoder/layer_17/query/kernel")[0] == "target/decoder/layers_17/query/kernel"
    assert ClosestNames(names).to(r"target/decoder/block_(\d+)/query/(.*)")[0].endswith("/query/kernel")
    assert ClosestNames(["x", "y"]).to("something/else") == []
    looked_at = ClosestNames(iter(f"n{i}" for i in range(10**9)))
    assert looked_at.to("n7")[0] == "n7"


def test_what_an_optimizer_keeps_is_close_to_nothing_of_the_model():
    names = ["params/other/thing", *(f"{root}/layers_0/w" for root in ("opt_state/0/mu", "state/param_states", "m/nu"))]
    assert ClosestNames(names).to("params/layers_0/w") == ["params/other/thing"]
    assert ClosestNames(names[1:]).to(r"params/layers_(\d+)/w") == []
    assert ClosestNames(names).to("opt_state/0/nu/layers_0/w")[0] == "opt_state/0/mu/layers_0/w"
