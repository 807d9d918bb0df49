"""One web server: reads of byte ranges that never hold more than was asked for.

TensorStore keeps all that a server sends, however much it is, and goes on after it was cancelled. So http and https are
read by a client of our own over the standard library's sockets: every request names its last byte, a response is
compared with the request before its body is read (`web_response`), the body is read up to that byte, and a connection
that sent anything else is closed. Requests run in threads, and their connections are used again.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import os
import select
import socket
import ssl
import struct
import threading
import urllib.parse
import weakref
from collections.abc import Callable, Mapping
from typing import TypeVar

from orbax_t5x.errors import CheckpointError
from orbax_t5x.storage.remote.web_answer import read_answer
from orbax_t5x.storage.remote.web_request import WebRequest
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

    is_bounded: bool = True

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


def _has_input(used: socket.socket) -> bool:
    """Reports whether a connection without a request has something to read: its end, or what nobody asked for."""
    poll = select.poll()
    poll.register(used, select.POLLIN)
    return bool(poll.poll(0)) or (isinstance(used, ssl.SSLSocket) and used.pending() > 0)


def _close_all(idle: list[socket.socket]) -> None:
    while idle:
        idle.pop().close()
