"""Which format stands at a path: what is recognised, what is refused and in which words, and what never blocks."""

import errno
import os
import pathlib
import subprocess
import sys

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from etils import epath

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, CheckpointIOError, UnsupportedCheckpointError

T5X_STATE = b"\x82\xa7version\x03\xa9optimizer\x82\xa6target\x80\xa5state\x80"
BUNDLE_STATE = 'model_checkpoint_path: "model.ckpt-7"\nall_model_checkpoint_paths: "model.ckpt-7"\n'


@pytest.mark.parametrize("kind", [str, pathlib.Path, epath.Path])
def test_paths_of_all_kinds(orbax_item, kind):
    for path in (orbax_item, orbax_item.parent, orbax_item.parent.parent):
        with ot.open_checkpoint(kind(path)) as checkpoint:
            assert (checkpoint.format, checkpoint.step) == ("orbax", 3)
        assert ot.latest_step(kind(orbax_item.parent.parent)) == 3


def test_a_native_t5x_state_without_leaves(tmp_path):
    step = tmp_path / "checkpoint_500"
    step.mkdir()
    (step / "checkpoint").write_bytes(T5X_STATE)
    for path in (tmp_path, step, step / "checkpoint"):
        for format in (None, "t5x"):
            with ot.open_checkpoint(path, format=format) as checkpoint:
                assert (checkpoint.format, checkpoint.step) == ("t5x", 500)
                assert checkpoint.tree() == {"target": {}, "state": {}}
    assert ot.latest_step(tmp_path, validated=True) == 500


def test_a_flax_msgpack_file_without_arrays(tmp_path):
    (tmp_path / "checkpoint_3").write_bytes(b"\x81\xa6params\x81\xa1w\xc0")
    with ot.open_checkpoint(tmp_path / "checkpoint_3") as checkpoint:
        assert (checkpoint.format, checkpoint.step) == ("flax_msgpack", 3)
        assert checkpoint.tree() == {"params": {"w": None}}


@pytest.mark.parametrize("place", ["", "checkpoint", "model.safetensors", "x.index", "_METADATA", "3"])
def test_what_would_block_is_not_opened(tmp_path, place):
    path = tmp_path / "root"
    if place:
        path.mkdir()
        os.mkfifo(path / place)
    else:
        os.mkfifo(path)
    with pytest.raises(CheckpointError):
        ot.open_checkpoint(path)
    for device in ("/dev/zero", "/dev/tty"):
        with pytest.raises(CheckpointError):
            ot.open_checkpoint(device)


def test_a_format_by_name(tmp_path, orbax_item):
    file = tmp_path / "weights"
    safetensors.numpy.save_file({"w": np.ones(2)}, file)
    for format in (None, "safetensors"):
        with ot.open_checkpoint(file, format=format) as checkpoint:
            assert checkpoint.format == "safetensors"
    with ot.open_checkpoint(orbax_item, format="orbax") as checkpoint:
        assert checkpoint.format == "orbax"
    with pytest.raises(CheckpointError):
        ot.open_checkpoint(file, format="tf_bundle")
    with pytest.raises(CheckpointError):
        ot.open_checkpoint(orbax_item, format="safetensors")
    with pytest.raises(CheckpointError):
        ot.open_checkpoint(file, format="orbax")
    with pytest.raises(ValueError, match="'tf_bundle', 'orbax', 't5x', 'flax_msgpack', 'safetensors'"):
        ot.open_checkpoint(file, format="zip")
    with pytest.raises(UnsupportedCheckpointError, match="no items"):
        ot.open_checkpoint(file, item="state")


def test_an_item_beside_a_bundle_state_file(orbax_item):
    """An early Orbax item has a msgpack file of the name that TensorFlow gives its state file."""
    (orbax_item / "checkpoint").write_bytes(b"\x81\xa1w\xc0")
    with ot.open_checkpoint(orbax_item) as checkpoint:
        assert checkpoint.format == "orbax"


def test_steps_that_are_items_themselves(tmp_path):
    """A root whose steps were saved without items, as Flax's own functions do."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        for step in (2, 10):
            checkpointer.save(tmp_path / f"checkpoint_{step}", {"w": np.full(3, step)})
    with ot.open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.step == 10
        assert list(checkpoint.leaves) == ["w"]
        assert checkpoint.leaves["w"].get()[0] == 10


def test_a_directory_that_may_not_be_listed(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(CheckpointIOError, match="Permission denied") as caught:
        ot.open_checkpoint(tmp_path)
    assert (caught.value.errno, caught.value.path) == (errno.EACCES, str(tmp_path))


@pytest.mark.slow
def test_opening_imports_no_framework(orbax_item):
    """Readers need neither TensorFlow nor Orbax nor Flax."""
    code = (
        "import sys, orbax_t5x as ot\n"
        f"with ot.open_checkpoint({str(orbax_item)!r}) as c: c.leaves['w'].get()\n"
        "print([m for m in ('tensorflow', 'orbax', 'flax', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=800)
    assert done.stdout.strip() == "[]", done.stderr


def test_an_item_is_a_name(orbax_item, tmp_path):
    """What Orbax's older interface calls so is the target here."""
    tree = {"w": np.ones(2, np.float32)}
    with ot.open_checkpoint(orbax_item) as checkpoint:
        for call in (
            lambda: ot.open_checkpoint(orbax_item, item=tree),
            lambda: ot.restore(orbax_item, tree, item=tree),
            lambda: ot.plan_restore(checkpoint, tree, item=tree),
        ):
            with pytest.raises(TypeError, match=r"item= is the name of an item .* not a dict; .* target"):
                call()


def test_many_blank_lines_before_nothing(tmp_path):
    (tmp_path / "checkpoint").write_bytes(b"\n" * (1 << 20))
    (tmp_path / "m.index").write_bytes(b"no table")
    with pytest.raises(CheckpointError):
        ot.open_checkpoint(tmp_path, format="tf_bundle")


@pytest.mark.slow
def test_many_keys_of_which_the_last_stands_twice(tmp_path):
    keys = [f"k{number}" for number in range(200_000)]
    header = ("{" + ",".join(f'"{key}":0' for key in [*keys, keys[-1]]) + "}").encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="'k199999' occurs twice"):
        ot.open_checkpoint(path)


def test_relative_paths_and_trailing_slashes(orbax_item, monkeypatch):
    monkeypatch.chdir(orbax_item.parent)
    for path in ("state", "./state/", ".", "..", f"{orbax_item}//"):
        with ot.open_checkpoint(path) as checkpoint:
            np.testing.assert_array_equal(checkpoint.leaves["w"].get(), np.arange(3))


def test_a_path_behind_a_link(orbax_item, tmp_path):
    """What the caller names is trusted: a link to a checkpoint is that checkpoint."""
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "latest").symlink_to(orbax_item.parent)
    with ot.open_checkpoint(tmp_path / "links" / "latest") as checkpoint:
        np.testing.assert_array_equal(checkpoint.leaves["w"].get(), np.arange(3))
        assert checkpoint.step == 3
