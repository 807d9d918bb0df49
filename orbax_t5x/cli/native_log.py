"""Filter of what C++ libraries write to standard error by themselves.

Around each request to a bucket the libraries below TensorStore log lines like `E1122 23:42:52.37 583 common-io:5] …`,
some of them for files that need not exist, and have no setting for it. The error that is raised has what matters.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator

# TensorStore's own setting: whoever sets it wants to see its log.
_ASKED_FOR = "TENSORSTORE_VERBOSE_LOGGING"
_LOG_LINE = re.compile(rb"[IWEF]\d{4} \d\d:\d\d:\d+\.\d+ +\d+ [^\]\n]+\] ")
_STDERR = 2
# Waited for processes that were started within the block and still hold its standard error.
_CHILDREN_SECS = 1.0


@contextlib.contextmanager
def without_native_log() -> Iterator[None]:
    """Drops lines of that form from standard error within the block; all else passes, in order.

    Python's own `sys.stderr` writes past the filter, so that a progress bar sees the terminal. Does nothing where
    TENSORSTORE_VERBOSE_LOGGING is set.
    """
    if os.environ.get(_ASKED_FOR):
        yield
        return
    if sys.stderr is not None:  # None where the program was started with standard error closed
        sys.stderr.flush()
    try:
        kept = os.dup(_STDERR)
    except OSError:
        yield
        return
    reading, writing = os.pipe()
    os.dup2(writing, _STDERR)
    os.close(writing)
    # A process that was started within the block may hold the pipe for longer: the end is a mark, and not its closing.
    end, ended = b"%s\n" % os.urandom(16).hex().encode(), threading.Event()
    filtering = threading.Thread(target=_filter, args=(reading, os.dup(kept), end, ended), daemon=True)
    filtering.start()
    try:
        with _python_writes_to(kept):
            yield
    finally:
        with contextlib.suppress(OSError):
            os.write(_STDERR, end)
            ended.wait()
        os.dup2(kept, _STDERR)
        os.close(kept)
        filtering.join(_CHILDREN_SECS)


def _filter(reading: int, kept: int, end: bytes, ended: threading.Event) -> None:
    """Passes lines on until no process holds the pipe; reports when those before `end` are written."""
    with open(reading, "rb") as lines, open(kept, "wb", buffering=0) as passed:
        try:
            for line in lines:
                before = line.removesuffix(end)
                if not _LOG_LINE.match(before):
                    passed.write(before)
                if before != line:
                    ended.set()
        finally:
            ended.set()


@contextlib.contextmanager
def _python_writes_to(kept: int) -> Iterator[None]:
    """Lets `sys.stderr` write to a descriptor, unless it is a stream that somebody put there."""
    if sys.stderr is not sys.__stderr__:
        yield
        return
    own = sys.stderr
    with open(kept, "w", encoding=own.encoding, errors=own.errors, buffering=1, closefd=False) as stream:
        sys.stderr = stream
        try:
            yield
        finally:
            sys.stderr = own
