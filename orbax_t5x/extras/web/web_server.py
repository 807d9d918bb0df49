"""A web server: bounded reads of byte ranges.

They never hold more than was asked for. TensorStore keeps all that a server sends, however much it is, and goes on
after it was cancelled. So http and https are read by urllib3, straight or by the proxy that the environment names:
every request names its last byte, a response is compared with the request before its body is read, the body is read up
to that byte, and a connection that sent anything else is closed. Requests run in threads; they are repeated while they
may succeed, and other threads may give them up.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import functools
import http.client
import os
import random
import socket
import ssl
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar, cast

import urllib3
import urllib3.connection

from orbax_t5x.errors import CheckpointError, UnsupportedCheckpointError
from orbax_t5x.extras.web.web_response import BoundedResponse, WebResponse, range_header, read_answer
from orbax_t5x.files.paths import url_scheme
from orbax_t5x.files.places import Scheme, split_url
from orbax_t5x.files.ranges import REQUESTS_AT_ONCE, BoundedRange
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
from orbax_t5x.files.remote.server import Server


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
            limit = f"{self._clock.timeout:g} s"
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


# As for TensorStore; beside it the environment variables of OpenSSL hold.
_CA_BUNDLE = "TENSORSTORE_CA_BUNDLE"


class Exchange(NamedTuple):
    """A request under way, and the size of its answer."""

    request: WebRequest
    size: int


EXCHANGE: ContextVar[Exchange] = ContextVar("orbax_t5x_exchange")
"""Of this thread; urllib3 hands nothing of a caller's to a connection."""


class _BoundedConnection(urllib3.connection.HTTPConnection):
    """Connection with bounded responses; other threads can shut it down."""

    _exchange: Exchange

    def connect(self) -> None:
        self._exchange = EXCHANGE.get()
        self._exchange.request.connect(super().connect, self.close)

    def request(self, *arguments: Any, **settings: Any) -> None:
        self._exchange = EXCHANGE.get()
        if self.sock is not None:
            self._exchange.request.hold(self.sock)
        super().request(*arguments, **settings)
        if self.sock is not None:
            self._exchange.request.hold(self.sock)

    def response_class(self, used: socket.socket, method: str | None = None) -> BoundedResponse:  # pyright: ignore
        return BoundedResponse(used, self._exchange.request.seconds_left, self._exchange.size, method)


class _SecureConnection(_BoundedConnection, urllib3.connection.HTTPSConnection):  # pyright: ignore
    """Connection over TLS."""


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = cast(Any, _BoundedConnection)


class _SecurePool(urllib3.HTTPSConnectionPool):
    ConnectionCls = cast(Any, _SecureConnection)


class Route(NamedTuple):
    """Route to a server: maker of pools, prefix of paths."""

    make_pool: Callable[[], urllib3.HTTPConnectionPool]
    root: str


def find_route(base: str) -> Route:
    """Returns the route to a server."""
    url = urllib.parse.urlsplit(base)
    netloc = url.netloc.encode("idna").decode()
    settings: dict[str, Any] = {"num_pools": 1, "maxsize": 2 * REQUESTS_AT_ONCE}
    if url.scheme == "https":
        settings["ssl_context"] = ssl.create_default_context(cafile=os.environ.get(_CA_BUNDLE))
    proxies = {} if urllib.request.proxy_bypass(url.hostname or "") else urllib.request.getproxies()
    named = proxies.get(url.scheme) or proxies.get("all")
    if named:
        proxy, login = _parse_proxy(named)
        manager = urllib3.ProxyManager(proxy, proxy_headers=login, **settings)
    else:
        manager = urllib3.PoolManager(**settings)
    manager.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}
    plain = f"{url.scheme}://{netloc}"

    def make_pool() -> urllib3.HTTPConnectionPool:
        manager.clear()
        return manager.connection_from_url(plain)

    make_pool()
    return Route(make_pool, plain if named and url.scheme == "http" else "")


def _parse_proxy(named: str) -> tuple[str, dict[str, str]]:
    """Returns a proxy's URL without a login, and the login as headers."""
    proxy = urllib.parse.urlsplit(named if "://" in named else f"http://{named}")
    if proxy.scheme.lower() != "http":
        raise ValueError(
            f"the environment names a proxy {proxy.scheme}://, and only http:// proxies are spoken to; set another, or "
            "name the server in no_proxy"
        )
    try:
        host, port = proxy.hostname, proxy.port
    except ValueError:
        host = port = None  # the text of the error may be a part of a password
    if not host:
        raise ValueError("the environment names a proxy whose URL has no host or port")
    login = f"{urllib.parse.unquote(proxy.username or '')}:{urllib.parse.unquote(proxy.password or '')}"
    header = {"Proxy-Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"}
    address = f"[{host}]" if ":" in host else host
    return f"http://{address}:{port or 80}", {} if proxy.username is None else header


_Result = TypeVar("_Result")

# Characters of a key that stand in a URL as they are.
PLAIN_CHARACTERS = "/-._~!$&'()*+,;=:@"
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "orbax-t5x"}
# Of connections that broke, while other failures of TLS mean that there is no understanding.
_BROKEN_TLS = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
_TEXT_LENGTH = 200
# A response that is cut is asked for again as well, which urllib3 leaves to its callers (`WebRequest`).
_NO_RETRIES = urllib3.Retry(False, redirect=False)


class WebServer(Server):
    """A web server with bounded answers.

    Attributes:
      client: sends its requests.
    """

    can_list = False

    def __init__(self, base: str, clock: ResponseClock):
        super().__init__(base, clock)
        self.client: WebClient = WebClient(base)

    def request(self, key: str, wanted: BoundedRange, *, is_awaited: bool = False) -> WebRequest:
        target = urllib.parse.quote(key, safe=PLAIN_CHARACTERS)
        attempt = functools.partial(self.client.exchange, target, wanted, read_answer)
        return WebRequest(attempt, self.clock, is_awaited=is_awaited)

    def close_idle(self) -> None:
        self.client.close_idle()


class WebClient:
    """Sender of requests to a web server, each once."""

    def __init__(self, base: str):
        self._route = find_route(base)
        self._pool: urllib3.HTTPConnectionPool | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()

    def exchange(
        self,
        target: str,
        wanted: BoundedRange,
        judge: Callable[[WebResponse, BoundedRange], _Result],
        request: WebRequest,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> _Result:
        """Sends a request once, and returns `judge`'s result."""
        ranges = {} if wanted.is_empty else {"Range": range_header(wanted)}
        response = None
        token = EXCHANGE.set(Exchange(request, wanted.size))
        try:
            if (seconds := request.seconds_left()) <= 0:
                raise TimeoutError("the server is silent")
            received = self._connections().urlopen(
                "HEAD" if wanted.is_empty else "GET",
                f"{self._route.root}/{target}",
                headers={**_HEADERS, **ranges, **(headers or {})},
                retries=_NO_RETRIES,
                redirect=False,
                assert_same_host=False,
                timeout=seconds,
                preload_content=False,
                decode_content=False,
            )
            response = WebResponse(received)
            return judge(response, wanted)
        except CheckpointError:  # some of which are errors of the operating system, too
            raise
        except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError, ValueError) as error:
            reason = _first_cause(error)
            if isinstance(reason, CheckpointError):
                raise reason from None
            raise _plain_error(reason) from reason
        finally:
            EXCHANGE.reset(token)
            request.release()
            if response is not None:
                response.close()

    def close_idle(self) -> None:
        """Closes unused connections."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _connections(self) -> urllib3.HTTPConnectionPool:
        with self._lock:
            if self._process != os.getpid():
                self._process, self._pool = os.getpid(), None  # a forked child must not use those of its parent
            if self._pool is None:
                self._pool = self._route.make_pool()
            return self._pool


def _first_cause(error: BaseException) -> BaseException:
    while inner := next((one for one in error.args if isinstance(one, BaseException)), error.__cause__):
        error = inner
    return error


def _plain_error(reason: BaseException) -> RequestError:
    """Converts a failure of a request or a response."""
    text = f"{type(reason).__name__}: {reason}"[:_TEXT_LENGTH]
    match reason:
        case TimeoutError():
            kind = RequestKind.SILENT
        case socket.gaierror(errno=socket.EAI_NONAME):
            kind = RequestKind.UNREACHABLE
        case ssl.SSLError() if not isinstance(reason, _BROKEN_TLS):
            kind = RequestKind.UNREACHABLE
        case OSError():
            kind = RequestKind.BROKEN
        case http.client.IncompleteRead() | urllib3.exceptions.PoolError():
            kind = RequestKind.PASSING
        case _:
            return RequestError(f"no HTTP: {text}")
    return RequestError(text, kind)


def _plain_url(url: str) -> str:
    """Removes percent-encoding from the URL of a user."""
    split_url(url)
    if "?" in url or "#" in url:
        raise UnsupportedCheckpointError(
            "URLs with a query or a fragment are not read: the names of further files could not be appended", path=url
        )
    return f"{url_scheme(url)}://{urllib.parse.unquote(url.partition('://')[2])}"


WEB = Scheme(_plain_url, split_url, WebServer)
