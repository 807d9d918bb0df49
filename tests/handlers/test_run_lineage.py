"""The lineage of a run around restores."""

import json

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as v1
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.provenance import records as provenance
from tests.support.recorded_chains import digests_of
from tests.support.saving import assert_same


def abstract(tree, sharding=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding), tree)


def test_a_resumed_run_does_not_transform_twice(tmp_path, state):
    rename = ot.transforms.Rename([(r"params/(.*)", r"model/\1")])
    target = {"model": abstract(state["params"]), "step": abstract(state["step"])}
    with ocp.CheckpointManager(tmp_path / "theirs") as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
    args = ot.args.TrainStateRestore(target, rename)
    with ocp.CheckpointManager(tmp_path / "ours", item_handlers=ot.TrainStateHandler()) as manager:
        handler = ot.TrainStateHandler()
        with ocp.Checkpointer(handler) as checkpointer:
            first = checkpointer.restore(tmp_path / "theirs" / "0" / "default", args=args)
            assert [entry["digest"] for entry in handler.provenance] == digests_of([rename])
        manager.save(1, args=ot.args.TrainStateSave(first, provenance=handler.provenance))
        manager.wait_until_finished()
        again = manager.restore(1, args=args)
        assert_same(again, first)
        # The run's lineage is written without being told, however the step was restored.
        manager.restore(1)
        manager.save(2, args=ot.args.TrainStateSave(again))
        manager.wait_until_finished()
        assert_same(manager.restore(2, args=args), first)
        other = ot.transforms.Rename([(r"params/(.*)", r"model/x\1")])
        with pytest.raises(RestorePlanError, match="is_resuming"):
            manager.restore(2, args=ot.args.TrainStateRestore(target, other))
        written = [
            json.loads((tmp_path / "ours" / str(step) / "default" / "_METADATA").read_text())["custom_metadata"]
            for step in (1, 2)
        ]
    assert written[0] == written[1] and len(provenance.from_metadata(written[0])) == 1


def test_a_failed_restore_does_not_change_the_provenance(tmp_path, state):
    record = {"text": "f", "digest": "0"}
    handler = ot.TrainStateHandler()
    with ocp.CheckpointManager(tmp_path, item_handlers=handler) as manager:
        manager.save(0, args=ot.args.TrainStateSave(state, provenance=[record]))
        manager.wait_until_finished()
        with pytest.raises(RestorePlanError):
            manager.restore(0, args=ot.args.TrainStateRestore({"nothing": np.zeros(1)}))
        assert handler.provenance == ()
        manager.restore(0, args=ot.args.TrainStateRestore(None))
        assert handler.provenance == (record,)


def test_a_run_goes_on_in_orbax_v1(tmp_path):
    """A manager's single item and that of v1 have different names and the same history."""
    swap = ot.transforms.Rename([("x", "y"), ("y", "x")])
    state = {"x": np.zeros(2), "y": np.ones(2)}
    with ocp.CheckpointManager(tmp_path / "source", item_handlers=ot.TrainStateHandler()) as manager:
        manager.save(0, args=ot.args.TrainStateSave(state, provenance=()))
    with ot.v1.context():
        loaded = v1.load_checkpointables(tmp_path / "source" / "0", {"default": ot.v1.AbstractTrainState(state, swap)})
        v1.save(tmp_path / "run" / "0", loaded["default"])
    plan = ot.plan_restore(tmp_path / "run", state, [swap])
    np.testing.assert_array_equal(plan.execute()["x"], state["y"])
    # What stock Orbax adds to the run is of its history, under either name.
    with v1.training.Checkpointer(tmp_path / "source") as checkpointer:
        checkpointer.save(1, plan.execute())
    with pytest.raises(ot.RestorePlanError, match="nothing records"):
        ot.restore(tmp_path / "source", state, swap)
