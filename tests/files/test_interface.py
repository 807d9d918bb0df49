"""A local directory and a web server answer alike as stores."""

import pytest

from orbax_t5x.errors import CheckpointError, CheckpointNotFoundError, LimitExceededError
from orbax_t5x.files.places import files_at
from tests.support.http_store import serving

FILES = {"index": b"names", "data/0": bytes(range(100)), "empty": b""}


@pytest.fixture(params=["local", "http"])
def store(request, tmp_path):
    for name, data in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    if request.param == "local":
        yield files_at(str(tmp_path))
        return
    with serving(tmp_path) as running:
        yield files_at(running.url)


def test_whole_files_are_their_bytes_within_a_limit(store):
    for name, data in FILES.items():
        assert bytes(store.read_whole(name, limit=100)) == data
    with pytest.raises(LimitExceededError):
        store.read_whole("data/0", limit=99)


def test_files_that_are_not_there(store):
    names = ["index", "nothing", "data/0", "data/1"]
    assert store.has_files(names) == [True, False, True, False] == [store.has_file(name) for name in names]
    store.file("index")
    with pytest.raises(CheckpointNotFoundError):
        store.file("nothing")
    with pytest.raises(CheckpointError):
        store.read_whole("nothing", limit=100)


def test_ranges_of_a_file(store):
    file = store.file("data/0")
    assert bytes(file.read(10, 5)) == FILES["data/0"][10:15]
    assert file.size == 100 and file.path == store.join("data/0")
    store.close()
