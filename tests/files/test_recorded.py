"""Local files of an opening that processes share: each answer is given again when the disk has changed or is gone."""

import shutil

import pytest

from orbax_t5x.errors import CheckpointError, CheckpointGoneError
from orbax_t5x.files.interface import Snapshot
from orbax_t5x.files.local import LocalFiles
from orbax_t5x.files.places import files_at, using
from orbax_t5x.files.ranges import BoundedRange
from orbax_t5x.files.recorded import RecordedFiles
from orbax_t5x.files.transcript import Transcript, Viewpoint

HERE = Viewpoint(3, 0)
QUESTIONS = {
    "is_link": lambda files: files.is_link(),
    "is_directory": lambda files: files.is_directory(),
    "names": lambda files: files.names(),
    "subdirectories": lambda files: files.subdirectories(),
    "exists": lambda files: [files.exists(name) for name in ("", "array", "nothing")],
    "has_file": lambda files: [files.has_file(name) for name in ("data", "array", "out")],
    "has_files": lambda files: files.has_files(["data", "nothing"]),
    "look": lambda files: [files.look(name, head=3, tail=2) for name in ("", "data", "array", "out")],
    "locate": lambda files: files.locate("link"),
    "size": lambda files: files.stat("data").st_size,
    "whole": lambda files: files.read_whole("data", limit=100),
    "end": lambda files: files.read_end("data", 3),
    "range": lambda files: [files.read_range(name, BoundedRange.between(2, 4)) for name in ("data", "nothing")],
    "bytes": lambda files: files.file("data").read(1, 3),
    "entries": lambda files: files.entries(""),
    "plain": lambda files: files.require_plain("array"),
    "array": lambda files: files.array_directory("array", "0", limit=100)[:4],
    "error": lambda files: error_of(lambda: files.read_whole("nothing", limit=1)),
}


def error_of(function):
    try:
        function()
    except CheckpointError as error:
        return type(error), str(error)


@pytest.fixture
def root(tmp_path):
    made = tmp_path / "root"
    (made / "array").mkdir(parents=True)
    (made / "array" / "0").write_bytes(b"zero")
    (made / "data").write_bytes(b"0123456789")
    (made / "link").symlink_to("data")
    (made / "out").symlink_to("/etc")
    return made


def received_after(root, ask):
    """What `ask` returns on the process that records, and the transcript as another process receives it."""
    recorded = Transcript()
    with using(recorded):
        found = ask(files_at(str(root)))
        whole = recorded.encode()
    return found, Transcript.decode(whole, HERE)


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_answer_is_given_again_without_the_disk(root, question):
    expected = QUESTIONS[question](LocalFiles(root))
    found, received = received_after(root, QUESTIONS[question])
    shutil.rmtree(root)
    with using(received):
        again = QUESTIONS[question](files_at(str(root)))
    assert expected == found == again


def test_nothing_is_recorded_outside_of_an_opening(root):
    assert type(files_at(str(root))) is LocalFiles
    with using(Transcript()):
        assert type(files_at(str(root))) is RecordedFiles


def test_a_file_of_another_size_differs_between_processes(root):
    _, received = received_after(root, lambda files: files.file("data").size)
    (root / "data").write_bytes(b"01234")
    with using(received):
        file = files_at(str(root)).file("data")
    with pytest.raises(CheckpointGoneError, match="its size in bytes is 5 on process 3, and 10 on process 0"):
        file.read(0, 4)


def test_a_file_of_another_disk_is_read(root):
    _, received = received_after(root, lambda files: files.file("data").size)
    (root / "copy").write_bytes(b"9876543210")
    (root / "copy").replace(root / "data")
    with using(received):
        file = files_at(str(root)).file("data")
    assert bytes(file.read(0, 4)) == b"9876"
    file.check_unchanged()


@pytest.mark.parametrize("size", [4, 5])
def test_a_tree_is_compared_by_its_sizes_at_first(root, size):
    _, received = received_after(root, lambda files: Snapshot(files, ["array"], ""))
    with using(received):
        tree = Snapshot(files_at(str(root)), ["array"], "")
    (root / "array" / "copy").write_bytes(b"other"[:size])
    (root / "array" / "copy").replace(root / "array" / "0")
    if size == 4:
        tree.check_unchanged(test_a_tree_is_compared_by_its_sizes_at_first)
        return
    with pytest.raises(CheckpointGoneError, match="1 files of 5 bytes on process 3, and 1 files of 4 bytes on"):
        tree.check_unchanged(test_a_tree_is_compared_by_its_sizes_at_first)
