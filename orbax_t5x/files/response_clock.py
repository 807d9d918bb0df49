"""Deadline for a remote store that does not respond.

One clock serves all requests to a store: a request is given up when neither it nor any other was answered for as long
as the limit says. A slow line with many requests in its queue is not a dead one.
"""

from __future__ import annotations

import time

# Longer than a server in the same building needs, and shorter than any other does.
_NEAR_SECS = 0.002


class ResponseClock:
    """Time of the last response of a remote store.

    The store may be silent for `timeout` seconds.
    """

    def __init__(self, timeout: float):
        self.timeout = timeout
        self._last = -float("inf")
        self._quickest = float("inf")

    def note(self, begun: float | None = None) -> None:
        """Records that a response came, to a request that was begun then."""
        self._last = time.monotonic()
        if begun is not None:
            self._quickest = min(self._quickest, self._last - begun)

    @property
    def is_near(self) -> bool:
        """True if some response came at once."""
        return self._quickest < _NEAR_SECS

    def seconds_left(self, begun: float) -> float:
        """Returns the seconds that a request may still wait.

        It was begun then; zero or less: it is given up.
        """
        return max(begun, self._last) + self.timeout - time.monotonic()

    def timeout_text(self) -> str:
        """Returns the reason for giving up a request, for an error."""
        return f"no answer for {self.timeout:g} s (Limits.io_timeout_secs)"
