"""Destinations as callers give them."""

import errno
import os
from pathlib import Path

import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointIOError
from tests.support.conversions import names_in, new_source, old_destination
from tests.support.saving import stock


@pytest.fixture
def new(tmp_path) -> Path:
    return new_source(tmp_path / "source")


@pytest.fixture
def out(tmp_path) -> Path:
    """A destination that holds a checkpoint."""
    return old_destination(tmp_path / "out")


def test_a_destination_inside_the_source_is_refused(out, tmp_path):
    before = names_in(out)
    (tmp_path / "link").symlink_to(out)
    for inside in (out / "sub", out / "d" / "deep", tmp_path / "link" / "sub"):
        for source in (out, {"x": out}, ot.open_checkpoint(out)):
            with pytest.raises(CheckpointIOError, match="is inside the source"):
                ot.convert(source, inside)
    assert names_in(out) == before


def test_a_tilde_is_the_home_directory(new, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for destination in ("~/runs/c", Path("~/runs/d")):
        report = ot.convert(new, destination)
        assert report.destination == os.path.expanduser(destination)
        assert stock(Path(report.destination)).keys() == {"b"}
    assert names_in(tmp_path) == ["home", "source"]
    with pytest.raises(CheckpointIOError, match="is inside the source"):
        ot.convert(tmp_path / "home/runs/c", "~/runs/c/inside")


@pytest.mark.parametrize("overwrite", [True, False])
def test_an_empty_destination_is_not_the_working_directory(overwrite, new, out, monkeypatch):
    monkeypatch.chdir(out)
    with pytest.raises(CheckpointIOError, match=r"the destination is empty; '\.' is the working directory") as caught:
        ot.convert(new, "", overwrite=overwrite)
    assert caught.value.errno == errno.EINVAL
    assert stock(out).keys() == {"a"} and names_in(out.parent) == ["c"]


def test_a_destination_that_is_no_text_is_refused(new, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for destination in (b"c", None, 3):
        with pytest.raises(TypeError):
            ot.convert(new, destination)
    assert names_in(tmp_path) == ["source"]
