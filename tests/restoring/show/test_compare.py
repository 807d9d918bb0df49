"""Plans are compared leaf by leaf."""

import numpy as np
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from tests.support.memory_checkpoint import checkpoint
from tests.support.shown_plans import leaf


def planned(target, arrays, **options):
    return ot.plan_restore(checkpoint(arrays), target, strict=False, **options)


def test_equal_plans_differ_in_nothing(t5_plan):
    assert t5_plan.diff(t5_plan) == ""


def test_diff_says_each_difference_once_for_all_layers():
    arrays = {f"layers_{i}/w": np.zeros((8, 4), np.float32) for i in range(6)} | {
        "old": np.zeros(1),
        "x": np.zeros(8, np.float32),
    }
    ours = planned({f"layers_{i}": {"w": leaf((8, 4), P())} for i in range(6)} | {"x": leaf((8,))}, arrays)
    theirs = planned(
        {f"layers_{i}": {"w": leaf((8, 4), P("data"))} for i in range(6)} | {"old": np.zeros(1), "new": ...}, arrays
    )
    lines = ours.diff(theirs).splitlines()
    assert lines == [
        "- x",
        "+ new",
        "+ old",
        "~ layers_{0…5}/w ×6: sharding P() -> P('data')",
        "  no longer unused: old",
        "  newly unused: x",
        "this process reads 800 B -> 776 B",
    ]


def test_diff_sees_other_sources_and_casts():
    arrays = {"a": np.zeros(4, np.float32), "b": np.zeros(4, np.float32), "c": np.zeros(4, np.float16)}

    def swap(state, target):
        return {**state, "a": state["b"], "b": state["a"], "c": state["c"].astype(np.float32)}

    target = {name: np.zeros(4, np.float32) for name in "abc"}
    text = planned(target, arrays).diff(planned(target, arrays, transforms=[swap]))
    assert "~ a: from a -> b" in text and "~ b: from b -> a" in text
