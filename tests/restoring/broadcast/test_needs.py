"""What the processes of a job need: their boxes, each with the processes that need it."""

import json

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.multihost.groups import ProcessGroup
from orbax_t5x.restoring.broadcast import needs
from tests.support.memory_checkpoint import checkpoint

GROUP = ProcessGroup((0, 1), 0, "", 0)
ARRAY = np.zeros((4, 2), np.float32)


@pytest.fixture
def plan():
    return ot.plan_restore(checkpoint({"a": ARRAY, "b": ARRAY}), {"a": ARRAY, "b": ARRAY})


def test_boxes_that_several_processes_need_are_there_once(plan, monkeypatch):
    top, bottom, whole = [[[0, 2], [0, 2]]], [[[2, 4], [0, 2]]], [[[0, 4], [0, 2]]]
    others = [[top, whole], [bottom + top, []]]

    def gather_bytes(mine, error, group, path):
        assert error is None and json.loads(mine) == [whole, whole]  # what this process needs itself
        return [json.dumps(one).encode() for one in others]

    monkeypatch.setattr(needs, "gather_bytes", gather_bytes)
    first, second = needs.gather_needs(plan.entries, GROUP, "/memory")
    assert first.boxes == (((0, 2), (0, 2)), ((2, 4), (0, 2))) and first.needers == ((0, 1), (1,))
    assert second.boxes == (((0, 4), (0, 2)),) and second.needers == ((0,),)
    assert first.view is plan.entries[0].view and first.leaves == plan.entries[0].leaves
    ((leaf, boxes),) = first.reads
    assert leaf.name == "a" and boxes == first.boxes


@pytest.mark.parametrize("other", [None, "broadcast", "entries"])
def test_processes_with_other_plans_are_an_error_on_all(plan, monkeypatch, other):
    digests = []

    def gather_bytes(mine, error, group, path):
        digests.append(mine)
        return digests

    monkeypatch.setattr(needs, "gather_bytes", gather_bytes)
    needs.compare_plans(plan, True, GROUP, "/memory")
    if other == "entries":
        plan = ot.plan_restore(checkpoint({"a": ARRAY, "b": ARRAY}), {"a": ARRAY}, strict=False)
    if other is None:
        needs.compare_plans(plan, True, GROUP, "/memory")
        return
    with pytest.raises(RestorePlanError, match="have different plans") as caught:
        needs.compare_plans(plan, other != "broadcast", GROUP, "/memory")
    assert caught.value.path == "/memory"
