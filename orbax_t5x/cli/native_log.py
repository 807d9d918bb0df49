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


@contextlib.contextmanager
def without_native_log() -> Iterator[None]:
    """Drops lines of that form from standard error within the block; all else passes, in order.

    Python's own `sys.stderr` writes past the filter, so that a progress bar sees the terminal. Does nothing where
    TENSORSTORE_VERBOSE_LOGGING is set.
    """
    if os.environ.get(_ASKED_FOR):
        yield
        return
    sys.stderr.flush()
    kept = os.dup(_STDERR)
    reading, writing = os.pipe()
    os.dup2(writing, _STDERR)
    os.close(writing)
    filtering = threading.Thread(target=_filter, args=(reading, kept), daemon=True)
    filtering.start()
    try:
        with _python_writes_to(kept):
            yield
    finally:
        os.dup2(kept, _STDERR)  # closes the pipe's last end: the thread reads what is left, and stops
        filtering.join()
        os.close(kept)


def _filter(reading: int, kept: int) -> None:
    with open(reading, "rb") as lines:
        for line in lines:
            if not _LOG_LINE.match(line):
                os.write(kept, line)


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
