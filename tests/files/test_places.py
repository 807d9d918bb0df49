"""Paths as callers give them: URLs, home directories, links; and the opening that calls share."""

import socket

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointNotFoundError, UnsupportedCheckpointError
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.places import current_opening, files_at, opening, resolved_path, split_url
from tests.support.bundle_writer import bundle_of


@pytest.mark.parametrize("url", ["file:///tmp", "ftp://x/y", "gs://", "https://user:word@x/y", "https://x/y?z"])
def test_urls_that_no_store_is_behind_are_refused_without_a_packet(url, monkeypatch):
    def no_socket(*args, **kwargs):
        raise AssertionError("a socket was made")

    monkeypatch.setattr(socket, "socket", no_socket)
    for call in (ot.open_checkpoint, ot.latest_step):
        with pytest.raises(UnsupportedCheckpointError, match=url.split("://")[0]):
            call(url)


def test_a_path_that_is_no_text(tmp_path):
    with pytest.raises(TypeError):
        ot.open_checkpoint(str(tmp_path).encode())


def test_a_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    bundle_of({"w": np.ones(2, np.float32)}).write(tmp_path, "model.ckpt-3")
    with ot.open_checkpoint("~/model.ckpt-3") as checkpoint:
        assert list(checkpoint.leaves) == ["w"]


def test_an_empty_path_and_a_list_of_paths(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"^the path is empty"):
        ot.open_checkpoint("")
    with pytest.raises(TypeError, match="several sources are a dict of names and paths"):
        ot.open_checkpoint([tmp_path, tmp_path])
    for nothing in (None, 3):
        with pytest.raises(TypeError, match=r"a checkpoint's path is text or an os\.PathLike, not"):
            ot.open_checkpoint(nothing)


class Store:
    def __init__(self):
        self.calls = []

    def forget(self):
        self.calls.append("forget")


def test_an_opening_inside_another_shares_stores_and_has_limits_of_its_own():
    with pytest.raises(KeyError), opening(Limits(rank=3)) as outer:
        assert outer.limits.rank == 3 and current_opening() is outer
        with opening() as inner, opening(Limits(rank=4)) as own:
            assert inner.limits.rank == 3 and files_at("/").limits is own.limits
            assert inner.stores is outer.stores is own.stores
        outer.stores["x"] = store = Store()
        raise KeyError
    assert store.calls == ["forget"] and current_opening() is not outer


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://host", ("https://host", "", True)),
        ("https://host:80/a/b/", ("https://host:80", "a/b", True)),
        ("gs://bucket", ("gs://bucket", "", True)),
        ("s3://bucket/a b/c", ("s3://bucket", "a b/c", False)),
        ("hf://org/name@commit/a/b", ("hf://org/name@commit", "a/b", False)),
    ],
)
def test_the_parts_of_a_url(url, expected):
    assert split_url(url) == expected


def test_urls_without_percents_in_their_names():
    assert resolved_path("GS://bucket/x%20y") == "gs://bucket/x%20y"
    assert resolved_path("HTTPS://host/a%20b") == "https://host/a b"
