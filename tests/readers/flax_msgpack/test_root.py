"""Roots of Flax, written by Flax's own function: which step is the newest, and who owns a directory."""

import functools
import importlib.util
from unittest import mock

import flax
import flax.serialization
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, UnsafeCheckpointError, UnsupportedCheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:Flax Checkpointing will soon be deprecated")


@pytest.fixture(autouse=True)
def flax_files():
    """Flax writes its own files, and says that Orbax would write better ones."""
    flax.config.update("flax_use_orbax_checkpointing", False)
    yield
    flax.config.update("flax_use_orbax_checkpointing", True)


@functools.cache
def checkpoints():
    """Flax's module without TensorFlow, whose import takes longer than all tests here."""
    find = importlib.util.find_spec
    with mock.patch("importlib.util.find_spec", lambda name: None if name == "tensorflow" else find(name)):
        from flax.training import checkpoints
    return checkpoints


def save(root, step, prefix="checkpoint_"):
    checkpoints().save_checkpoint(root, {"w": np.full(3, step, np.float32)}, step, prefix, keep=99)


def newest(root):
    """What opening a root gives: the number in the array, the step, and the one of `latest_step`."""
    with ot.open_checkpoint(root) as checkpoint:
        assert checkpoint.format == "flax_msgpack" and checkpoint.given_path == str(root)
        with ot.open_checkpoint(root, format="flax_msgpack") as named:
            assert (named.path, named.step) == (checkpoint.path, checkpoint.step)
        return float(checkpoint.leaves["w"].get()[0]), checkpoint.step, ot.latest_step(root)


@pytest.mark.parametrize("prefix", ["checkpoint_", "model_", "ckpt-", "run.", "gan3_", ""])
def test_the_newest_by_number(tmp_path, prefix):
    for step in (0, 2, 9, 10):  # one by one: of "ckpt-10" and "ckpt-9" Flax itself takes the latter for the newer
        save(tmp_path / "saved", step, prefix)
        (tmp_path / "saved" / f"{prefix}{step}").rename(tmp_path / f"{prefix}{step}")
    assert newest(tmp_path) == (10, 10, 10)
    assert ot.latest_step(tmp_path, validated=True) == 10
    restored = ot.restore(tmp_path, {"w": np.zeros(3, np.float32)})
    np.testing.assert_array_equal(restored["w"], np.full(3, 10))


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((0.5, 0.25), (0.5, None, None)),
        ((1, 2.5), (2.5, None, None)),
        ((2.5, 3.0), (3, 3, 3)),
        ((1e-05, 0.001), (0.001, None, None)),
        ((-3, -1), (-1, None, None)),
        ((-3, 0), (0, 0, 0)),
        ((1e20, 7), (1e20, 10**20, 10**20)),
    ],
)
def test_numbers_that_are_no_steps(tmp_path, steps, expected):
    for step in sorted(steps):
        save(tmp_path, step)
    assert newest(tmp_path) == (np.float32(expected[0]), *expected[1:])


def test_files_being_written_are_no_steps(tmp_path):
    save(tmp_path, 3)
    for name in ("checkpoint_tmp", "checkpoint_9.tmp-1700000000", "checkpoint_9_gda", "notes", "log_12"):
        (tmp_path / name).write_bytes(b"\0\1")
    assert newest(tmp_path) == (3, 3, 3)


def test_steps_of_orbax_beside_it_are_another_format(tmp_path):
    """Flax's function writes Orbax's directories by default, of the same names."""
    save(tmp_path, 9)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint_4", {"w": np.full(3, 4)})
    with pytest.raises(UnsupportedCheckpointError, match=r"orbax by 'checkpoint_4', and flax_msgpack .*\n.*format="):
        ot.open_checkpoint(tmp_path)
    for format, step in (("orbax", 4), ("flax_msgpack", 9)):
        with ot.open_checkpoint(tmp_path, format=format) as checkpoint:
            assert (checkpoint.format, checkpoint.step) == (format, step)
    assert ot.latest_step(tmp_path) == 4


def test_an_unfinished_directory_hides_no_file(tmp_path):
    save(tmp_path, 3)
    (tmp_path / "checkpoint_7").mkdir()
    assert newest(tmp_path) == (3, 3, 3)


def test_a_damaged_newest_file_is_not_passed_over(tmp_path):
    save(tmp_path, 3)
    for damaged in (b"", b"\0" * 40):
        (tmp_path / "checkpoint_7").write_bytes(damaged)
        with pytest.raises(CheckpointError) as caught:
            ot.open_checkpoint(tmp_path)
        assert caught.value.path == str(tmp_path / "checkpoint_7")
        assert ot.latest_step(tmp_path) == 7
        with pytest.warns(UserWarning, match="step 7 is skipped"):
            assert ot.latest_step(tmp_path, validated=True) == 3


def test_files_of_t5x_in_a_root(tmp_path):
    tree = {"version": 3, "optimizer": {"target": {"w": np.ones(2)}, "state": {}}}
    for step in (3, 4):
        (tmp_path / f"checkpoint_{step}").write_bytes(flax.serialization.msgpack_serialize(tree))
    with ot.open_checkpoint(tmp_path) as checkpoint:
        assert (checkpoint.format, checkpoint.step) == ("t5x", 4)
        assert list(checkpoint.leaves) == ["target/w"]


def test_several_readings_are_refused(tmp_path):
    save(tmp_path, 3, "generator_")
    save(tmp_path, 4, "critic_")
    with pytest.raises(UnsupportedCheckpointError, match="several prefixes: open one of 'critic_4', 'generator_3'"):
        ot.open_checkpoint(tmp_path)
    save(tmp_path, 3)
    assert newest(tmp_path) == (3, 3, 3)  # Flax's own prefix is the root's
    (tmp_path / "checkpoint_03").write_bytes(b"\x81\xa1w\x01")
    with pytest.raises(UnsupportedCheckpointError, match="'checkpoint_03', 'checkpoint_3' are all step"):
        ot.open_checkpoint(tmp_path)


def test_a_link_that_leads_out_is_not_followed(tmp_path):
    save(tmp_path / "root", 3)
    save(tmp_path / "other", 9)
    (tmp_path / "root" / "checkpoint_9").symlink_to(tmp_path / "other" / "checkpoint_9")
    for format in (None, "flax_msgpack"):
        with pytest.raises(UnsafeCheckpointError):
            ot.open_checkpoint(tmp_path / "root", format=format)
    with pytest.raises(UnsafeCheckpointError):
        ot.latest_step(tmp_path / "root")


def test_directories_without_steps(tmp_path):
    (tmp_path / "data_1").write_bytes(b"\0" * 9)
    assert ot.latest_step(tmp_path) is None
    with pytest.raises(CheckpointError):
        ot.open_checkpoint(tmp_path, format="flax_msgpack")
