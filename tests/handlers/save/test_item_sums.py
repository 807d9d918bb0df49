"""The file of checksums: what each process sends, in one file of the one that finalizes."""

import json

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.handlers.save import item_sums
from orbax_t5x.handlers.type_handlers.checksums import SaveSums
from orbax_t5x.multihost import coordination
from tests.support.key_values import KeyValues

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


@pytest.fixture
def job(monkeypatch):
    """A job of two processes; `as_process` sets which of them this is."""
    store = KeyValues()
    monkeypatch.setattr(coordination, "key_value_store", lambda: store)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    store.as_process = lambda index: monkeypatch.setattr(ocp.multihost, "process_index", lambda: index)
    return store


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
    assert any("/1" in key for key in job.held) and not any(key.endswith("/0/0") for key in job.held)


def test_what_is_damaged_on_the_way_is_an_error(tmp_path, job):
    directory = epath.Path(tmp_path)
    published(job, directory)
    key = next(key for key, value in job.held.items() if isinstance(value, bytes))
    job.held[key] = np.random.default_rng(0).bytes(50)
    with pytest.raises(CorruptCheckpointError, match="that a process sent are damaged"):
        item_sums.write_published_sums(directory, 0, None)
