"""Connections to a web server by urllib3, straight or by proxy.

The environment names the proxy.
"""

from __future__ import annotations

import base64
import os
import socket
import ssl
import urllib.parse
import urllib.request
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, cast

import urllib3
import urllib3.connection

from orbax_t5x.extras.web.web_response import BoundedResponse
from orbax_t5x.files.ranges import REQUESTS_AT_ONCE

# As for TensorStore; beside it the environment variables of OpenSSL hold.
_CA_BUNDLE = "TENSORSTORE_CA_BUNDLE"


class Exchanging(Protocol):
    """A request under way."""

    def seconds_left(self) -> float:
        """Returns the seconds for which the server may still be silent."""
        ...

    def connect(self, connect: Callable[[], None], close: Callable[[], None]) -> None:
        """Connects.

        `close` undoes it if it comes too late.
        """
        ...

    def hold(self, used: socket.socket) -> None:
        """Records the socket."""
        ...


class Exchange(NamedTuple):
    """A request under way, and the size of its answer."""

    request: Exchanging
    size: int


EXCHANGE: ContextVar[Exchange] = ContextVar("orbax_t5x_exchange")
"""Of this thread; urllib3 hands nothing of a caller's to a connection."""


class _BoundedConnection(urllib3.connection.HTTPConnection):
    """Connection with bounded responses and a reachable socket.

    Another thread can shut it down.
    """

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
    """Route to a server: maker of pools and prefix of paths.

    The prefix precedes a path in a request.
    """

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
