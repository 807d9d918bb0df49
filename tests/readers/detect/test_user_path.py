"""Paths and items as users give them."""

import os
from pathlib import Path

import pytest

from orbax_t5x.errors import CheckpointNotFoundError, UnsupportedCheckpointError
from orbax_t5x.readers.detect.user_path import check_item, path_text


def test_a_local_path_is_expanded_and_otherwise_stays(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert path_text("~/run/../step") == "/somewhere/run/../step"
    assert path_text(Path("a/b")) == "a/b" and path_text("a~b") == "a~b"


@pytest.mark.parametrize("url", ["gs://bucket/run", "s3://bucket/run", "https://host/run"])
def test_a_url_stays(url):
    assert path_text(url) == url


@pytest.mark.parametrize(
    ("path", "kind", "word"),
    [
        ("", CheckpointNotFoundError, "is empty"),
        ("a\0b", CheckpointNotFoundError, "NUL"),
        (["a", "b"], TypeError, "list of 2"),
        (3, TypeError, "int"),
        (os.fsencode("a"), TypeError, "bytes"),
        ("ftp://host/run", UnsupportedCheckpointError, "ftp"),
    ],
)
def test_what_is_no_path_is_refused_by_name(path, kind, word):
    with pytest.raises(kind, match=word):
        path_text(path)


def test_an_item_is_a_name():
    check_item(None)
    check_item("state")
    with pytest.raises(TypeError, match="not a dict; the tree to restore into is the second argument"):
        check_item({"w": 1})
