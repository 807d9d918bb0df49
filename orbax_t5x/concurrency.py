"""Work beside the caller's thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any

# How late an interrupt may be noticed.
_POLL_SECS = 0.5


class ReadThread:
    """An event loop in a thread of its own, on which leaves are read.

    Never the caller's loop or thread: it works where a loop is already running, and no coroutine that holds arrays is
    ever handed to `asyncio.run` (whose runner formats the finished task, and so the arrays, on exit).
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="orbax_t5x-read", daemon=True)
        self._thread.start()

    def is_current(self) -> bool:
        """Whether the caller runs on this thread, where waiting for it would never end."""
        return threading.current_thread() is self._thread

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine that returns None to its end; a KeyboardInterrupt cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            # A wait without end would not notice a signal that came just before it began.
            while not future.done():
                with contextlib.suppress(TimeoutError):
                    future.exception(_POLL_SECS)
            future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Stops the loop; the thread ends."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
