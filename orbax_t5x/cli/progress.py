"""A progress bar on a terminal; nothing anywhere else."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from orbax_t5x.text.table import terminal_width
from orbax_t5x.text.wording import size_text

# Redrawing more often costs more than it tells.
_INTERVAL_SECS = 0.1
_BAR_WIDTH = 24


class ProgressBar:
    """`progress(done_bytes, total_bytes, leaf)` as a line on standard error; leaving its context wipes it."""

    def __init__(self, verb: str, stream: TextIO | None = None):
        self._verb = verb
        self._stream = stream if stream is not None else sys.stderr
        self._shown = self._stream.isatty()
        self._started = time.monotonic()
        self._drawn = 0.0

    def __call__(self, done: int, total: int, leaf: str) -> None:
        """Draws, if it is time to."""
        now = time.monotonic()
        if not self._shown or (now - self._drawn < _INTERVAL_SECS and done < total):
            return
        self._drawn = now
        share = done / total if total else 1.0
        bar = "━" * round(share * _BAR_WIDTH)
        rate = size_text(round(done / max(now - self._started, 1e-3)))
        text = f"{self._verb} {bar:<{_BAR_WIDTH}} {share:4.0%}  {size_text(done)} of {size_text(total)}  {rate}/s"
        self._stream.write(f"\r\x1b[K{text[: terminal_width() - 1]}")
        self._stream.flush()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._shown and self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
