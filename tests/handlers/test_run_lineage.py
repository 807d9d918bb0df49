"""The lineage of a run around restores."""

import json

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.provenance import records as provenance
from orbax_t5x.provenance.chains import ChainRecord
from orbax_t5x.provenance.digests import chain_digest
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
            assert handler.provenance[-1]["digest"] == chain_digest([rename])
        manager.save(1, args=ot.args.TrainStateSave(first, provenance=handler.provenance))
        manager.wait_until_finished()
        again = manager.restore(1, args=args)
        assert_same(again, first)
        # The run's lineage is written without being told, however the step was restored.
        manager.restore(1)
        manager.save(2, args=ot.args.TrainStateSave(again))
        manager.wait_until_finished()
        assert_same(manager.restore(2, args=args), first)
        other = ot.transforms.Rename([(r"params/w", r"model/v")])
        with pytest.raises(RestorePlanError, match="is_resuming"):
            manager.restore(2, args=ot.args.TrainStateRestore(target, other))
        written = [
            json.loads((tmp_path / "ours" / str(step) / "default" / "_METADATA").read_text())["custom_metadata"]
            for step in (1, 2)
        ]
    assert written[0] == written[1] and len(provenance.from_metadata(written[0])) == 1


def test_a_failed_restore_does_not_change_the_provenance(tmp_path, state):
    record = provenance.make_entry("/data", "orbax", ChainRecord())
    handler = ot.TrainStateHandler()
    with ocp.CheckpointManager(tmp_path, item_handlers=handler) as manager:
        manager.save(0, args=ot.args.TrainStateSave(state, provenance=[record]))
        manager.wait_until_finished()
        with pytest.raises(RestorePlanError):
            manager.restore(0, args=ot.args.TrainStateRestore({"nothing": np.zeros(1)}))
        assert handler.provenance == ()
        manager.restore(0, args=ot.args.TrainStateRestore(None))
        assert handler.provenance == (record,)
