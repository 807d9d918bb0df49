"""Lines that C++ libraries log stay off standard error; nothing else does."""

import argparse
import contextlib
import os
import subprocess
import sys
import threading

import pytest

from orbax_t5x.cli.main import _filtered
from orbax_t5x.cli.native_log import without_native_log

_LOGGED = [
    "E1122 23:42:52.373645     583 common-io:5] static: Failed to open file. path:'/root/.aws/config' mode:'rb'",
    "W0000 00:00:1732316572.379997 583 aws_credentials.cc:91] no credentials",
    "I1122 23:47:14.132255    8658 tls-handler:1028] static: Initializing TLS using s2n.",
]
_OTHER = ["Fatal Python error: Aborted", "E1122 is a part of a sentence", "error: E1122 23:42:52.373645 583 x:5] y", ""]


def _written(capfd):
    with without_native_log():
        for line in [*_LOGGED, *_OTHER, *_LOGGED]:
            os.write(2, line.encode() + b"\n")
        sys.stderr.write("of Python\n")  # at once: the filter writes meanwhile
    os.write(2, b"after\n")
    return capfd.readouterr().err.splitlines()


def test_logged_lines_are_dropped_and_nothing_else(capfd, monkeypatch):
    monkeypatch.delenv("TENSORSTORE_VERBOSE_LOGGING", raising=False)
    descriptors = len(os.listdir("/proc/self/fd"))
    assert sorted(_written(capfd)) == sorted([*_OTHER, "of Python", "after"])
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_whoever_asks_for_the_log_gets_it(capfd, monkeypatch):
    monkeypatch.setenv("TENSORSTORE_VERBOSE_LOGGING", "all")
    assert sorted(_written(capfd)) == sorted([*_LOGGED, *_OTHER, *_LOGGED, "of Python", "after"])


def test_pythons_own_stream_comes_back(capfd, monkeypatch):
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    own = sys.stderr
    with without_native_log():
        assert sys.stderr is not own
        print("half a line", end="\r", file=sys.stderr, flush=True)
    assert sys.stderr is own
    assert capfd.readouterr().err.endswith("half a line\r")


def test_a_child_that_outlives_the_block_keeps_nothing_waiting_and_can_still_write(capfd):
    with without_native_log():
        os.write(2, b"half a line")
        child = subprocess.Popen(["sh", "-c", "read line; echo late >&2"], stdin=subprocess.PIPE)
    assert capfd.readouterr().err == "half a line"
    child.communicate(b"go\n", timeout=60)
    threads = [one for one in threading.enumerate() if one.name.endswith("(_filter)")]
    for thread in threads:
        thread.join(timeout=60)
    assert child.returncode == 0 and capfd.readouterr().err == "late\n"


def test_a_closed_standard_error_is_left_alone():
    code = (
        "from orbax_t5x.cli.native_log import without_native_log\nwith without_native_log(): print('within')\n"
        "print('after')"
    )
    shell = 'exec "$0" -c "$1" 2>&-'
    done = subprocess.run(["sh", "-c", shell, sys.executable, code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, ["within", "after"])


@pytest.mark.parametrize(("path", "is_filtered"), [("s3://bucket/x", True), ("/local/x", False)])
def test_only_commands_with_a_url_are_filtered(path, is_filtered):
    options = argparse.Namespace(source="a", destination=path, strict=True)
    assert isinstance(_filtered(options), contextlib.nullcontext) is not is_filtered
