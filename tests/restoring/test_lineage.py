"""The lineage of a source: as its checkpoint records it, as older steps complete it, and what is decided by it."""

import pytest

import orbax_t5x as ot
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.provenance.records import UNRECORDED, to_metadata
from orbax_t5x.provenance.steps import steps_of
from orbax_t5x.restoring import lineage
from orbax_t5x.restoring.options import RestoreOptions
from orbax_t5x.restoring.sources import OpenSources
from tests.support.memory_checkpoint import checkpoint

RENAME = ot.transforms.Rename((("a", "b"),))


def history(checkpoints):
    return lineage.SourceHistory(OpenSources(checkpoints))


def recorded(*transforms):
    """The metadata of an item whose run began with these transforms."""
    plan = ot.plan_restore(checkpoint({"a": [1.0]}), None, transforms)
    return {"custom_metadata": to_metadata(list(plan.provenance))}


def test_a_single_item_and_several_are_read_by_name():
    one = checkpoint({"a": [1.0]}, metadata={"items": {"state": recorded(RENAME)}, **recorded(RENAME)})
    (entry,) = history({"": one}).recorded[""]
    assert "Rename" in entry["text"]
    several = checkpoint({"a": [1.0]}, metadata={"items": {"x": recorded(RENAME), "y": {}}})
    found = history({"": several}).recorded
    assert found["x"] == (entry,) and found["y"] is None
    named = history({"x": one, "y": one}).recorded[""]
    assert named == ({**entry, "source": "x"}, {**entry, "source": "y"})


def test_history_is_read_only_where_a_record_is_missing(monkeypatch):
    one = checkpoint({"a": [1.0]}, metadata={"items": {"x": {}, "y": recorded(RENAME)}})
    asked = []
    monkeypatch.setattr(lineage, "_lacks_record", lambda path: asked.append(path) or True)
    records = history({"": one}).with_older_steps()
    assert asked == ["/memory/x"] and records == {"x": (UNRECORDED,), "y": history({"": one}).recorded["y"]}
    asked.clear()
    assert history({"": checkpoint({}, format="t5x")}).with_older_steps() == {"": None}
    assert asked == []


def decide(records, kind="restore", **options):
    return history({"": checkpoint({"a": [1.0]})}).decide(records, steps_of([RENAME]), RestoreOptions(**options), kind)


def test_only_the_caller_can_decide_over_what_is_unrecorded():
    with pytest.raises(RestorePlanError) as caught:
        decide({"": (UNRECORDED,)})
    (problem,) = caught.value.problems
    assert problem.kind == "provenance" and caught.value.path == "/memory"
    assert {"is_resuming": True} in [dict(way.arguments) for way in problem.fix.ways]
    assert decide({"": (UNRECORDED,)}, is_resuming=True).is_resuming
    assert not decide({"": (UNRECORDED,)}, is_resuming=False).is_resuming


def test_without_a_record_the_transforms_are_applied_and_recorded():
    decision = decide({"": None})
    assert not decision.is_resuming and len(decision.lineage) == 1
    again = decide({"": decision.lineage}, kind="own step")
    assert again.is_resuming and again.lineage == decision.lineage
