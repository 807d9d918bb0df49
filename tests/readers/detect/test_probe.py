"""Detection follows nothing out of the path that it was given: not to read a few bytes, not to list a directory.

Every open, listing and scan of the process is seen by an audit hook; those that could follow a link must stay inside.
"""

import errno
import os
import shutil
import sys
import warnings
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import (
    CheckpointError,
    CheckpointIOError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
)
from tests.support.bundle_writer import bundle_of

TREE = {"a": np.arange(6, dtype=np.float32)}
_EVENTS = ("open", "os.listdir", "os.scandir")


class Watch:
    """Notes what is opened or listed below a directory, while there is one."""

    def __init__(self) -> None:
        self.below: str | None = None
        self.seen: list[tuple[str, str]] = []

    def __call__(self, event: str, arguments: tuple) -> None:
        if self.below is None or event not in _EVENTS or not isinstance(arguments[0], (str, os.PathLike)):
            return
        path = os.fspath(arguments[0])
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_NOFOLLOW:
            path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        if os.path.isabs(path) and (real := os.path.realpath(path)).startswith(self.below):
            self.seen.append((event, real))


_watch = Watch()


@pytest.fixture(scope="module", autouse=True)
def _hook():
    sys.addaudithook(_watch)
    yield
    _watch.below = None


@pytest.fixture
def outside(tmp_path):
    """A directory beside the root, with everything that one would like to reach, and a watch on it."""
    directory = tmp_path / "outside"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(directory / "step" / "state", args=ocp.args.PyTreeSave(TREE))
    (directory / "step" / "_CHECKPOINT_METADATA").write_text("{}")
    bundle_of(TREE).write(directory, "m")
    (directory / "checkpoint").write_text('model_checkpoint_path: "m"\n')
    (directory / "msgpack").write_bytes(b"\x82\xa7version\x03\xa9optimizer\x80")
    _watch.seen.clear()
    _watch.below = str(directory)
    yield directory
    _watch.below = None


# What stands in the root: name -> where it leads, relative to the directory outside; None makes a directory.
LINKS = {
    "the index of a bundle": {"m.index": "m.index"},
    "the text file of a bundle": {"checkpoint": "checkpoint"},
    "the msgpack file of T5X": {"checkpoint": "msgpack"},
    "the names of an item": {"_METADATA": "step/state/_METADATA"},
    "the database of an item": {"manifest.ocdbt": "step/state/manifest.ocdbt"},
    "the metadata of a step": {"_CHECKPOINT_METADATA": "step/_CHECKPOINT_METADATA"},
    "an item": {"state": "step/state"},
    "a part of a database": {"ocdbt.process_0": "step/state"},
    "a step": {"5": "step"},
    "the msgpack file of a step": {"5": None, "5/checkpoint": "msgpack"},
    "an item of a step": {"5": None, "5/state": "step/state"},
    "safetensors": {"model.safetensors": "msgpack"},
    "Hugging Face's msgpack": {"flax_model.msgpack": "msgpack"},
    "two links after another": {"m.index": "../root/n", "n": "m.index"},
}

OTHER_ERRORS = {
    "the database of an item": CorruptCheckpointError,  # it has no list of names, wherever it leads
    "an item of a step": CheckpointNotFoundError,  # a directory without any mark of a step
}


@pytest.mark.parametrize("case", LINKS)
def test_links_out_of_the_path_are_unsafe_and_not_followed(case, outside, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    for name, target in LINKS[case].items():
        if target is None:
            (root / name).mkdir()
        else:
            (root / name).symlink_to(outside / target)
    with pytest.raises(OTHER_ERRORS.get(case, UnsafeCheckpointError)) as caught:
        ot.open_checkpoint(root)
    assert (caught.value.path or "").startswith(str(root))
    if case in ("a step", "a part of a database"):  # the name of which could be a step's
        with pytest.raises(UnsafeCheckpointError):
            ot.latest_step(root)
    else:
        ot.latest_step(root)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert ot.latest_step(root, validated=True) is None
    for format in ("tf_bundle", "orbax", "t5x", "safetensors", "flax_msgpack"):
        with pytest.raises(CheckpointError):
            ot.open_checkpoint(root, format=format)
    assert _watch.seen == []


def test_the_watch_sees_what_is_opened(outside):
    """Else the tests above could not fail."""
    ot.open_checkpoint(outside / "m").close()
    ot.open_checkpoint(outside / "step").close()
    assert {event for event, _ in _watch.seen} >= {"open", "os.scandir"}


def test_links_that_stay_inside_are_followed(outside, tmp_path):
    root = tmp_path / "root"
    shutil.copytree(outside / "step", root / "7")
    (root / "9").symlink_to("7")
    (root / "7" / "model").symlink_to("state")
    assert ot.latest_step(root) == ot.latest_step(root, validated=True) == 9
    with ot.open_checkpoint(root) as checkpoint:
        assert sorted(checkpoint.leaves) == ["model/a", "state/a"]


def test_a_link_out_of_an_older_step_is_in_nobodys_way(outside, tmp_path):
    root = tmp_path / "root"
    shutil.copytree(outside / "step", root / "7")
    (root / "3").symlink_to(outside / "step")
    assert ot.latest_step(root) == 7
    with ot.open_checkpoint(root) as checkpoint:
        assert checkpoint.step == 7


@pytest.mark.parametrize("name", ["m.index", "_METADATA", "manifest.ocdbt", "checkpoint"])
def test_a_file_that_cannot_be_looked_at_is_no_missing_one(name, outside, tmp_path, monkeypatch):
    """EIO when a file is looked at: neither "not found" nor "damaged"."""
    root = tmp_path / "root"
    if name == "m.index":
        root.mkdir()
        for path in outside.glob("m.*"):
            shutil.copy(path, root)
    elif name == "checkpoint":
        root.mkdir()
        (root / name).write_bytes(b"\x81\xa6target\x80")
    else:
        shutil.copytree(outside / "step" / "state", root)
    path = root / "m" if name == "m.index" else root
    real = {"lstat": os.lstat, "stat": os.stat}

    def broken(which):
        def look(at, *arguments, **keywords):
            if isinstance(at, (str, Path)) and os.path.basename(at) == name:
                raise OSError(errno.EIO, "Input/output error")
            return real[which](at, *arguments, **keywords)

        return look

    for which in real:
        monkeypatch.setattr(os, which, broken(which))
    with pytest.raises(CheckpointIOError) as caught:
        ot.open_checkpoint(path)
    assert caught.value.errno == errno.EIO and name in str(caught.value)
