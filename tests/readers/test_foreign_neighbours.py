"""Two checkpoints in one directory: the stronger one is opened, and of two equal ones the error names both."""

import json
import shutil
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.errors import UnsupportedCheckpointError
from tests.support.bundle_writer import bundle_of
from tests.support.gguf_files import write_gguf
from tests.support.t5x_steps import GOOD, array, save
from tests.support.torch_files import save_torch

OTHER = {"other": np.zeros(3, np.float32)}
_MSGPACK = b"\x81\xa5other\x07"


def _orbax_item(path: Path) -> None:
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, {"good": GOOD})


def _t5x_step(step: Path) -> None:
    step.mkdir(parents=True)
    array(step / "good")
    save(step, 7)


def _t5x_root(root: Path) -> None:
    _t5x_step(root / "checkpoint_2")
    shutil.copytree(root / "checkpoint_2", root / "checkpoint_3")


def _orbax_step(step: Path) -> None:
    _orbax_item(step / "state")


def _orbax_root(root: Path) -> None:
    with ocp.CheckpointManager(root) as manager:
        manager.save(3, args=ocp.args.PyTreeSave({"good": GOOD}))


def _marked_step(step: Path) -> None:
    _orbax_root(step.parent / "root")
    (step.parent / "root" / "3").rename(step)


def _bundle(directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    bundle_of({"good": GOOD}).write(directory, "model.ckpt-3")
    (directory / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-3"\n')


def _hub_safetensors(directory: Path) -> None:
    directory.mkdir()
    safetensors.numpy.save_file({"good": GOOD}, directory / "model.safetensors")


def _named_safetensors(directory: Path) -> None:
    directory.mkdir()
    safetensors.numpy.save_file({"good": GOOD}, directory / "weights.safetensors")


def _hub_flax(directory: Path) -> None:
    directory.mkdir()
    (directory / "flax_model.msgpack").write_bytes(b"\x81\xa4good\x07")


def _hub_flax_index(directory: Path) -> None:
    directory.mkdir()
    (directory / "flax_model-00001-of-00001.msgpack").write_bytes(b"\x81\xa4good\x07")
    index = {"weight_map": {"good": "flax_model-00001-of-00001.msgpack"}}
    (directory / "flax_model.msgpack.index.json").write_text(json.dumps(index))


def _flax_root(directory: Path) -> None:
    directory.mkdir()
    for step in (20, 3):
        (directory / f"checkpoint_{step}").write_bytes(b"\x81\xa4good\x07")


def _gguf(directory: Path) -> None:
    directory.mkdir()
    write_gguf(directory / "weights.gguf", {"good": GOOD})


def _hub_torch(directory: Path) -> None:
    directory.mkdir()
    save_torch(directory / "pytorch_model.bin", {"good": GOOD})


# How strongly files own a directory: by a mark, by a file that may lie anywhere, by files of steps, by subfolders.
MARK, LOOSE, STEPS, FOLDERS, NOTHING = range(5)
# A directory of each format: its writer, the format that owns it, how strongly, and its newest step.
OWNERS = {
    "a T5X step": (_t5x_step, "t5x", MARK, None),
    "a T5X root": (_t5x_root, "t5x", STEPS, 3),
    "an Orbax item": (_orbax_item, "orbax", MARK, None),
    "an Orbax step": (_marked_step, "orbax", MARK, None),
    "an Orbax step without metadata": (_orbax_step, "orbax", FOLDERS, None),
    "an Orbax root": (_orbax_root, "orbax", STEPS, 3),
    "a TensorFlow directory": (_bundle, "tf_bundle", MARK, None),
    "a model of safetensors": (_hub_safetensors, "safetensors", LOOSE, None),
    "safetensors of another name": (_named_safetensors, "safetensors", LOOSE, None),
    "a model in msgpack": (_hub_flax, "flax_msgpack", LOOSE, None),
    "a model of PyTorch": (_hub_torch, "torch", LOOSE, None),
    "a model in several msgpack files": (_hub_flax_index, "flax_msgpack", LOOSE, None),
    "a Flax root": (_flax_root, "flax_msgpack", STEPS, 20),
    "a GGUF file": (_gguf, "gguf", LOOSE, None),
}


def _beside_bundle(prefix: str):
    return lambda directory: bundle_of(OTHER).write(directory, prefix)


def _safetensors_index(directory: Path) -> None:
    safetensors.numpy.save_file(OTHER, directory / "a-00001-of-00001.safetensors")
    index = {"weight_map": {"other": "a-00001-of-00001.safetensors"}}
    (directory / "a.safetensors.index.json").write_text(json.dumps(index))


# What lies beside: its writer, its format, and how strongly it owns the directory.
NEIGHBOURS = {
    "the iterator of a dataset": (_beside_bundle("train_ds-000-of-001"), "", NOTHING),
    "a bundle": (_beside_bundle("model.ckpt-9"), "tf_bundle", MARK),
    "the state of a T5X step": (
        lambda directory: (directory / "checkpoint").write_bytes(b"\x82\xa7version\x03\xa9optimizer" + _MSGPACK),
        "t5x",
        MARK,
    ),
    "safetensors": (
        lambda directory: safetensors.numpy.save_file(OTHER, directory / "other.safetensors"),
        "safetensors",
        LOOSE,
    ),
    "the index of safetensors": (_safetensors_index, "safetensors", LOOSE),
    "msgpack": (lambda directory: (directory / "checkpoint_9").write_bytes(_MSGPACK), "flax_msgpack", STEPS),
    "npz": (lambda directory: np.savez(directory / "other.npz", other=OTHER["other"]), "", NOTHING),
    "PyTorch": (lambda directory: save_torch(directory / "pytorch_model.bin", OTHER), "torch", LOOSE),
    "GGUF": (lambda directory: write_gguf(directory / "model.gguf", OTHER), "gguf", LOOSE),
    "the directory of a bundle": (lambda directory: _bundle(_made(directory / "eval_9")), "", NOTHING),
    "a model of safetensors": (
        lambda directory: safetensors.numpy.save_file(OTHER, directory / "model.safetensors"),
        "safetensors",
        LOOSE,
    ),
    "a model in msgpack": (
        lambda directory: (directory / "flax_model.msgpack").write_bytes(_MSGPACK),
        "flax_msgpack",
        LOOSE,
    ),
}
_FIRST_ENCODING = "a model of safetensors"


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


@pytest.fixture(scope="module")
def owned(tmp_path_factory):
    """Directories of all kinds, copied before something is laid beside them."""
    directory = tmp_path_factory.mktemp("owners")
    for number, (write, *_) in enumerate(OWNERS.values()):
        write(directory / f"owner{number}")
    return {name: directory / f"owner{number}" for number, name in enumerate(OWNERS)}


CASES = [(owner, other) for owner in OWNERS for other in NEIGHBOURS if OWNERS[owner][1] != NEIGHBOURS[other][1]]


@pytest.mark.parametrize(("owner", "neighbour"), CASES)
def test_the_stronger_owner_is_opened(owner, neighbour, owned, tmp_path):
    _, format, strength, step = OWNERS[owner]
    write, other_format, other_strength = NEIGHBOURS[neighbour]
    path = tmp_path / "here"
    shutil.copytree(owned[owner], path)
    write(path)
    if strength == other_strength and _FIRST_ENCODING not in (owner, neighbour):
        with pytest.raises(UnsupportedCheckpointError, match=r"two formats own this path.*\nFix: .*format=") as caught:
            ot.open_checkpoint(path)
        assert format in str(caught.value) and other_format in str(caught.value)
        for name, leaf in ((format, "good"), (other_format, "other")):
            with ot.open_checkpoint(path, format=name) as checkpoint:
                assert checkpoint.format == name and leaf in checkpoint.leaves
            assert leaf in {one.name for one in ot.verify(path, format=name).leaves}
        return
    is_owner = strength < other_strength or (strength == other_strength and owner == _FIRST_ENCODING)
    with ot.open_checkpoint(path) as checkpoint:
        assert checkpoint.format == (format if is_owner else other_format)
        assert ("good" in checkpoint.leaves, "other" in checkpoint.leaves) == (is_owner, not is_owner)
    if not is_owner:
        return
    assert step is None or checkpoint.step == step
    assert step is None or ot.latest_step(path) == step
    shape, dtype = ((), np.int64) if format == "flax_msgpack" else (GOOD.shape, GOOD.dtype)
    restored = ot.restore(path, {"good": np.zeros(shape, dtype)}, strict=False)
    np.testing.assert_array_equal(restored["good"], 7 if shape == () else GOOD)


@pytest.mark.parametrize("damage", ["empty", "missing"])
def test_a_damaged_step_is_not_opened_as_its_iterator(damage, owned, tmp_path):
    step = tmp_path / "checkpoint_3"
    shutil.copytree(owned["a T5X step"], step)
    bundle_of(OTHER).write(step, "train_ds-000-of-001")
    if damage == "empty":
        (step / "checkpoint").write_bytes(b"")
    else:
        (step / "checkpoint").unlink()
    with pytest.raises(ot.errors.CheckpointError):
        ot.open_checkpoint(step)
    with ot.open_checkpoint(step / "train_ds-000-of-001") as checkpoint:
        assert checkpoint.format == "tf_bundle"
