"""Roots of runs: the newest finished step is opened, of one format, and older ones cost nothing."""

import collections
import os
import shutil
import sys

import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, UnsupportedCheckpointError
from orbax_t5x.files import local, tree_checks

T5X_STATE = b"\x82\xa7version\x03\xa9optimizer\x82\xa6target\x80\xa5state\x80"


@pytest.fixture
def root(tmp_path):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, args=ocp.args.StandardSave({"w": np.arange(3)}))
    return tmp_path / "run"


def t5x_step(directory):
    directory.mkdir()
    (directory / "checkpoint").write_bytes(T5X_STATE)


@pytest.mark.parametrize("number", [1, 20])
def test_steps_of_two_formats(root, number):
    t5x_step(root / f"checkpoint_{number}")
    with pytest.raises(UnsupportedCheckpointError, match=r"two formats own this path: .*\nFix: .*format=") as caught:
        ot.open_checkpoint(root)
    assert "orbax by '3'" in str(caught.value) and f"t5x by 'checkpoint_{number}'" in str(caught.value)
    for format, step in (("orbax", 3), ("t5x", number)):
        with ot.open_checkpoint(root, format=format) as checkpoint:
            assert (checkpoint.format, checkpoint.step) == (format, step)
    assert ot.latest_step(root) == max(3, number)


@pytest.mark.parametrize("backwards", [False, True])
def test_the_newest_step_of_another_format_is_named(root, monkeypatch, backwards):
    """In whatever order the directory lists its steps."""
    for number in range(3):
        t5x_step(root / f"checkpoint_{number}")
    listed = tree_checks.list_directory
    monkeypatch.setattr(local, "list_directory", lambda path: dict(sorted(listed(path).items(), reverse=backwards)))
    with pytest.raises(UnsupportedCheckpointError, match=r"orbax by '3', and t5x by 'checkpoint_2'"):
        ot.open_checkpoint(root)


@pytest.mark.parametrize("format", [None, "orbax"])
def test_the_step_of_a_root_with_a_number_for_its_name_is_the_newest(root, tmp_path, format):
    """As of a run in an experiment: the number of the run is no step, also where a step is an item itself."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(root / "20", {"w": np.arange(3)})
    root.rename(tmp_path / "7")
    with ot.open_checkpoint(tmp_path / "7", format=format) as checkpoint:
        assert checkpoint.step == ot.latest_step(tmp_path / "7") == 20


def test_a_damaged_step_of_t5x_is_not_taken_for_another_format(tmp_path):
    t5x_step(tmp_path / "checkpoint_2")
    t5x_step(tmp_path / "checkpoint_3")
    (tmp_path / "checkpoint_3" / "checkpoint").write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        ot.open_checkpoint(tmp_path)
    assert "formats own" not in str(caught.value)
    with pytest.warns(UserWarning, match="step 3 is skipped"):
        assert ot.latest_step(tmp_path, validated=True) == 2


def test_an_unfinished_step_of_another_format_is_none(root):
    (root / "checkpoint_1" / "target.w").mkdir(parents=True)
    (root / "checkpoint_20.tmp").mkdir()
    with ot.open_checkpoint(root) as checkpoint:
        assert (checkpoint.format, checkpoint.step) == ("orbax", 3)


class Looks:
    """Counts what is opened and listed below each step, by the events of the interpreter, and stats."""

    def __init__(self, root, monkeypatch):
        self.opened, self.statted, self._root = set(), [], f"{root}/"
        self.is_on = True
        sys.addaudithook(self._hook)
        for name in ("stat", "lstat"):
            monkeypatch.setattr(os, name, self._counting(getattr(os, name)))

    def _step(self, path):
        text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
        return text.removeprefix(self._root).split("/")[0] if text.startswith(self._root) else None

    def _hook(self, event, arguments):
        if self.is_on and event in ("open", "os.listdir", "os.scandir") and (step := self._step(arguments[0])):
            self.opened.add(step)

    def _counting(self, function):
        def count(path, *arguments, **keywords):
            self.statted.append(self._step(path))
            return function(path, *arguments, **keywords)

        return count


def test_older_steps_are_neither_opened_nor_listed(root, monkeypatch):
    for number in range(100, 400):
        shutil.copytree(root / "3", root / str(number), copy_function=os.link)
    looks = Looks(root, monkeypatch)
    with ot.open_checkpoint(root) as checkpoint:
        assert checkpoint.step == 399
    looks.is_on = False
    older = {"3", *map(str, range(100, 399))}
    assert older & set(looks.statted)
    assert looks.opened == {"399"}
    # Of each, one file is looked for: that of another format.
    assert all(count == 1 for step, count in collections.Counter(looks.statted).items() if step in older)
