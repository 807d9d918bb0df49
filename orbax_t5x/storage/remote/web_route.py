"""Routes to web servers: straight, or by the proxy that the environment names."""

from __future__ import annotations

import base64
import functools
import http.client
import os
import socket
import ssl
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from orbax_t5x.storage.remote.web_answer import range_header
from orbax_t5x.storage.values import BoundedRange

# As for TensorStore; beside it the environment variables of OpenSSL hold.
_CA_BUNDLE = "TENSORSTORE_CA_BUNDLE"
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "orbax-t5x"}


class Route(NamedTuple):
    """Route to a server: what makes a connection, what precedes a path in a request, and headers."""

    connect: Callable[[], socket.socket]
    root: str
    headers: dict[str, str]

    def request(self, target: str, wanted: BoundedRange, headers: Mapping[str, str]) -> bytes:
        """Returns the bytes of a request."""
        ranges = {} if wanted.is_empty else {"Range": range_header(wanted)}
        lines = [f"{name}: {value}\r\n" for name, value in {**self.headers, **ranges, **headers}.items()]
        method = "HEAD" if wanted.is_empty else "GET"
        return f"{method} {self.root}{target} HTTP/1.1\r\n{''.join(lines)}\r\n".encode("latin-1")


def find_route(base: str, timeout: float) -> Route:
    """Returns the route to a server, by the proxy that the environment names for it.

    Raises:
      ValueError: the URL names no server.
    """
    url = urllib.parse.urlsplit(base)
    host, port = url.hostname or "", url.port
    headers = {"Host": url.netloc.encode("idna").decode(), **_HEADERS}
    settings: dict[str, Any] = {"timeout": timeout}
    connection = http.client.HTTPConnection
    if url.scheme == "https":
        connection = http.client.HTTPSConnection
        settings["context"] = ssl.create_default_context(cafile=os.environ.get(_CA_BUNDLE))
    proxies = {} if urllib.request.proxy_bypass(host) else urllib.request.getproxies()
    named = proxies.get(url.scheme) or proxies.get("all")
    if not named:
        return Route(lambda: _connected(connection(host, port, **settings)), "/", headers)
    proxy = urllib.parse.urlsplit(named if "://" in named else f"http://{named}")
    login = {} if proxy.username is None else {"Proxy-Authorization": _basic(proxy.username, proxy.password or "")}
    connect = functools.partial(connection, proxy.hostname or "", proxy.port or 80, **settings)
    if url.scheme == "http":
        return Route(lambda: _connected(connect()), f"{base}/", {**headers, **login})

    def tunnel() -> socket.socket:
        made = connect()
        made.set_tunnel(host, port or 443, login)
        return _connected(made)

    return Route(tunnel, "/", headers)


def _connected(made: http.client.HTTPConnection) -> socket.socket:
    """Connects, and returns the connection's socket, which is its only owner from then on."""
    made.connect()
    return made.sock


def _basic(user: str, password: str) -> str:
    login = f"{urllib.parse.unquote(user)}:{urllib.parse.unquote(password)}"
    return f"Basic {base64.b64encode(login.encode()).decode()}"
