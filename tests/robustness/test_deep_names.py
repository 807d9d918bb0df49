"""Names of leaves are trees: deeper than 64 levels no format is opened, and nothing here recurses into them."""

import json
import struct
from pathlib import Path

import flax.serialization
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.cli.inspect_command import as_text
from orbax_t5x.cli.main import main
from orbax_t5x.errors import LimitExceededError, UnsupportedCheckpointError
from orbax_t5x.trees.flat import flatten, unflatten
from tests.support.bundle_writer import bundle_of
from tests.support.torch_files import save_torch

VALUE = np.arange(3, dtype=np.float32)


def nested(name: str):
    tree = VALUE
    for part in reversed(name.split("/")):
        tree = {part: tree}
    return tree


def tf_bundle(directory: Path, name: str) -> Path:
    return bundle_of({name: VALUE}).write(directory)


def safetensors(directory: Path, name: str) -> Path:
    header = json.dumps({name: {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}).encode()
    path = directory / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + VALUE.tobytes())
    return path


def flax_msgpack(directory: Path, name: str) -> Path:
    path = directory / "flax_model.msgpack"
    path.write_bytes(flax.serialization.msgpack_serialize({name: VALUE}))
    return path


def torch(directory: Path, name: str) -> Path:
    return save_torch(directory / "pytorch_model.bin", {name: VALUE})


def npz(directory: Path, name: str) -> Path:
    np.savez(directory / "model.npz", **{name: VALUE})
    return directory / "model.npz"


def t5x(directory: Path, name: str) -> Path:
    tree = {"version": 3, "optimizer": {name: VALUE}}
    (directory / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(tree))
    return directory


def orbax(directory: Path, name: str) -> Path:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(directory / "item", args=ocp.args.PyTreeSave(nested(name)))
    return directory / "item"


def aggregate(directory: Path, name: str) -> Path:
    """An item of an early Orbax, all of it in one file."""
    (directory / "item").mkdir()
    tree = {name: {"dtype": "x"}, "a": "PLACEHOLDER://a"}
    (directory / "item" / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(tree))
    return directory / "item"


@pytest.mark.parametrize("write", [tf_bundle, safetensors, flax_msgpack, torch, npz, t5x, orbax, aggregate])
def test_names_of_more_than_64_levels_are_a_limit_in_every_format(write, tmp_path, capsys):
    (tmp_path / "good").mkdir()
    # An aggregate's leaf is one level below the name.
    levels = 63 if write is aggregate else 64
    with ot.open_checkpoint(write(tmp_path / "good", "/".join("a" * levels))) as checkpoint:
        assert max(name.count("/") for name in checkpoint.leaves) == 63
    (tmp_path / "deep").mkdir()
    path = write(tmp_path / "deep", "/".join("a" * 65))
    with pytest.raises(LimitExceededError, match=r"more than Limits\.nesting = 64") as caught:
        ot.open_checkpoint(path)
    assert (caught.value.path or "").startswith(str(tmp_path / "deep"))
    assert main(["inspect", str(path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    with ot.open_checkpoint(path, limits=ot.Limits(nesting=66)) as checkpoint:
        assert max(name.count("/") for name in checkpoint.leaves) >= 64


DEEP = {f"{'a/' * depth}b": VALUE for depth in range(1200)}


@pytest.mark.slow
def test_trees_of_any_depth_are_flattened_and_shown(tmp_path):
    tree = unflatten(DEEP)
    assert list(flatten(tree)) == list(DEEP)
    path = bundle_of(DEEP).write(tmp_path)
    with ot.open_checkpoint(path, limits=ot.Limits(nesting=2000)) as checkpoint:
        for folded in (True, False):
            assert len(as_text(checkpoint, 100, folded=folded)) > len(DEEP)
        assert flatten(checkpoint.tree()).keys() == DEEP.keys()
        assert flatten(ot.restore(checkpoint, None)).keys() == DEEP.keys()


def test_a_conversion_to_names_too_deep_is_refused_before_it_writes(tmp_path):
    path = safetensors(tmp_path, "a")
    with pytest.raises(UnsupportedCheckpointError, match="a name of 65 levels"):
        ot.convert(path, tmp_path / "out", [ot.transforms.Rename((("a", "/".join("x" * 65)),))])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model.safetensors"]
    ot.convert(path, tmp_path / "out", [ot.transforms.Rename((("a", "/".join("x" * 64)),))])
    with ot.open_checkpoint(tmp_path / "out") as checkpoint:
        assert np.array_equal(checkpoint.leaves["/".join("x" * 64)].get(), VALUE)
