"""Plans are made without reading an array."""

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
    assert [entry["transforms"] for entry in other.provenance] == [["Rename((('a', 'b'),))"], ["Rename((('b', 'c'),))"]]
    np.testing.assert_array_equal(other.execute()["c"], values((2,)))
    with pytest.raises(ot.RestorePlanError):
        ot.plan_restore(saved, target, rules, is_resuming=False)
