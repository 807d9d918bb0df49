"""One web server: reads of byte ranges that never hold more than was asked for.

TensorStore keeps all that a server sends, however much it is, and goes on after it was cancelled. So http and https are
read by a client of our own over the standard library's sockets: every request names its last byte, a response is
compared with the request before its body is read (`web_response`), the body is read up to that byte, and a connection
that sent anything else is closed. Requests run in threads, and their connections are used again.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import http.client
import os
import random
import select
import socket
import ssl
import struct
import threading
import time
import urllib.parse
import weakref
from collections.abc import Callable, Mapping
from typing import TypeVar

from orbax_t5x.errors import CheckpointError
from orbax_t5x.storage.remote.transport import (
    FIRST_DELAY_SECS,
    LONGEST_DELAY_SECS,
    MAX_RETRIES,
    REQUESTS_AT_ONCE,
    Response,
)
from orbax_t5x.storage.remote.web_answer import read_answer
from orbax_t5x.storage.remote.web_response import PassingError, WebResponse
from orbax_t5x.storage.remote.web_route import find_route
from orbax_t5x.storage.response_clock import ResponseClock
from orbax_t5x.storage.values import BoundedRange

_Result = TypeVar("_Result")

# Characters of a key that stand in a URL as they are.
PLAIN_CHARACTERS = "/-._~!$&'()*+,;=:@"
# Closing a connection ends it at once, whatever the server still sends.
_RESET = struct.pack("ii", 1, 0)


class WebServer:
    """One web server; implements `Transport`."""

    def __init__(self, base: str, clock: ResponseClock):
        """Makes no request.

        Args:
          base: the URL of the server, without a path.
          clock: ends requests.

        Raises:
          ValueError: the URL names no server.
        """
        self._clock = clock
        self._route = find_route(base, clock.timeout)
        self._idle: list[socket.socket] = []
        self._process = os.getpid()
        self._closings = 0
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._idle)

    def read(self, key: str, wanted: BoundedRange, *, is_awaited: bool = False) -> WebRequest:
        """Implements `Transport.read`."""
        target = urllib.parse.quote(key, safe=PLAIN_CHARACTERS)
        attempt = functools.partial(self.exchange, target, wanted, read_answer)
        return WebRequest(attempt, self._clock, is_awaited=is_awaited)

    def exchange(
        self,
        target: str,
        wanted: BoundedRange,
        judge: Callable[[WebResponse, BoundedRange], _Result],
        request: WebRequest,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> _Result:
        """Sends a request once, and returns what `judge` makes of its response.

        Args:
          target: path and query, without the slash at the front.
          wanted: the bytes to request.
          judge: compares the response with what was wanted, and reads its body; the connection is kept only where that
            ended as it was announced.
          request: that this is part of.
          headers: besides those of every request.

        Raises:
          PassingError: another attempt may succeed.
          ValueError: none will.
          CheckpointError: what `judge` raised.
        """
        closings = self._closings
        connection = self._take()
        was_used, response = connection is not None, None
        try:
            connection = connection or request.connect(self._route.connect)
            request.hold(connection)
            connection.sendall(self._route.request(target, wanted, headers or {}))
            response = WebResponse(connection, request.seconds_left, wanted)
            return judge(response, wanted)
        except ssl.SSLCertVerificationError as error:
            raise ValueError(f"UNKNOWN: {error}") from error
        except CheckpointError:  # some of which are errors of the operating system, too
            raise
        except http.client.HTTPException as error:
            raise ValueError(f"UNKNOWN: no HTTP: {error}") from error
        except OSError as error:
            # A server may close a connection that was idle just when it is used again.
            at_once = was_used and response is None
            raise PassingError(f"{type(error).__name__}: {error}", at_once=at_once) from error
        finally:
            request.release()
            if connection is not None:
                self._give(connection, closings, is_kept=response is not None and response.leaves_connection)

    def close_idle(self) -> None:
        """Closes the connections that no request uses, and those of requests under way once these have ended."""
        with self._lock:
            self._closings += 1
            _close_all(self._idle)

    def _take(self) -> socket.socket | None:
        """Returns a connection that was used before, if there is one."""
        with self._lock:
            if self._process != os.getpid():
                self._process = os.getpid()
                _close_all(self._idle)  # a forked child must not use those of its parent
            while self._idle:
                connection = self._idle.pop()
                if not _has_input(connection):
                    return connection
                connection.close()  # the server closed it, or sent more than it announced
        return None

    def _give(self, connection: socket.socket, closings: int, *, is_kept: bool) -> None:
        """Keeps the connection of an attempt, or closes it."""
        if is_kept:
            with self._lock:
                if closings == self._closings:
                    self._idle.append(connection)
                    return
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        connection.close()


class WebRequest:
    """A request that is sent until it succeeds, fails for good, or has failed too often; implements `PendingResponse`.

    It is sent by a thread of its own, or by the one that waits for it, which saves waking another.
    """

    def __init__(
        self,
        attempt: Callable[[WebRequest], Response | None],
        clock: ResponseClock,
        *,
        retries: int = MAX_RETRIES,
        is_awaited: bool = False,
    ):
        """Begins it.

        Args:
          attempt: sends it once.
          clock: ends it.
          retries: how often it is sent again.
          is_awaited: whether it is sent by the thread that calls `result`.
        """
        self._attempt = attempt
        self._clock = clock
        self._retries = retries
        self._is_awaited = is_awaited
        self._begun = time.monotonic()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._future = None if is_awaited else _request_pool().submit(self._run)

    def _run(self) -> Response | None:
        delay, failures = FIRST_DELAY_SECS, 0
        while True:
            try:
                return self._attempt(self)
            except PassingError as error:
                failures += not error.at_once
                if self._clock.seconds_left(self._begun) <= 0:
                    raise TimeoutError from error
                if failures > self._retries or self._stopped.is_set():
                    raise ValueError(f"UNAVAILABLE: {error}") from error
                if not error.at_once:
                    self._stopped.wait(min(delay * random.uniform(0.5, 1.0), self._clock.seconds_left(self._begun)))
                    delay = min(2 * delay, LONGEST_DELAY_SECS)

    def result(self, timeout: float | None = None) -> Response | None:
        """Implements `PendingResponse.result`; one that the caller sends is ended by the clock."""
        return self._run() if self._future is None else self._future.result(timeout)

    def done(self) -> bool:
        """Implements `PendingResponse.done`."""
        return self._future is None or self._future.done()

    def cancel(self) -> None:
        """Ends the request where it is: its connection is shut down."""
        if self._future is not None:
            self._future.cancel()
        with self._lock:
            self._stopped.set()
            if self._socket is not None:
                _shut_down(self._socket)

    # -- for attempts

    def seconds_left(self) -> float:
        """Returns the seconds for which the server may still be silent.

        Raises:
          OSError: the request was given up.
        """
        if self._stopped.is_set():
            raise OSError("given up")
        return self._clock.seconds_left(self._begun)

    def connect(self, connect: Callable[[], socket.socket]) -> socket.socket:
        """Connects. The search for a name has no time limit: a thread that waits leaves it to another."""
        if not self._is_awaited:
            return connect()
        connecting = _request_pool().submit(connect)
        try:
            return connecting.result(max(0, self.seconds_left()))
        except BaseException:
            connecting.add_done_callback(_close_late)
            raise

    def hold(self, used: socket.socket) -> None:
        """Records the socket of an attempt, which `cancel` shuts down."""
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
    """Returns the threads of this process that send requests; nothing in them waits for another thread."""
    process = os.getpid()
    if process not in _POOLS:
        made = concurrent.futures.ThreadPoolExecutor(REQUESTS_AT_ONCE, thread_name_prefix="orbax_t5x-request")
        _POOLS.setdefault(process, made)
    return _POOLS[process]


def _has_input(used: socket.socket) -> bool:
    """Reports whether a connection without a request has something to read: its end, or what nobody asked for."""
    poll = select.poll()
    poll.register(used, select.POLLIN)
    return bool(poll.poll(0)) or (isinstance(used, ssl.SSLSocket) and used.pending() > 0)


def _shut_down(used: socket.socket) -> None:
    """Ends a connection under the thread that reads it."""
    with contextlib.suppress(OSError):
        used.shutdown(socket.SHUT_RDWR)


def _close_late(connecting: concurrent.futures.Future[socket.socket]) -> None:
    if connecting.exception() is None:
        connecting.result().close()


def _close_all(idle: list[socket.socket]) -> None:
    while idle:
        idle.pop().close()
