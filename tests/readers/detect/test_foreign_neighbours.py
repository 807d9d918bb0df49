"""A directory belongs to the format that owns it, whatever files of other formats lie beside its own."""

import json
import shutil
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import orbax_t5x as ot
from tests.support.bundle_writer import bundle_of
from tests.support.gguf_files import write_gguf
from tests.support.t5x_steps import GOOD, array, save
from tests.support.torch_files import save_torch

OTHER = {"other": np.zeros(3, np.float32)}
_MSGPACK = b"\x81\xa5other\x93\x01\x02\x03"


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


# A directory of each format: its writer, the format that owns it and its newest step.
OWNERS = {
    "a T5X step": (_t5x_step, "t5x", None),
    "a T5X root": (_t5x_root, "t5x", 3),
    "an Orbax item": (_orbax_item, "orbax", None),
    "an Orbax step without metadata": (_orbax_step, "orbax", None),
    "an Orbax root": (_orbax_root, "orbax", 3),
    "a TensorFlow directory": (_bundle, "tf_bundle", None),
    "a model of safetensors": (_hub_safetensors, "safetensors", None),
    "safetensors of another name": (_named_safetensors, "safetensors", None),
    "a model in msgpack": (_hub_flax, "flax_msgpack", None),
    "a model of PyTorch": (_hub_torch, "torch", None),
    "a model in several msgpack files": (_hub_flax_index, "flax_msgpack", None),
    "a Flax root": (_flax_root, "flax_msgpack", 20),
    "a GGUF file": (_gguf, "gguf", None),
}


def _beside_bundle(prefix: str):
    return lambda directory: bundle_of(OTHER).write(directory, prefix)


# Files of a format that mark no directory as the format's own.
NEIGHBOURS = {
    "the iterator of a dataset": _beside_bundle("train_ds-000-of-001"),
    "a bundle": _beside_bundle("model.ckpt-9"),
    "safetensors": lambda directory: safetensors.numpy.save_file(OTHER, directory / "adapter.safetensors"),
    "the index of safetensors": lambda directory: (directory / "a.safetensors.index.json").write_text("{}"),
    "msgpack": lambda directory: (directory / "checkpoint_9").write_bytes(_MSGPACK),
    "npz": lambda directory: np.savez(directory / "other.npz", other=OTHER["other"]),
    "PyTorch": lambda directory: (directory / "pytorch_model.bin").write_bytes(b"PK\x03\x04"),
    "GGUF": lambda directory: (directory / "model.gguf").write_bytes(b"GGUF"),
    "the directory of a bundle": lambda directory: _bundle(_made(directory / "eval_9")),
}
# Files by which a directory becomes a format's own, except where a stronger owner is.
MARKED_NEIGHBOURS = {
    "a model of safetensors": lambda directory: safetensors.numpy.save_file(OTHER, directory / "model.safetensors"),
    "a model in msgpack": lambda directory: (directory / "flax_model.msgpack").write_bytes(_MSGPACK),
}
_WEAK = (
    *("a model of safetensors", "safetensors of another name", "a model in msgpack"),
    *("a model in several msgpack files", "a Flax root", "a GGUF file", "a model of PyTorch"),
)


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


@pytest.fixture(scope="module")
def owned(tmp_path_factory):
    """Directories of all kinds, copied before something is laid beside them."""
    directory = tmp_path_factory.mktemp("owners")
    for number, (write, _, _) in enumerate(OWNERS.values()):
        write(directory / f"owner{number}")
    return {name: directory / f"owner{number}" for number, name in enumerate(OWNERS)}


CASES = [(owner, neighbour) for owner in OWNERS for neighbour in NEIGHBOURS] + [
    (owner, neighbour) for owner in OWNERS if owner not in _WEAK for neighbour in MARKED_NEIGHBOURS
]
_NO_CHECKPOINTS = ("the iterator of a dataset", "npz", "the directory of a bundle")
# All files of one format under their usual names, with another format's: two readings, and no owner.
AMBIGUOUS = {
    ("safetensors of another name", "safetensors"),
    ("safetensors of another name", "the index of safetensors"),
    ("a model of PyTorch", "safetensors"),
    ("a model of PyTorch", "the index of safetensors"),
    ("a model of PyTorch", "PyTorch"),
    ("a Flax root", "PyTorch"),
    ("a Flax root", "safetensors"),
    ("a Flax root", "the index of safetensors"),
    ("a Flax root", "a bundle"),
    *(("a GGUF file", neighbour) for neighbour in NEIGHBOURS if neighbour not in _NO_CHECKPOINTS),
}


@pytest.mark.parametrize(("owner", "neighbour"), [case for case in CASES if case not in AMBIGUOUS])
def test_files_of_other_formats_never_decide(owner, neighbour, owned, tmp_path):
    _, format, step = OWNERS[owner]
    path = tmp_path / "here"
    shutil.copytree(owned[owner], path)
    (NEIGHBOURS | MARKED_NEIGHBOURS)[neighbour](path)
    with ot.open_checkpoint(path) as checkpoint:
        assert checkpoint.format == format
        assert "good" in checkpoint.leaves
        assert not any("other" in name for name in checkpoint.leaves)
        assert step is None or checkpoint.step == step
    assert ot.latest_step(path) == step
    shape, dtype = ((), np.int64) if OWNERS[owner][1] == "flax_msgpack" else (GOOD.shape, GOOD.dtype)
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
