"""The destination of a conversion: what may be replaced, and that a kill at any time costs nobody anything."""

import errno
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointIOError
from tests.support.conversions import names_in, new_source, old_destination
from tests.support.saving import stock

WORK = ".c.orbax-t5x-convert"


@pytest.fixture
def new(tmp_path) -> Path:
    return new_source(tmp_path / "source")


@pytest.fixture
def out(tmp_path) -> Path:
    """A destination that holds a checkpoint."""
    return old_destination(tmp_path / "out")


KILLED = """
import os, signal, sys
import orbax_t5x as ot
def progress(done, total, leaf):
    os.write(1, b"wrote\\n")
    signal.pause()
ot.convert(sys.argv[1], sys.argv[2], overwrite=True, progress=progress)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_one_conversion_at_a_time_and_what_a_killed_one_left_is_gone_after_the_next(how, new, out):
    arguments = [sys.executable, "-c", KILLED, str(new), str(out)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None and process.stdout.readline() == b"wrote\n"
        assert names_in(out.parent) == [WORK, "c"]
        ot.convert(new, out.parent / "d")  # another destination
        with pytest.raises(CheckpointIOError, match="another conversion writes to it") as caught:
            ot.convert(new, out, overwrite=True)
        assert caught.value.errno == errno.EBUSY
        assert names_in(out.parent) == [WORK, "c", "d"]
        process.send_signal(how)
        process.wait()
    ot.convert(new, out.parent / "d", overwrite=True)
    assert names_in(out.parent) == [WORK, "c", "d"]
    assert stock(out).keys() == {"a"}
    ot.convert(new, out, overwrite=True)
    assert names_in(out.parent) == ["c", "d"]
    assert stock(out).keys() == {"b"}


def test_directories_of_other_names_are_nobodys(new, out):
    others = [".c.orbax-t5x-convert.old", ".cc.orbax-t5x-convert", "c.orbax-t5x-convert"]
    for name in others:
        (out.parent / name).mkdir()
    ot.convert(new, out, overwrite=True)
    assert names_in(out.parent) == sorted([*others, "c"])


def assert_refused(new, out):
    with pytest.raises(CheckpointIOError, match="is no work directory of a conversion") as caught:
        ot.convert(new, out, overwrite=True)
    assert caught.value.errno == errno.EBUSY and caught.value.path == str(out)
    assert stock(out).keys() == {"a"}


def test_what_else_has_the_name_of_the_work_directory_is_refused_and_stays(new, out):
    (out.parent / WORK).symlink_to(out)
    assert_refused(new, out)
    assert (out.parent / WORK).is_symlink()
    (out.parent / WORK).unlink()
    (out.parent / WORK).write_text("mine")
    assert_refused(new, out)
    assert (out.parent / WORK).read_text() == "mine"


def test_links_in_a_work_directory_are_removed_and_not_followed(new, out, tmp_path):
    home = tmp_path / "home"
    (home / "below").mkdir(parents=True)
    (home / "thesis.txt").write_text("years of work")
    work = out.parent / WORK
    work.mkdir(0o700)
    for name in ("blocks", "c", "owner"):
        (work / name).symlink_to(home)
    os.link(home / "thesis.txt", work / "same")
    os.mkfifo(work / "fifo")
    (work / "directory").mkdir()
    (work / "directory" / "link").symlink_to(home / "below")
    ot.convert(new, out, overwrite=True)
    assert stock(out).keys() == {"b"} and names_in(out.parent) == ["c"]
    assert names_in(home) == ["below", "thesis.txt"] and (home / "thesis.txt").read_text() == "years of work"


def test_the_old_is_put_back_where_a_kill_came_between_two_renames(new, out):
    left = out.parent / WORK
    left.mkdir()
    os.rename(out, left / "replaced")
    with pytest.raises(CheckpointIOError, match="overwrite=True"):
        ot.convert(new, out)
    assert stock(out).keys() == {"a"}
    assert names_in(out.parent) == ["c"]


def test_the_destination_is_missing_between_two_renames_only(new, out, monkeypatch):
    seen: list[bool] = []
    rename = os.rename

    def watched(one, other, **keywords):
        rename(one, other, **keywords)
        seen.append(os.path.lexists(out))

    monkeypatch.setattr(os, "rename", watched)
    ot.convert(new, out, overwrite=True)
    assert stock(out).keys() == {"b"}
    assert names_in(out.parent) == ["c"]
    assert seen[-2:] == [False, True] and all(seen[:-2])


def test_an_interrupt_between_two_renames_puts_the_old_back_and_warns(new, out, monkeypatch, caplog):
    rename = os.rename

    def interrupted(one, other, **keywords):
        rename(one, other, **keywords)
        if Path(one) == out:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ot.convert(new, out, overwrite=True)
    assert stock(out).keys() == {"a"} and names_in(out.parent) == ["c"]
    assert "the old one is back" in caplog.text


def test_a_failed_rename_puts_the_old_back(new, out, monkeypatch):
    rename = os.rename

    def failing(one, other, **keywords):
        if Path(other) == out and "replaced" not in Path(one).name:
            raise OSError(28, "No space left on device")
        rename(one, other, **keywords)

    # What a function of a test raises counts as the user's own; this one is of the module `os`.
    of_os = {**globals(), "__name__": os.__name__, "__file__": os.__file__}
    monkeypatch.setattr(os, "rename", types.FunctionType(failing.__code__, of_os, closure=failing.__closure__))
    with pytest.raises(CheckpointIOError) as caught:
        ot.convert(new, out, overwrite=True)
    assert caught.value.errno == 28
    assert stock(out).keys() == {"a"}
    assert names_in(out.parent) == ["c"]
