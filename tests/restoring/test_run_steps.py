"""The other steps of a run's root, and whether they have a record."""

import shutil

import numpy as np
import orbax.checkpoint as ocp

import orbax_t5x as ot
from orbax_t5x.restoring.run_steps import has_other_steps, lacks_record, step_item

IN_PLACE = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)


def save(root, handler, step, **options):
    manager_options = ocp.CheckpointManagerOptions(atomicity_options=IN_PLACE)
    with ocp.CheckpointManager(root, item_handlers=handler, options=manager_options) as manager:
        manager.save(step, args=ot.args.TrainStateSave({"x": np.ones(2)}, **options))


def save_as_stock(root, step):
    options = ocp.CheckpointManagerOptions(atomicity_options=IN_PLACE)
    with ocp.CheckpointManager(root, options=options) as manager:
        manager.save(step, args=ocp.args.StandardSave({"x": np.ones(2)}), force=True)


def test_only_finished_steps_count(tmp_path):
    save_as_stock(tmp_path, 0)
    save(tmp_path, ot.TrainStateHandler(), 1, provenance=())
    save_as_stock(tmp_path, 2)
    second = tmp_path / "2" / "default"
    assert step_item(second) == (str(tmp_path), "default", 2)
    assert lacks_record(second) and has_other_steps(step_item(second))
    assert not lacks_record(tmp_path / "0" / "default")  # nothing is older
    (tmp_path / "1" / "commit_success.txt").unlink()  # as a save in place that was killed leaves it
    assert not lacks_record(second)
    shutil.rmtree(tmp_path / "0")
    shutil.rmtree(tmp_path / "1")
    assert not has_other_steps(step_item(second))


def test_a_record_before_several_steps_without_one_counts(tmp_path):
    save(tmp_path, ot.TrainStateHandler(), 1, provenance=())
    with ocp.CheckpointManager(tmp_path) as manager:
        for step in range(2, 30):
            manager.save(step, args=ocp.args.StandardSave({"x": np.ones(2)}), force=True)
    assert lacks_record(tmp_path / "29" / "default")
