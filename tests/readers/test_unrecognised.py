"""Paths that cannot be opened: errors name what was looked for and what is near."""

from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointIOError, CheckpointNotFoundError, UnsupportedCheckpointError
from tests.support.bundle_writer import bundle_of


def test_nothing_there(tmp_path):
    for path in (tmp_path / "nowhere", tmp_path / "a\0b", "", tmp_path / ("x" * 300)):
        with pytest.raises((CheckpointNotFoundError, CheckpointIOError)):
            ot.open_checkpoint(path)
    (tmp_path / "diagnostics.txt").write_text("")
    with pytest.raises(CheckpointNotFoundError) as caught:
        ot.open_checkpoint(tmp_path)
    for word in ("looked for", "TensorFlow bundle", "_METADATA", "safetensors", "found diagnostics.txt"):
        assert word in str(caught.value)
    assert isinstance(caught.value, FileNotFoundError)


def test_a_root_without_finished_steps(tmp_path):
    (tmp_path / "checkpoint_3").mkdir()
    (tmp_path / "4.orbax-checkpoint-tmp").mkdir()
    with pytest.raises(CheckpointNotFoundError, match="a root with finished steps"):
        ot.open_checkpoint(tmp_path)


def test_a_directory_of_checkpoints_is_none_of_them(tmp_path):
    with ocp.PyTreeCheckpointer() as checkpointer:
        for name in ("small", "large"):
            checkpointer.save(tmp_path / name, {"w": np.ones(3)})
    with pytest.raises(UnsupportedCheckpointError, match="a directory of checkpoints: 'large', 'small'; open one"):
        ot.open_checkpoint(tmp_path)
    with ot.open_checkpoint(tmp_path, item="small") as checkpoint:
        assert list(checkpoint.leaves) == ["w"]
    both = ot.restore({name: tmp_path / name for name in ("small", "large")}, None)
    assert sorted(both) == ["large", "small"]


@pytest.mark.parametrize("names", [("checkpoint-500", "checkpoint-1000"), ("my_run_final",), ("checkpoints",)])
def test_directories_of_other_programs_are_opened_by_their_own_paths(tmp_path, names):
    for name in names:
        if name.startswith("checkpoint-"):
            (tmp_path / name).mkdir()
            safetensors.numpy.save_file({"w": np.ones(3)}, tmp_path / name / "model.safetensors")
        else:
            with ocp.CheckpointManager(tmp_path / name) as manager:
                manager.save(3, args=ocp.args.StandardSave({"w": np.ones(3)}))
    if names == ("my_run_final",):  # a renamed step
        (tmp_path / "my_run_final").rename(tmp_path / "root")
        (tmp_path / "root" / "3").rename(tmp_path / "my_run_final")
        (tmp_path / "root").rmdir()
    with pytest.raises(CheckpointNotFoundError, match=f"a directory of checkpoints: {min(names)!r}.*by its own path"):
        ot.open_checkpoint(tmp_path)


def test_an_unfinished_save_is_named(tmp_path):
    (tmp_path / "0.orbax-checkpoint-tmp-1700000000").mkdir()
    with pytest.raises(CheckpointNotFoundError, match="is an unfinished save"):
        ot.open_checkpoint(tmp_path)


def test_a_name_of_the_hub():
    with pytest.raises(CheckpointNotFoundError, match="open 'hf://google/flan-t5-small'"):
        ot.open_checkpoint("google/flan-t5-small")


@pytest.mark.parametrize("path", ["gs:/bucket/model", Path("https://host/model.npz"), "s3:/bucket//x"])
def test_a_url_that_lost_a_slash(path):
    """`pathlib.Path` makes one of two."""
    url = str(path).replace(":/", "://", 1)
    with pytest.raises(CheckpointNotFoundError, match=rf"of a URL, open '{url}'"):
        ot.open_checkpoint(path)


def test_a_digit_that_is_missing(tmp_path):
    bundle_of({"w": np.ones(2, np.float32)}, 2).write(tmp_path, "model.ckpt-1000000")
    with pytest.raises(CheckpointNotFoundError, match=r"beside it: 'model\.ckpt-1000000'"):
        ot.open_checkpoint(tmp_path / "model.ckpt-100000")
    with pytest.raises(CheckpointNotFoundError, match=f"beside it: {tmp_path.name!r}"):
        ot.open_checkpoint(tmp_path.with_name(tmp_path.name[:-1]))


def test_a_step_that_is_not_there(tmp_path):
    for step in range(0, 50, 10):
        bundle = tmp_path / str(step) / "state"
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(bundle, {"w": np.ones(3)})
    with pytest.raises(
        CheckpointNotFoundError, match="finished steps beside it, the newest first: '40', '30', '20' and 2 more"
    ):
        ot.open_checkpoint(tmp_path / "99")
