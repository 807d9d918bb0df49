"""One web server: reads of byte ranges that never hold more than was asked for.

TensorStore keeps all that a server sends, however much it is, and goes on after it was cancelled. So http and https are
read by the standard library's client, which brings no further dependency: every request names its last byte, a response
is compared with the request before its body is read, the body is read up to that byte, and a connection that sent
anything else is closed. Requests run in threads, and their connections are used again.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import dataclasses
import functools
import http.client
import io
import os
import random
import re
import select
import socket
import ssl
import struct
import threading
import urllib.parse
import urllib.request
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from orbax_t5x.errors import CheckpointError, CheckpointIOError, LimitExceededError
from orbax_t5x.storage.remote.transport import (
    FIRST_DELAY_SECS,
    LONGEST_DELAY_SECS,
    MAX_RETRIES,
    REQUESTS_AT_ONCE,
    Response,
)

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)", re.ASCII)
_PASSING = (408, 429, 500, 502, 503, 504)
_MISSING = (404, 410)
_DENIED = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED"}
# A page that explains a refusal is read to its end, so that the connection can be used again; a longer one is not.
_PAGE_BYTES = 1 << 16
_PIECE_BYTES = 1 << 18
# Of headers, which are fewer in every sound answer; and the most bytes that a byte costs in chunks of one byte.
_HEAD_BYTES = 1 << 18
_FRAMING = 8
# Characters of a key that stand in a URL as they are.
_PLAIN = "/-._~!$&'()*+,;=:@"
# Closing a connection ends it at once, whatever the server still sends.
_RESET = struct.pack("ii", 1, 0)
# As for TensorStore; beside it the environment variables of OpenSSL hold.
_CA_BUNDLE = "TENSORSTORE_CA_BUNDLE"
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "orbax-t5x"}


class _PassingError(Exception):
    """Error of a request that may succeed when it is sent again; `at_once` on another connection."""

    def __init__(self, text: str, *, at_once: bool = False):
        super().__init__(text)
        self.at_once = at_once


@dataclasses.dataclass(frozen=True)
class _Range:
    """The bytes that one request asks for; see `Transport.read`."""

    start: int
    stop: int | None
    most: int

    @property
    def is_stat(self) -> bool:
        return self.start == self.stop

    @property
    def size(self) -> int:
        """The bytes that the server is asked for; of a file of unknown size one more than it may have."""
        if self.start < 0:
            return -self.start
        return self.most + 1 if self.stop is None else self.stop - self.start

    @property
    def header(self) -> str:
        return f"bytes={self.start}" if self.start < 0 else f"bytes={self.start}-{self.start + self.size - 1}"


class WebServer:
    """One web server; implements `Transport`."""

    def __init__(self, base: str, timeout: float):
        """Makes no request.

        Args:
          base: the URL of the server, without a path.
          timeout: the seconds for which a connection may be silent.

        Raises:
          ValueError: the URL names no server.
        """
        self._route = _route(base, timeout)
        self._idle: list[http.client.HTTPConnection] = []
        self._process = os.getpid()
        self._closings = 0
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._idle)

    def read(self, key: str, start: int, stop: int | None, most: int) -> WebRead:
        """Implements `Transport.read`."""
        path = self._route.root + urllib.parse.quote(key, safe=_PLAIN)
        return WebRead(functools.partial(self._run, path, _Range(start, stop, most)))

    def close_idle(self) -> None:
        """Closes the connections that no request uses, and those of requests under way once these have ended."""
        with self._lock:
            self._closings += 1
            _close_all(self._idle)

    def _run(self, path: str, wanted: _Range, request: WebRead) -> Response | None:
        """Sends a request until it succeeds, fails for good, or has failed too often."""
        delay, failures = FIRST_DELAY_SECS, 0
        while True:
            try:
                return self._attempt(path, wanted, request)
            except _PassingError as error:
                failures += not error.at_once
                if failures > MAX_RETRIES or request.stopped.is_set():
                    raise ValueError(f"UNAVAILABLE: {error}") from error
                if not error.at_once:
                    request.stopped.wait(delay * random.uniform(0.5, 1.0))
                    delay = min(2 * delay, LONGEST_DELAY_SECS)

    def _attempt(self, path: str, wanted: _Range, request: WebRead) -> Response | None:
        """Sends a request once; its connection is kept only where the response ended as it announced."""
        closings = self._closings
        connection, was_used = self._take()
        response = None
        try:
            if connection.sock is None:
                connection.connect()
            request.hold(cast(socket.socket, connection.sock))
            bounded = functools.partial(_BoundedResponse, request=request, wanted=wanted)
            connection.response_class = cast(Any, bounded)
            ranges = {} if wanted.is_stat else {"Range": wanted.header}
            connection.request("HEAD" if wanted.is_stat else "GET", path, headers={**self._route.headers, **ranges})
            response = connection.getresponse()
            return _response(response, wanted)
        except ssl.SSLCertVerificationError as error:
            raise ValueError(f"UNKNOWN: {error}") from error
        except CheckpointError:  # some of which are errors of the operating system, too
            raise
        except (OSError, http.client.HTTPException) as error:
            text = f"{type(error).__name__}: {error}"
            # A server may close a connection that was idle just when it is used again.
            if was_used and response is None:
                raise _PassingError(text, at_once=True) from error
            if isinstance(error, OSError | http.client.IncompleteRead):
                raise _PassingError(text) from error
            raise ValueError(f"UNKNOWN: no HTTP: {text}") from error
        finally:
            request.release()
            self._give(connection, response, closings)

    def _take(self) -> tuple[http.client.HTTPConnection, bool]:
        """Returns a connection, and whether it was used before."""
        with self._lock:
            if self._process != os.getpid():
                self._process = os.getpid()
                _close_all(self._idle)  # a forked child must not use those of its parent
            while self._idle:
                connection = self._idle.pop()
                if not _has_input(connection.sock):
                    return connection, True
                connection.close()  # the server closed it, or sent more than it announced
        return self._route.connect(), False

    def _give(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse | None, closings: int
    ) -> None:
        """Keeps the connection of an attempt, or closes it."""
        if response is not None and response.isclosed() and not response.will_close:
            with self._lock:
                if closings == self._closings and not _has_input(connection.sock):
                    self._idle.append(connection)
                    return
        if connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        if response is not None:
            response.close()
        connection.close()


class WebRead:
    """A request to a web server, in a thread; implements `PendingResponse`.

    Attributes:
      stopped: set once it was given up.
    """

    def __init__(self, run: Callable[[WebRead], Response | None]):
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._future = _request_pool().submit(run, self)

    def result(self, timeout: float | None = None) -> Response | None:
        """Implements `PendingResponse.result`."""
        return self._future.result(timeout)

    def done(self) -> bool:
        """Implements `PendingResponse.done`."""
        return self._future.done()

    def cancel(self) -> None:
        """Ends the request where it is: its connection is shut down."""
        self._future.cancel()
        with self._lock:
            self.stopped.set()
            if self._socket is not None:
                _shut_down(self._socket)

    def hold(self, used: socket.socket) -> None:
        """Records the socket of an attempt, which `cancel` shuts down."""
        with self._lock:
            self._socket = used
            if self.stopped.is_set():
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


# -- responses


class _BoundedResponse(http.client.HTTPResponse):
    """Response of which only so many bytes are received, of headers, framing and body together."""

    def __init__(self, sock: socket.socket, *, request: WebRead, wanted: _Range, **settings: Any):
        super().__init__(sock, **settings)
        self.fp = io.BufferedReader(_BoundedReader(self.fp, request, _HEAD_BYTES + _FRAMING * wanted.size))


class _BoundedReader(io.RawIOBase):
    """Stream of what a server sends, which ends with an error at a bound, or when the request was given up."""

    def __init__(self, received: io.BufferedReader, request: WebRead, left: int):
        self._received = received
        self._request = request
        self._left = left

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self._request.stopped.is_set():
            raise OSError("given up")
        if not self._left:
            raise CheckpointIOError("the server sends more than an answer to the request can have")
        count = self._received.raw.readinto(memoryview(buffer)[: self._left])
        self._left -= count or 0
        return count

    def close(self) -> None:
        self._received.close()
        super().close()


def _response(response: http.client.HTTPResponse, wanted: _Range) -> Response | None:
    """Compares a response with its request, then reads its body; None where there is no such file.

    Raises:
      _PassingError: another attempt may succeed.
      ValueError: the server refused; the text begins with a status of absl.
      CheckpointError: the response holds something else than what was asked for.
    """
    status = response.status
    if status not in (200, 206):
        _body(response, _PAGE_BYTES)
        if status in _MISSING:
            return None
        if status == 416:
            if wanted.stop is None and wanted.start <= 0:
                return Response(b"", _generation(response))
            raise ValueError("OUT_OF_RANGE: HTTP code 416")
        if status in _PASSING:
            raise _PassingError(f"HTTP code {status}")
        raise ValueError(f"{_DENIED.get(status, 'UNKNOWN')}: HTTP code {status}")
    if (encoding := response.headers.get("Content-Encoding", "identity").strip().lower()) not in ("", "identity"):
        raise CheckpointIOError(f"the server compresses its answer (Content-Encoding: {encoding[:40]!r})")
    if wanted.is_stat:
        response.read()  # of no body, which ends the response
        return Response(b"", _generation(response))
    size = None if status == 200 else _announced(response, wanted)
    data = _body(response, wanted.size if size is None else size)
    if size is None:
        _check_whole(data, wanted)
    elif data is None or len(data) != size:
        raise CheckpointIOError(
            f"the answer has {'more' if data is None else 'fewer'} bytes than the {size} of its Content-Range"
        )
    if wanted.stop is None and wanted.start >= 0 and (data is None or len(data) > wanted.most):
        raise LimitExceededError(f"more bytes than the {wanted.most} that are read")
    assert data is not None
    return Response(data, _generation(response))


def _announced(response: http.client.HTTPResponse, wanted: _Range) -> int:
    """Returns the size that the Content-Range of a response announces, which is of what was asked for."""
    text = response.headers.get("Content-Range")
    if text is None:
        if response.headers.get_content_maintype() == "multipart":
            raise CheckpointIOError("the server answers one range in several parts")
        raise ValueError("UNKNOWN: Expected Content-Range in an answer with HTTP code 206")
    match = _CONTENT_RANGE.fullmatch(text.strip())
    first, last = (int(match[1]), int(match[2])) if match else (0, -1)
    total = last + 1 if match is None or match[3] == "*" else int(match[3])
    size = last + 1 - first
    fits = first == wanted.start if wanted.start >= 0 else last + 1 == total
    if match is None or not fits or not 0 < size <= wanted.size or last >= total:
        raise CheckpointIOError(
            f"the answer has the Content-Range {text[:80]!r}, and not the requested {wanted.header}"
        )
    if size < wanted.size:
        if wanted.start >= 0 and last + 1 < total:
            raise CheckpointIOError(f"the answer has only {size} bytes of {wanted.header}")
        if wanted.stop is not None:
            raise ValueError(f"OUT_OF_RANGE: the file ends at byte {last + 1}")
    return size


def _check_whole(data: bytes | None, wanted: _Range) -> None:
    """Checks the body of an answer that is not of a range, but of the whole file.

    Raises:
      ValueError: the requested bytes are not the whole file, or not of it.
    """
    if wanted.start > 0 or (data is None and (wanted.start < 0 or wanted.stop is not None)):
        raise ValueError(f"UNKNOWN: the requested {wanted.header} was ignored by server")
    if data is not None and wanted.stop is not None and len(data) < wanted.size:
        raise ValueError(f"OUT_OF_RANGE: the file ends at byte {len(data)}")


def _body(response: http.client.HTTPResponse, most: int) -> bytes | None:
    """Reads a body; None for one of more bytes, of which no more than that are read.

    Raises:
      _PassingError: it was cut.
    """
    length = response.length
    if length is not None:
        if length > most:
            return None
        data = response.read(max(1, length))
        if len(data) < length:
            raise _PassingError(f"the answer ended after {len(data)} of {length} bytes")
        return data
    found = bytearray()
    # Not `read`, which takes a chunk of negative size for all that follows.
    while piece := response.read1(min(_PIECE_BYTES, most + 1 - len(found))):
        found += piece
        if len(found) > most:
            return None
    return bytes(found)


def _generation(response: http.client.HTTPResponse) -> bytes:
    """Returns the strong ETag of a response, or nothing."""
    tag = response.headers.get("ETag", "")
    return b"" if tag.startswith("W/") else tag.encode("utf-8", "surrogateescape")


# -- connections


class _Route(NamedTuple):
    """Route to a server: what makes a connection, what precedes a key in a request, and headers."""

    connect: Callable[[], http.client.HTTPConnection]
    root: str
    headers: dict[str, str]


def _route(base: str, timeout: float) -> _Route:
    """Returns the route to a server, by the proxy that the environment names for it.

    Raises:
      ValueError: the URL names no server.
    """
    url = urllib.parse.urlsplit(base)
    host, port = url.hostname or "", url.port
    settings: dict[str, Any] = {"timeout": timeout}
    connection = http.client.HTTPConnection
    if url.scheme == "https":
        connection = http.client.HTTPSConnection
        settings["context"] = ssl.create_default_context(cafile=os.environ.get(_CA_BUNDLE))
    proxies = {} if urllib.request.proxy_bypass(host) else urllib.request.getproxies()
    named = proxies.get(url.scheme) or proxies.get("all")
    if not named:
        return _Route(functools.partial(connection, host, port, **settings), "/", _HEADERS)
    proxy = urllib.parse.urlsplit(named if "://" in named else f"http://{named}")
    login = {} if proxy.username is None else {"Proxy-Authorization": _basic(proxy.username, proxy.password or "")}
    connect = functools.partial(connection, proxy.hostname or "", proxy.port or 80, **settings)
    if url.scheme == "http":
        return _Route(connect, f"{base}/", {**_HEADERS, **login})

    def tunnel() -> http.client.HTTPConnection:
        made = connect()
        made.set_tunnel(host, port or 443, login)
        return made

    return _Route(tunnel, "/", _HEADERS)


def _basic(user: str, password: str) -> str:
    login = f"{urllib.parse.unquote(user)}:{urllib.parse.unquote(password)}"
    return f"Basic {base64.b64encode(login.encode()).decode()}"


def _has_input(used: socket.socket) -> bool:
    """Reports whether a connection without a request has something to read: its end, or what nobody asked for."""
    poll = select.poll()
    poll.register(used, select.POLLIN)
    return bool(poll.poll(0)) or (isinstance(used, ssl.SSLSocket) and used.pending() > 0)


def _shut_down(used: socket.socket) -> None:
    """Ends a connection under the thread that reads it."""
    with contextlib.suppress(OSError):
        used.shutdown(socket.SHUT_RDWR)


def _close_all(idle: list[http.client.HTTPConnection]) -> None:
    while idle:
        idle.pop().close()
