"""Requests to web servers, with retries and a clock.

They are repeated while they may succeed, and other threads may give them up.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable

from orbax_t5x.files.ranges import REQUESTS_AT_ONCE
from orbax_t5x.files.remote.responses import (
    FIRST_DELAY_SECS,
    LONGEST_DELAY_SECS,
    MAX_RETRIES,
    PendingResponse,
    RequestError,
    RequestKind,
    Response,
    ResponseClock,
)


class WebRequest(PendingResponse):
    """A request with retries.

    It is sent until it succeeds, fails for good, or has failed too often. It is sent by a thread of its own, or by the
    one that waits for it, which saves waking another.
    """

    def __init__(
        self,
        attempt: Callable[[WebRequest], Response | None],
        clock: ResponseClock,
        *,
        retries: int = MAX_RETRIES,
        is_awaited: bool = False,
    ):
        """Begins it."""
        self._attempt = attempt
        self._clock = clock
        self._retries = retries
        self._is_awaited = is_awaited
        self._begun = time.monotonic()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._failure: RequestError | None = None
        self._future = None if is_awaited else _request_pool().submit(self._run)

    def _run(self) -> Response | None:
        delay, failures = FIRST_DELAY_SECS, 0
        while True:
            try:
                return self._attempt(self)
            except RequestError as error:
                failures += 1
                is_silent = error.kind is RequestKind.SILENT
                if is_silent and self._clock.seconds_left(self._begun) <= 0:
                    raise TimeoutError from error
                if not error.may_pass or failures > self._retries or self._stopped.is_set():
                    raise
                self._failure = None if is_silent else error
                # A server may have closed a connection that was idle just when it was used again.
                if failures > 1:
                    self._stopped.wait(min(delay * random.uniform(0.5, 1.0), self._clock.seconds_left(self._begun)))
                    delay = min(2 * delay, LONGEST_DELAY_SECS)
                self._end_late()

    def _end_late(self) -> None:
        """Raises the last failure if no time is left for an attempt."""
        if self._failure is not None and self._clock.seconds_left(self._begun) <= 0:
            limit = f"{self._clock.timeout:g} s (Limits.io_timeout_secs)"
            raise RequestError(f"{self._failure}; tried for {limit}", self._failure.kind) from self._failure

    def result(self, timeout: float | None = None) -> Response | None:
        if self._future is None:
            return self._run()
        try:
            return self._future.result(timeout)
        except TimeoutError:
            if not self._future.done():
                self._end_late()
            raise

    def done(self) -> bool:
        return self._future is None or self._future.done()

    def cancel(self) -> None:
        """Ends the request by shutting down its connection."""
        if self._future is not None:
            self._future.cancel()
        with self._lock:
            self._stopped.set()
            if self._socket is not None:
                _shut_down(self._socket)

    # -- for attempts

    def seconds_left(self) -> float:
        """Returns the seconds for which the server may still be silent."""
        if self._stopped.is_set():
            raise OSError("given up")
        return self._clock.seconds_left(self._begun)

    def connect(self, connect: Callable[[], None], close: Callable[[], None]) -> None:
        """Connects.

        The search for a name has no time limit: a thread that waits leaves it to another thread.
        """
        if not self._is_awaited:
            return connect()
        connecting = _request_pool().submit(connect)
        try:
            connecting.result(max(0, self.seconds_left()))
        except BaseException:
            connecting.add_done_callback(lambda _: close())
            raise

    def hold(self, used: socket.socket) -> None:
        """Records the socket of an attempt, for `cancel` to shut down."""
        with self._lock:
            self._socket = used
            if self._stopped.is_set():
                _shut_down(used)

    def release(self) -> None:
        """Forgets the socket: the attempt has ended."""
        with self._lock:
            self._socket = None


# By process: threads do not survive a fork.
_POOLS: dict[int, concurrent.futures.ThreadPoolExecutor] = {}


def _request_pool() -> concurrent.futures.ThreadPoolExecutor:
    """Returns this process's threads for requests."""
    process = os.getpid()
    if process not in _POOLS:
        made = concurrent.futures.ThreadPoolExecutor(REQUESTS_AT_ONCE, thread_name_prefix="orbax_t5x-request")
        _POOLS.setdefault(process, made)
    return _POOLS[process]


def _shut_down(used: socket.socket) -> None:
    """Ends a connection under the thread that reads it."""
    with contextlib.suppress(OSError):
        used.shutdown(socket.SHUT_RDWR)
