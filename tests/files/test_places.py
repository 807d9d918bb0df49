"""Paths as callers give them: URLs, home directories, links; and the opening that calls share."""

import socket

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointNotFoundError, UnsupportedCheckpointError
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.places import answered, current_opening, current_transcript, files_at, opening, using
from orbax_t5x.files.transcript import Transcript, Viewpoint
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
    with pytest.raises(TypeError, match="one path is opened at a time"):
        ot.open_checkpoint([tmp_path, tmp_path])
    for nothing in (None, 3):
        with pytest.raises(TypeError, match=r"a checkpoint's path is text or an os\.PathLike, not"):
            ot.open_checkpoint(nothing)


class Server:
    def __init__(self):
        self.calls = []

    def close_idle(self):
        self.calls.append("close_idle")

    def forget(self):
        self.calls.append("forget")


def test_an_opening_inside_another_shares_servers_and_has_limits_of_its_own():
    with opening(Limits(rank=3)) as outer:
        assert outer.limits.rank == 3 and current_opening() is outer
        with opening() as inner, opening(Limits(rank=4)) as own:
            assert inner.limits.rank == 3 and files_at("/").limits is own.limits
            assert inner.servers is outer.servers is own.servers
        outer.servers["x"] = server = Server()
    assert server.calls == ["forget"] and current_opening() is not outer


def test_a_failed_opening_closes_its_connections():
    server = Server()
    with pytest.raises(KeyError), opening() as made:
        made.servers["x"] = server
        raise KeyError
    assert server.calls == ["close_idle", "forget"]


def test_a_question_without_files_is_asked_once_for_all():
    assert answered(["commit"], lambda: "alone") == "alone"
    with using(shared := Transcript()):
        assert answered(["commit"], lambda: "first") == "first"
        received = Transcript.decode(shared.encode(), Viewpoint(1, 0))
    assert current_transcript() is None and shared.is_closed
    with using(received):
        assert answered(["commit"], lambda: pytest.fail("it was asked again")) == "first"
