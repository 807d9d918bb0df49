"""A progress bar on a terminal, drawn by `rich`; nothing anywhere else.

No thread draws it: it is redrawn when bytes arrive. What is written to the terminal is numbers and our own words, never
a leaf's name. `sys.stdout` and `sys.stderr` stay as they are.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Generator
from typing import Literal, TextIO

import rich.progress
from rich.console import Console

from orbax_t5x.text.wording import size_text

OnProgress = Callable[[int, int, str], None]
"""`on_progress(done_bytes, total_bytes, leaf)`."""

Progress = OnProgress | Literal["bar"]
"""`progress(done_bytes, total_bytes, leaf)`, from one thread at a time; "bar": a bar on a terminal."""

# Redrawing more often costs more than it tells.
_INTERVAL_SECS = 0.1
_BAR_WIDTH = 24


class ProgressBar:
    """`progress(done_bytes, total_bytes, leaf)` as a line on standard error; leaving its context wipes it."""

    def __init__(self, verb: str, stream: TextIO | None = None):
        """Args: `verb`: what is going on, such as "restoring"; `stream`: standard error if None."""
        console = Console(file=sys.stderr if stream is None else stream, force_jupyter=False)
        # `rich` by itself draws into a pipe where FORCE_COLOR is set.
        self._is_shown = console.file.isatty() and not console.is_dumb_terminal
        self._is_started = False
        self._started = time.monotonic()
        self._drawn = 0.0
        self._progress = rich.progress.Progress(
            rich.progress.TextColumn(verb, markup=False),
            rich.progress.BarColumn(_BAR_WIDTH),
            rich.progress.TextColumn("{task.percentage:>3.0f}%  {task.fields[amount]}", markup=False),
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task("", total=1, amount="")

    def __call__(self, done: int, total: int, leaf: str) -> None:
        """Draws, if it is time to."""
        now = time.monotonic()
        if not self._is_shown or (now - self._drawn < _INTERVAL_SECS and done < total):
            return
        if not self._is_started:
            self._progress.start()
            self._is_started = True
        self._drawn = now
        rate = size_text(round(done / max(now - self._started, 1e-3)))
        amount = f"{size_text(done)} of {size_text(total)}  {rate}/s"
        # Nothing to do is done.
        self._progress.update(self._task, completed=done or not total, total=total or 1, amount=amount, refresh=True)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exc_info: object) -> None:
        # Stopping what has not begun would write an empty line.
        if self._is_started:
            self._progress.stop()


def check_progress(progress: Progress | None) -> None:
    """Raises ValueError for what is neither a function nor "bar"."""
    if progress is not None and not callable(progress) and progress != "bar":
        raise ValueError(f"progress must be a function, 'bar' or None, not {progress!r}")


@contextlib.contextmanager
def shown_progress(progress: Progress | None, verb: str) -> Generator[OnProgress | None, None, None]:
    """Returns the function to call as bytes arrive; for "bar", a bar is shown until the end of the context."""
    check_progress(progress)
    if progress != "bar":
        yield progress
        return
    with ProgressBar(verb) as bar:
        yield bar
