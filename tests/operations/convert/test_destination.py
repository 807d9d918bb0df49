"""Destinations as callers give them."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointIOError
from tests.support.conversions import names_in, new_source, old_destination
from tests.support.memory_checkpoint import checkpoint
from tests.support.saving import stock


@pytest.fixture
def new(tmp_path) -> Path:
    return new_source(tmp_path / "source")


@pytest.fixture
def out(tmp_path) -> Path:
    """A destination that holds a checkpoint."""
    return old_destination(tmp_path / "out")


def test_a_destination_inside_the_source_is_refused(out, tmp_path):
    before = names_in(out)
    (tmp_path / "link").symlink_to(out)
    for inside in (out / "sub", out / "d" / "deep", tmp_path / "link" / "sub"):
        for source in (out, {"x": out}, ot.open_checkpoint(out)):
            with pytest.raises(CheckpointIOError, match="is inside the source"):
                ot.convert(source, inside)
    assert names_in(out) == before


def test_a_tilde_is_the_home_directory(new, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for destination in ("~/runs/c", Path("~/runs/d")):
        report = ot.convert(new, destination)
        assert report.destination == os.path.expanduser(destination)
        assert stock(Path(report.destination)).keys() == {"b"}
    assert names_in(tmp_path) == ["home", "source"]
    with pytest.raises(CheckpointIOError, match="is inside the source"):
        ot.convert(tmp_path / "home/runs/c", "~/runs/c/inside")


@pytest.mark.parametrize("overwrite", [True, False])
def test_an_empty_destination_is_not_the_working_directory(overwrite, new, out, monkeypatch):
    monkeypatch.chdir(out)
    with pytest.raises(CheckpointIOError, match=r"the destination is empty; '\.' is the working directory") as caught:
        ot.convert(new, "", overwrite=overwrite)
    assert caught.value.errno == errno.EINVAL
    assert stock(out).keys() == {"a"} and names_in(out.parent) == ["c"]


def test_a_destination_that_is_no_text_is_refused(new, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for destination in (b"c", None, 3):
        with pytest.raises(TypeError):
            ot.convert(new, destination)
    assert names_in(tmp_path) == ["source"]


def with_files(directory: Path, files: dict[str, str]) -> Path:
    directory.mkdir()
    for name, text in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)
    return directory


NODES = json.dumps({"tree_metadata": {}})
NO_CHECKPOINTS = {
    "an empty list of names": {"_METADATA": "", "thesis.txt": "years of work"},
    "an empty list of names alone": {"_METADATA": ""},
    "another JSON": {"_METADATA": "{}"},
    "a file of a user in an item": {"_METADATA": NODES, "notes.txt": "x"},
    "a directory of a user in an item": {"_METADATA": NODES, "photos/cat.jpg": "x"},
    "empty metadata of a step": {"_CHECKPOINT_METADATA": ""},
    "a step without items": {"_CHECKPOINT_METADATA": "{}"},
    "a file of a user in a step": {"_CHECKPOINT_METADATA": "{}", "state/_METADATA": NODES, "notes.txt": "x"},
    "a directory of a user in a step": {"_CHECKPOINT_METADATA": "{}", "state/_METADATA": NODES, "photos/cat.jpg": "x"},
}


@pytest.mark.parametrize("case", NO_CHECKPOINTS)
def test_what_holds_more_than_a_checkpoint_is_not_replaced(case, new, tmp_path):
    directory = with_files(tmp_path / "c", NO_CHECKPOINTS[case])
    with pytest.raises(CheckpointIOError, match="so it is not replaced"):
        ot.convert(new, directory, overwrite=True)
    for name, text in NO_CHECKPOINTS[case].items():
        assert (directory / name).read_text() == text


@pytest.mark.parametrize("use_ocdbt", [True, False])
@pytest.mark.parametrize("use_zarr3", [True, False])
def test_items_and_steps_of_orbax_are_replaced(use_ocdbt, use_zarr3, new, tmp_path):
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)
    tree = {"a": {"b": np.zeros(3)}, "s": "text", "n": None}
    with ocp.CheckpointManager(tmp_path / "root", item_handlers={"state": handler}) as manager:
        manager.save(1, args=ocp.args.Composite(state=ocp.args.PyTreeSave(tree)), metrics={"loss": 1.0})
    for path in (tmp_path / "root" / "1" / "state", tmp_path / "root" / "1"):
        ot.convert(new, path, overwrite=True)
        assert stock(path).keys() == {"b"}


def test_a_config_beside_safetensors_files_is_replaced_with_them(new, tmp_path):
    for _ in range(2):
        ot.convert(new, tmp_path / "c", format="safetensors", overwrite=True)
        assert names_in(tmp_path / "c") == ["model.safetensors"]
        (tmp_path / "c" / "config.json").write_text("{}")


def test_only_orbax_checkpoints_are_replaced(tmp_path):
    source = checkpoint({"a": np.zeros(3)})
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("x")
    for name in ("dir", "file"):
        with pytest.raises(CheckpointIOError, match="remove it yourself"):
            ot.convert(source, tmp_path / name, overwrite=True)
    assert (tmp_path / "dir" / "thesis.txt").read_text() == "years of work"
    ot.convert(source, tmp_path / "root" / "step")
    (tmp_path / "root" / "_CHECKPOINT_METADATA").write_text("{}")
    with pytest.raises(CheckpointIOError, match="holds the source"):
        ot.convert(tmp_path / "root" / "step", tmp_path / "root", overwrite=True)
    assert stock(tmp_path / "root" / "step").keys() == {"a"}
