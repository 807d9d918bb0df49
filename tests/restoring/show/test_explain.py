"""One leaf of a plan is explained."""

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from tests.support.memory_checkpoint import checkpoint
from tests.support.shown_plans import leaf


def test_explain_a_leaf_that_is_read(t5_plan):
    text = t5_plan.explain("layers/layers_3/query")
    for told in (
        "layers/layers_3/query: a leaf of the target, read from the checkpoint",
        "float32[8,16], 512 B",
        "encoder/block_003/q  float32[8,16]",
        "P(None, 'model') over data=2, model=4 (8 devices)",
        "512 B in 4 boxes for 4 shards here",
        "[0:8, 4:8]  128 B",
        "rules",
    ):
        assert told in text, told


def test_explain_a_stack_and_a_cast(t5_plan):
    stacked = t5_plan.explain("stacked")
    assert "stack of 12 on axis 1" in stacked and "… and 4 sources more" in stacked
    assert "of decoder/block_000/q" in stacked
    assert "bfloat16 -> float32: every value survives" in t5_plan.explain("embedding")


def test_explain_what_is_not_read(t5_plan):
    assert "the fallback gives it" in t5_plan.explain("new")
    assert "left as it is" in t5_plan.explain("kept")
    assert "a constant that a transform put there" in t5_plan.explain("constant")


def test_explain_leaves_of_the_checkpoint(t5_plan):
    assert "goes to   layers/layers_3/query" in t5_plan.explain("encoder/block_003/q")
    assert "goes to   stacked (stack of 12 on axis 1)" in t5_plan.explain("decoder/block_003/q")
    assert "unused" in t5_plan.explain("left/over")
    assert "dropped" in t5_plan.explain("gone")


def test_a_name_of_both_sides_is_explained_on_both(t5_plan):
    text = t5_plan.explain("embedding")
    assert "embedding: a leaf of the target" in text and "embedding: a leaf of the checkpoint" in text


def test_explain_an_unknown_name(t5_plan):
    with pytest.raises(
        KeyError, match="neither the target nor the checkpoint has a leaf 'layers/layers_3/quer'"
    ) as caught:
        t5_plan.explain("layers/layers_3/quer")
    assert "layers/layers_3/query" in caught.value.args[0].partition("closest: ")[2]


def test_explain_names_the_source_among_several():
    sources = {"a": checkpoint({"x": np.zeros(2, np.float32)}), "b": checkpoint({"x": np.ones(2, np.float32)})}
    plan = ot.plan_restore(sources, None)
    assert "in /memory" in plan.explain("b/x")


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
