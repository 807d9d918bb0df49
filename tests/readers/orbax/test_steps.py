"""Steps that Orbax has not finished, and items whose deletion it has not finished: against Orbax itself."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as v1
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointNotFoundError, CorruptCheckpointError
from tests.support.format_suites import save_orbax

IN_PLACE = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)


def options(**given):
    return ocp.CheckpointManagerOptions(atomicity_options=IN_PLACE, **given)


def save(root, *steps):
    with ocp.CheckpointManager(root, options=options()) as manager:
        for step in steps:
            items = {name: ocp.args.StandardSave({"x": np.full(2, step)}) for name in ("a", "b")}
            manager.save(step, args=ocp.args.Composite(**items))


def orbax_steps(root):
    with ocp.CheckpointManager(root, options=options(read_only=True)) as manager:
        return sorted(manager.all_steps())


def unfinish(step, *, items=()):
    """What a save in place that was killed leaves."""
    (step / "commit_success.txt").unlink()
    for item in items:
        shutil.rmtree(step / item)


@pytest.mark.parametrize("items", [(), ("b",)])
def test_the_newest_step_is_the_newest_committed_one(tmp_path, items):
    save(tmp_path, 1, 2, 3)
    unfinish(tmp_path / "3", items=items)
    assert orbax_steps(tmp_path) == [1, 2]
    assert ot.latest_step(tmp_path) == ot.latest_step(tmp_path, validated=True) == 2
    np.testing.assert_array_equal(ot.restore(tmp_path, None, item="a")["x"], [2, 2])
    with ot.open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.step == 2
    # By its own path it is what was asked for.
    np.testing.assert_array_equal(ot.restore(tmp_path / "3", None, item="a")["x"], [3, 3])


def test_the_first_step_is_known_by_its_items(tmp_path):
    save(tmp_path, 1)
    unfinish(tmp_path / "1")
    assert orbax_steps(tmp_path) == []
    assert ot.latest_step(tmp_path) is None
    with pytest.raises(CheckpointNotFoundError):
        ot.restore(tmp_path, None)


def test_steps_of_orbax_versions_that_wrote_no_mark_stay_steps(tmp_path, goldens):
    """A run that began with such a version: its steps, and then marked ones."""
    old = goldens / "t5x_orbax" / "d1_adamw_oldjax" / "checkpoint_3"
    assert not (old / "commit_success.txt").exists()
    shutil.copytree(old, tmp_path / "3")
    assert ot.latest_step(tmp_path) == 3
    save(tmp_path, 5)
    with ot.open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.step == 5
    shutil.rmtree(tmp_path / "5")
    assert ot.latest_step(tmp_path) == 3


# Earlier versions of Orbax delete whole steps alone, and know no record.
KNOWS_DELETION = hasattr(v1, "delete")


def assert_orbax_refuses(load, match):
    if KNOWS_DELETION:
        with pytest.raises(Exception, match=match):
            load()


@pytest.fixture
def step(tmp_path):
    """A step of Orbax v1 with two items, of which one is being deleted."""
    path = tmp_path / "root" / "4"
    v1.save_checkpointables(path, {"a": {"x": np.ones(2)}, "b": {"x": np.zeros(2)}})
    begin_deletion(path, "b")
    return path


def begin_deletion(path, name):
    """The record that `v1.delete` writes before anything else."""
    metadata = json.loads((path / "_CHECKPOINT_METADATA").read_text())
    handlers = {item: handler for item, handler in metadata["item_handlers"].items() if item != name}
    record = {
        "operation_id": "0" * 32,
        "checkpointable_name": name,
        "destination": None,
        "original_metadata": metadata,
        "updated_metadata": {**metadata, "item_handlers": handlers},
    }
    (path / "_CHECKPOINT_DELETION").write_text(json.dumps(record))


def test_an_item_that_is_being_deleted_is_left_out(step, caplog):
    if KNOWS_DELETION:
        assert v1.load_checkpointables(step).keys() == {"a"}
    with caplog.at_level(logging.WARNING, logger="orbax_t5x"), ot.open_checkpoint(step) as checkpoint:
        assert list(checkpoint.leaves) == ["x"]
        np.testing.assert_array_equal(checkpoint.leaves["x"].get(), 1)
    assert "'b' is left out" in caplog.text
    assert ot.latest_step(step.parent) == 4


def test_an_item_that_is_being_deleted_is_not_read(step):
    assert_orbax_refuses(lambda: v1.load_checkpointables(step, {"b": None}), "pending deletion")
    for path, item in ((step, "b"), (step / "b", None), (step.parent, "b")):
        with pytest.raises(CheckpointNotFoundError, match="deletion"):
            ot.restore(path, None, item=item)


def test_a_step_whose_only_item_is_being_deleted_is_none(tmp_path):
    for number in (1, 2):
        v1.save(tmp_path / str(number), {"x": np.full(2, number)})
    (item,) = (entry.name for entry in (tmp_path / "2").iterdir() if entry.is_dir())
    begin_deletion(tmp_path / "2", item)
    assert_orbax_refuses(lambda: v1.load(tmp_path / "2"), "No valid PyTree")
    with pytest.raises(CheckpointNotFoundError, match="deletion"):
        ot.restore(tmp_path / "2", None)
    assert ot.latest_step(tmp_path) == 1
    np.testing.assert_array_equal(ot.restore(tmp_path, None)["x"], [1, 1])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"checkpointable_name": 3}'])
def test_a_damaged_record_is_an_error_as_in_orbax(step, text):
    (step / "_CHECKPOINT_DELETION").write_text(text)
    assert_orbax_refuses(lambda: v1.load_checkpointables(step), "deletion record")
    with pytest.raises(CorruptCheckpointError, match="_CHECKPOINT_DELETION"):
        ot.restore(step, None)
    assert ot.latest_step(step.parent) == 4


def touch_step(root: Path, name: str) -> Path:
    (root / name / "state").mkdir(parents=True)
    (root / name / "state" / "_METADATA").write_text("{}")
    return root / name


def test_latest_step_of_names(tmp_path):
    assert ot.latest_step(tmp_path / "nowhere") is None
    assert ot.latest_step(tmp_path) is None
    touch_step(tmp_path, "checkpoint_0")
    assert ot.latest_step(tmp_path) == 0
    for name in ("checkpoint_9", "checkpoint_10", "00000007", "dataset_8"):
        touch_step(tmp_path, name)
    assert ot.latest_step(str(tmp_path)) == 10
    (tmp_path / "checkpoint_12").mkdir()  # empty
    (tmp_path / "checkpoint_13" / "state" / "d").mkdir(parents=True)  # half deleted
    (tmp_path / "checkpoint_14").write_text("a file")
    touch_step(tmp_path, "checkpoint_15.orbax-checkpoint-tmp-1700000000")
    touch_step(tmp_path, "16.orbax-checkpoint-tmp")
    touch_step(tmp_path, "checkpoint_17.tmp-1700000000")
    touch_step(tmp_path, "checkpoint_x18y")
    touch_step(tmp_path, "checkpoint_\u0661\u0669")
    (tmp_path / "checkpoint_20" / "state.orbax-checkpoint-tmp").mkdir(parents=True)
    (tmp_path / "checkpoint_20" / "state.orbax-checkpoint-tmp" / "_METADATA").write_text("{}")
    (tmp_path / "checkpoint_21").symlink_to("checkpoint_21")
    assert ot.latest_step(tmp_path) == 10


def test_latest_step_counts_native_t5x_steps(tmp_path):
    touch_step(tmp_path, "checkpoint_5")
    (tmp_path / "checkpoint_8").mkdir()
    (tmp_path / "checkpoint_8" / "checkpoint").write_bytes(b"\x82\xa7version\x03\xa9optimizer\x80")
    assert ot.latest_step(tmp_path) == 8


def test_latest_step_agrees_with_orbax(several_items, tmp_path):
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for step in (0, 2, 11):
            manager.save(step, args=ocp.args.StandardSave({"w": np.ones(2)}))
        assert ot.latest_step(tmp_path) == manager.latest_step() == 11
    for root in (several_items, tmp_path):
        assert ot.latest_step(root) == max(ocp.path.step.checkpoint_steps(root))


def test_validated_skips_what_does_not_open(tmp_path):
    for step in (1, 2, 3, 4):
        save_orbax(tmp_path / f"{step}" / "state", {"w": np.ones(2), "v": np.ones(2)}, ocdbt=False)
    (tmp_path / "4" / "state" / "_METADATA").write_text("{")
    (tmp_path / "3" / "state" / "w" / ".zarray").unlink()
    assert ot.latest_step(tmp_path) == 4
    with pytest.warns(UserWarning, match="is skipped") as caught:
        assert ot.latest_step(tmp_path, validated=True) == 2
    assert len(caught) == 2


def test_two_directories_of_one_step(tmp_path):
    touch_step(tmp_path, "3")
    touch_step(tmp_path, "checkpoint_3")
    assert ot.latest_step(tmp_path) == 3
    with pytest.raises(ot.errors.UnsupportedCheckpointError, match="'3', 'checkpoint_3'"):
        ot.open_checkpoint(tmp_path)
