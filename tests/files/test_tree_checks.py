"""Directory trees that a library will open by itself: only plain files, the same as when they were first seen."""

import os

import pytest

from orbax_t5x.errors import CheckpointGoneError, CorruptCheckpointError, UnsafeCheckpointError
from orbax_t5x.files.interface import Snapshot
from orbax_t5x.files.local import LocalFiles
from orbax_t5x.files.paths import Root
from orbax_t5x.files.tree_checks import check_tree, list_directory


class Execution:
    """One execution of a plan."""


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "root" / "array" / "c").mkdir(parents=True)
    (tmp_path / "root" / "array" / ".zarray").write_text("{}")
    (tmp_path / "root" / "array" / "c" / "0").write_bytes(b"12345678")
    (tmp_path / "outside").write_text("secret")
    return tmp_path / "root"


def test_plain_files_and_links_that_stay_inside_are_accepted(tree):
    (tree / "other").symlink_to("array")
    (tree / "array" / "c" / "1").symlink_to("0")
    (tree / "array" / "again").symlink_to("c")
    check_tree(Root(tree), "")
    check_tree(Root(tree), "other")


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("../../outside", UnsafeCheckpointError),
        ("/etc", UnsafeCheckpointError),
        ("nothing", CorruptCheckpointError),
        ("circle", CorruptCheckpointError),
    ],
)
def test_other_links_are_refused_with_the_leaf(tree, target, kind):
    (tree / "array" / "circle").symlink_to(target)
    with pytest.raises(kind) as caught:
        check_tree(Root(tree), "array", leaf="w")
    assert caught.value.leaf == "w"


def test_a_fifo_is_refused_without_opening_it(tree):
    os.mkfifo(tree / "array" / "c" / "2")
    with pytest.raises(CorruptCheckpointError, match="not a regular file"):
        check_tree(Root(tree), "")


def test_a_directory_that_is_not_there_has_vanished(tree):
    with pytest.raises(CheckpointGoneError, match="vanished"):
        list_directory(str(tree / "gone"))


def change(tree):
    os.utime(tree / "array" / "c" / "0", ns=(1, 1))


def replace(tree):
    (tree / "new").write_bytes(b"87654321")
    (tree / "new").replace(tree / "array" / "c" / "0")


@pytest.mark.parametrize(
    "act",
    [
        change,
        replace,
        lambda tree: (tree / "array" / "c" / "1").touch(),
        lambda tree: (tree / "array" / "c" / "0").unlink(),
        lambda tree: (tree / "array" / "c" / "0").write_bytes(b"1"),
    ],
    ids=["touched", "replaced", "added", "removed", "cut"],
)
def test_what_changed_since_it_was_seen_is_gone(tree, act):
    files = Snapshot(LocalFiles(tree), ["array"], "")
    files.check_unchanged(leaf="w")
    act(tree)
    with pytest.raises(CheckpointGoneError, match="changed after the checkpoint was opened"):
        files.check_unchanged(leaf="w")


def test_one_execution_stats_once(tree):
    files, execution = Snapshot(LocalFiles(tree), ["array"], ""), Execution()
    assert not files.was_checked(execution)
    files.check_once(execution)
    (tree / "array" / "c" / "0").unlink()
    files.check_once(execution)  # it was statted in this execution
    assert files.was_checked(execution) and not files.was_checked(Execution())
