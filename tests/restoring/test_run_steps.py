"""The newest step of a run, and the record that it has."""

import json
import shutil

import numpy as np
import orbax.checkpoint as ocp

import orbax_t5x as ot
from orbax_t5x.restoring.run_steps import newest_lineage, step_item

IN_PLACE = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)


def options(**given):
    return ocp.CheckpointManagerOptions(atomicity_options=IN_PLACE, **given)


def unfinish(step, *, items=()):
    """What a save in place that was killed leaves."""
    (step / "commit_success.txt").unlink()
    for item in items:
        shutil.rmtree(step / item)


def test_a_runs_lineage_is_read_from_committed_steps(tmp_path):
    with ocp.CheckpointManager(tmp_path, item_handlers=ot.TrainStateHandler(), options=options()) as manager:
        manager.save(1, args=ot.args.TrainStateSave({"x": np.ones(2)}, provenance=()))
        manager.save(2, args=ot.args.TrainStateSave({"x": np.ones(2)}))
    next_step = step_item(tmp_path / "3" / "default")
    assert next_step == (str(tmp_path), "default", 3)
    recorded = newest_lineage(next_step)
    assert recorded is not None
    metadata = tmp_path / "2" / "default" / "_METADATA"
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "custom_metadata": None}))
    assert newest_lineage(next_step) != recorded
    unfinish(tmp_path / "2")
    assert newest_lineage(next_step) == recorded
