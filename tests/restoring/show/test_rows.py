"""Rows that the table and the HTML of a plan share."""

import re
import sys

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from tests.support.memory_checkpoint import checkpoint
from tests.support.shown_plans import LAYERS, leaf


def test_bytes_are_those_of_the_shards_here(t5_plan):
    entry = next(entry for entry in t5_plan.to_json()["entries"] if entry["name"] == "stacked")
    assert entry["bytes"] == 4 * LAYERS * 8 * 4 and t5_plan.bytes_to_read == sum(
        entry["bytes"] for entry in t5_plan.to_json()["entries"]
    )


def test_the_table_says_what_an_execution_did(t5_plan):
    assert "Executed" not in str(t5_plan)
    t5_plan.execute()
    assert re.search(
        r"Executed: \S+ KiB read in \d+\.\d\d s, \d+ leaves without checksum, 1 leaf from fallback\.",
        " ".join(str(t5_plan).split()),
    )


def test_a_leaf_of_the_fallback_takes_one_line(monkeypatch):
    new = {f"part_{letter}/{'x' * 10}": leaf((4 + size,), P()) for size, letter in enumerate("abcdef")}
    target = {**new, "old": leaf((8,), P("model"))}
    fallback = {name: np.zeros(one.shape, np.float32) for name, one in new.items()}
    plan = ot.plan_restore(checkpoint({"old": np.zeros(8, np.float32)}), target, fallback=fallback)
    monkeypatch.setenv("COLUMNS", "60")
    lines = [line for line in str(plan).splitlines() if line.startswith("part_")]
    assert len(lines) == len(new) and all("fallback" in line and "float32[" in line for line in lines)


def test_constants_are_listed_apart(t5_plan, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    rows, _, section = str(t5_plan).partition("Constants: put there by a transform, not read (1):\n")
    assert section.startswith("  constant  float32[2]\n") and "constant  " not in rows


@pytest.mark.slow
def test_work_grows_with_the_leaves_not_faster():
    """Counted in calls: time is the machine's, and a collection of garbage costs more than the whole."""

    def calls(count):
        arrays = {f"layers_{i // 50}/part_{i % 50}/{'abc'[i % 3]}": np.zeros(1, np.float32) for i in range(count)}
        plan = ot.plan_restore(checkpoint(arrays), None)
        total = 0

        def note(frame, event, argument):
            nonlocal total
            total += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            str(plan), plan.to_json(), plan._repr_html_(), plan.diff(plan)
        finally:
            sys.setprofile(None)
        return total

    assert 1_000 < calls(2_000) < 6 * calls(500)


def test_an_entry_says_all_that_happens_and_its_cast():
    arrays = {"a": np.zeros((2, 3), np.float16), "b": np.zeros((3, 2), np.float16), "c": np.zeros(2, np.float16)}

    def join(state, target):
        return {"joined": ot.concatenate([state["a"].T, state["b"]], 0), "c": state["c"]}

    target = {"joined": leaf((6, 2)), "c": leaf((2,)), "new": leaf((2,))}
    plan = ot.plan_restore(checkpoint(arrays), target, join, fallback={"new": np.zeros(2, np.float16)})
    expected = {
        "joined": "transpose (1, 0) of input 1, concatenation of 2 on axis 0, cast float32",
        "c": "cast float32",
        "new": "cast float32",
    }
    assert {entry.name: entry.how for entry in plan.entries} == expected
    assert {entry["name"]: entry["how"] for entry in plan.to_json()["entries"]} == expected
    assert all(how in plan.explain(name) for name, how in expected.items())
