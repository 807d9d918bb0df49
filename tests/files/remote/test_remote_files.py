"""Files below a URL: few requests, no names above it."""

import pytest

from orbax_t5x.errors import LimitExceededError, UnsafeCheckpointError
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.places import files_at, opening
from orbax_t5x.files.ranges import BoundedRange
from orbax_t5x.files.remote.remote_files import KNOWN_NAMES
from orbax_t5x.readers.format_table import all_formats

DATA = bytes(range(250)) * 4


def test_whole_files_have_a_limit(store):
    store.files["small"] = DATA
    with opening(Limits()):
        root = files_at(store.url)
        assert root.read_whole("small", limit=1000) == DATA
    with opening(Limits()):
        store.forget()
        with pytest.raises(LimitExceededError):
            files_at(store.url).read_whole("small", limit=999)
        assert store.bytes_sent < 100
    with opening(Limits()):
        store.forget()
        root = files_at(store.url)
        with pytest.raises(LimitExceededError, match="limit of 999"):
            root.read_ahead(["small"], limit=999)
        assert [request.range for request in store.log] == ["bytes=0-999"]
        root.read_ahead(["small", "missing"], limit=1000)
        assert root.read_whole("small", limit=1000) == DATA and not root.has_file("missing")
        assert len(store.log) == 3


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "a\\b", "a\0b"])
def test_names_stay_below_the_root(store, name):
    store.forget()
    with opening(Limits()):
        root = files_at(f"{store.url}/directory")
        for use in (root.locate, root.has_file, lambda name: root.read_range(name, BoundedRange.whole(9)), root.file):
            with pytest.raises(UnsafeCheckpointError):
                use(name)
    assert not store.log


def test_each_name_that_marks_a_directory_is_looked_for():
    """Where nothing is listed, a mark that is not looked for would let another format own its directory."""
    marks = {mark.name for row in all_formats() for mark in row.directory}
    assert {name for name in marks if "*" not in name} == set(KNOWN_NAMES)
