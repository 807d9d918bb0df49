"""Plans are made without reading an array."""

import gc

import numpy as np
import pytest

import orbax_t5x as ot
from tests.support.memory_checkpoint import checkpoint
from tests.support.placed_arrays import sharded, values


def test_only_what_the_target_names_is_read(kind):
    source = checkpoint({"a": values((8,)), "b": values((8,))}, kind)
    plan = ot.plan_restore(source, {"a": np.zeros(8, np.float32)}, strict=False)
    assert plan.unused == ("b",) and plan.bytes_to_read == 32
    plan.execute()
    assert source.made["b"].boxes == [] and plan.report.bytes_read == 32


def test_planning_reads_nothing(kind):
    source = checkpoint({"a": values((8,))}, kind)
    plan = ot.plan_restore(source, {"a": sharded((8,))})
    str(plan), plan.to_json(), plan.explain("a"), plan._repr_html_(), plan.bytes_to_read
    assert source.made["a"].boxes == []


@pytest.mark.parametrize("is_lazy", [False, True])
def test_what_transforms_read_is_counted(kind, is_lazy):
    def doubled(state, target):

        def fn(value):
            return value * 2

        return {"a": state["a"].map(fn) if is_lazy else fn(np.asarray(state["a"])), "b": state["b"]}

    source = checkpoint({"a": values((8,)), "b": values((4,))}, kind)
    plan = ot.plan_restore(source, {"a": np.zeros(8, np.float32), "b": np.zeros(4, np.float32)}, [doubled])
    read = 0 if is_lazy else 32
    assert (plan.bytes_read_at_planning, plan.bytes_to_read) == (read, 48 - read)
    assert plan.to_json()["bytes_read_at_planning"] == read
    assert [warning for warning in plan.warnings if "while the plan was made" in warning] == list(plan.warnings)
    assert len(plan.warnings) == (not is_lazy)
    said = " ".join(str(plan).split())
    assert ("Transforms read 32 B while the plan was made. This process still reads 16 B" in said) == (not is_lazy)
    assert ("Constants: put there by a transform (1)" in said) == (not is_lazy) and "not read" not in said
    np.testing.assert_array_equal(plan.execute()["a"], values((8,)) * 2)
    assert plan.bytes_read_at_planning == read and plan.report.bytes_read == 48 - read


def test_several_sources():
    got = ot.restore(
        {"one": checkpoint({"a": values((2,))}), "two": checkpoint({"a": values((2,), seed=1)})},
        {"x": np.zeros(2, np.float32), "y": np.zeros(2, np.float32)},
        lambda state, target: {"x": state["two"]["a"], "y": state["one"]["a"]},
    )
    np.testing.assert_array_equal(got["x"], values((2,), seed=1))
    np.testing.assert_array_equal(got["y"], values((2,)))


def test_transforms_happen_once():
    rules = [ot.transforms.Rename([("a", "b")])]
    target = {"b": np.zeros(2, np.float32)}
    plan = ot.plan_restore(checkpoint({"a": values((2,))}), target, rules)
    metadata = {"custom_metadata": {"orbax_t5x": {"provenance": list(plan.provenance)}}}
    saved = checkpoint({"b": values((2,))}, metadata=metadata)
    again = ot.plan_restore(saved, target, rules)
    assert again.provenance == plan.provenance
    np.testing.assert_array_equal(again.execute()["b"], values((2,)))
    assert "is_resuming=False" in again.warnings[0]
    # A new run from another one's checkpoint: what was applied before does not matter, and is remembered.
    other = ot.plan_restore(saved, {"c": np.zeros(2, np.float32)}, [ot.transforms.Rename([("b", "c")])])
    assert [entry["text"] for entry in other.provenance] == ["Rename((('a', 'b'),))", "Rename((('b', 'c'),))"]
    np.testing.assert_array_equal(other.execute()["c"], values((2,)))
    with pytest.raises(ot.RestorePlanError):
        ot.plan_restore(saved, target, rules, is_resuming=False)


def test_a_plan_has_two_objects_for_each_leaf_that_pythons_collector_goes_through():
    """A full collection takes longer than the plan; how often it comes follows the number of such objects."""
    count = 1000
    source = checkpoint({f"l{number}": values((8,)) for number in range(count)})
    target = {"params": {f"l{number}": sharded((8,)) for number in range(count)}}
    rename = ot.transforms.Rename([(r"l(\d+)", r"params/l\1")])
    ot.plan_restore(source, target, [rename])
    made: list[int] = []
    gc.collect()
    gc.callbacks.append(lambda phase, info: made.append(info["generation"]) if phase == "start" else None)
    try:
        before = len(gc.get_objects())
        plan = ot.plan_restore(source, target, [rename])
        collections = len(made)
        gc.collect()
    finally:
        gc.callbacks.pop()
    assert len(gc.get_objects()) - before <= 2.1 * len(plan.entries)
    # Each comes after so many new objects that were not freed yet.
    assert collections <= 6 * count / gc.get_threshold()[0]
