"""Progress as a bar on a terminal, as lines elsewhere.

No thread draws them: they are written when bytes arrive. They show numbers and the verb, never a leaf's name, which
could be wider than the terminal or hold control characters.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Generator
from typing import Literal, TextIO

from orbax_t5x.text.wording import size_text

OnProgress = Callable[[int, int, str], None]
"""`on_progress(done_bytes, total_bytes, leaf)`."""

Progress = OnProgress | Literal["bar"]
"""`progress(done_bytes, total_bytes, leaf)`, from one thread at a time; "bar": a bar on a terminal, lines elsewhere."""

_INTERVAL_SECS = 0.1
# A line in a log for each tenth, or where a tenth takes longer, every ten seconds; never two in a second.
_LEAST_LINE_INTERVAL_SECS = 1.0
_MOST_LINE_INTERVAL_SECS = 10.0
_LINES = 10
_LINE_COLUMNS = 80
_MOST_BAR_COLUMNS = 24
_LEAST_BAR_COLUMNS = 6
_CLEAR_LINE = "\r\x1b[2K"


class ProgressBar:
    """`progress(done_bytes, total_bytes, leaf)` as a line on a terminal.

    Leaving its context removes the line. Elsewhere it writes lines, and none for what takes less than a second.
    """

    def __init__(self, verb: str, stream: TextIO | None = None):
        """Args: `verb`: the work, such as "restoring"; `stream`: standard error if None."""
        self._verb = verb
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._started = time.monotonic()
        self._drawn: float | None = None
        self._lines = 0

    def __call__(self, done: int, total: int, leaf: str) -> None:
        """Draws the bar if it is due, elsewhere a line."""
        now = time.monotonic()
        rate = size_text(round(done / max(now - self._started, 1e-3)))
        if not self._is_terminal:
            if self._is_line_due(now, done, total):
                self._write(bar_line(self._verb, done, total, rate, _LINE_COLUMNS) + "\n")
        elif self._drawn is None or now - self._drawn >= _INTERVAL_SECS or done >= total:
            self._drawn = now
            self._write(_CLEAR_LINE + bar_line(self._verb, done, total, rate, _columns(self._stream)))

    def _is_line_due(self, now: float, done: int, total: int) -> bool:
        since = now - (self._started if self._drawn is None else self._drawn)
        tenth = _LINES * done // total if total else _LINES
        is_due = since >= _MOST_LINE_INTERVAL_SECS or (since >= _LEAST_LINE_INTERVAL_SECS and tenth > self._lines)
        if is_due:
            self._drawn, self._lines = now, tenth
        return is_due

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._drawn is not None and self._is_terminal:
            self._write(_CLEAR_LINE)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def bar_line(verb: str, done: int, total: int, rate: str, columns: int) -> str:
    """Returns `verb ###... 50%  1 GiB of 2 GiB  1 GiB/s`."""
    fraction = done / total if total else 1.0
    percent = f" {fraction:4.0%}"
    free = columns - 1 - len(verb + percent)
    text = ""
    for more, needed in ((f"  {size_text(done):>8} of {size_text(total)}", 0), (f"  {rate:>8}/s", _LEAST_BAR_COLUMNS)):
        if len(more) + needed > free:
            break
        text, free = text + more, free - len(more)
    bar_columns = min(_MOST_BAR_COLUMNS, free - 1)
    bar = "#" * int(fraction * bar_columns)
    shown_bar = f" {bar.ljust(bar_columns, '.')}" if bar_columns >= _LEAST_BAR_COLUMNS else ""
    return (verb + shown_bar + percent + text)[: columns - 1]


def _columns(stream: TextIO) -> int:
    """Returns the width of a stream's terminal."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
        if columns := os.get_terminal_size(stream.fileno()).columns:
            return columns
    return shutil.get_terminal_size().columns


def check_progress(progress: Progress | None) -> None:
    """Checks a caller's `progress`."""
    if progress is not None and not callable(progress) and progress != "bar":
        raise ValueError(f"progress must be a function, 'bar' or None, not {progress!r}")


@contextlib.contextmanager
def shown_progress(progress: Progress | None, verb: str) -> Generator[OnProgress | None, None, None]:
    """Yields the function to call as bytes arrive."""
    check_progress(progress)
    if progress != "bar":
        yield progress
        return
    with ProgressBar(verb) as bar:
        yield bar
