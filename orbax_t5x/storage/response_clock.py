"""Deadline for a remote store that does not respond.

One clock serves all requests to a store: a request is given up when neither it nor any other was answered for as long
as the limit says. A slow line with many requests in its queue is not a dead one.
"""

from __future__ import annotations

import time


class ResponseClock:
    """Time of the last response of a remote store, which may be silent for `timeout` seconds."""

    def __init__(self, timeout: float):
        self.timeout = timeout
        self._last = -float("inf")

    def note(self) -> None:
        """Records that a response came."""
        self._last = time.monotonic()

    def seconds_left(self, begun: float) -> float:
        """Returns the seconds that a request begun then may still wait; zero or less: it is given up."""
        return max(begun, self._last) + self.timeout - time.monotonic()

    def timeout_text(self) -> str:
        """Returns the reason for giving up a request, for an error."""
        return f"no answer for {self.timeout:g} s (Limits.io_timeout_secs)"
