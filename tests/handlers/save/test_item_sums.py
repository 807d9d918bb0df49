"""The file of checksums: what each process sends, in one file of the one that finalizes."""

import json

import jax
import orbax.checkpoint as ocp
import pytest
from etils import epath

from orbax_t5x.handlers.save import item_sums
from orbax_t5x.handlers.type_handlers.checksums import SaveSums

ROWS = [((0, 2), (0, 3)), ((2, 4), (0, 3))]


def sums_of(process, *, whole=True):
    """A shares its rows among two processes; process 0 has all of `b`, and half of `c`."""
    made = SaveSums(later=False)
    made.add("a", (4, 3), "float32", ROWS[process], 10 + process)
    if process == 0:
        made.add("b", (), "float32", (), 7)
        made.add("c", (4, 3), "float32", ROWS[0], 8)
    elif whole:
        made.add("c", (4, 3), "float32", ROWS[1], 9)
    return made


class Job:
    """A job of two processes; `as_process` sets the number of this process."""

    def __init__(self, monkeypatch):
        self.held = {}
        self.as_process = lambda index: monkeypatch.setattr(ocp.multihost, "process_index", lambda: index)
        monkeypatch.setattr(item_sums, "send", self.send)
        monkeypatch.setattr(item_sums, "received", self.received)
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)

    def send(self, name, process, data):
        self.held[name, process] = data

    def received(self, name, processes):
        return [self.held.pop((name, process)) for process in processes if (name, process) in self.held]


@pytest.fixture
def job(monkeypatch):
    return Job(monkeypatch)


def published(job, directory, *, whole=True):
    for process in (0, 1):
        job.as_process(process)
        item_sums.publish_sums(directory, sums_of(process, whole=whole))


@pytest.mark.parametrize(
    ("whole", "primary", "active", "leaves"),
    [
        (True, 0, None, {"a": [10, 11], "b": [7], "c": [8, 9]}),
        (False, 0, {0, 1}, {"a": [10, 11], "b": [7]}),
        (True, 0, {0}, {"b": [7]}),
        (True, 1, None, {"a": [10, 11], "b": [7], "c": [8, 9]}),
    ],
)
def test_one_process_writes_one_file_of_what_all_have_sent(tmp_path, job, whole, primary, active, leaves):
    directory = epath.Path(tmp_path)
    published(job, directory, whole=whole)
    assert list(tmp_path.iterdir()) == []
    job.as_process(primary)
    item_sums.write_published_sums(directory, primary, active)
    (file,) = tmp_path.iterdir()
    assert {key: one["crc32c"] for key, one in json.loads(file.read_text())["leaves"].items()} == leaves


def test_without_a_primary_process_each_writes_its_own(tmp_path, job):
    directory = epath.Path(tmp_path)
    published(job, directory)
    job.as_process(0)
    item_sums.write_published_sums(directory, None, None)
    (file,) = tmp_path.iterdir()
    assert list(json.loads(file.read_text())["leaves"]) == ["b"]
    assert [process for _, process in job.held] == [1]
