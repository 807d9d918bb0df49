"""Requests to the Hugging Face hub and its other servers.

The hub sends on to these; the token goes to the hub alone.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from orbax_t5x.extras.web.hub import hub_endpoint, hub_token
from orbax_t5x.extras.web.web_answer import PAGE_BYTES
from orbax_t5x.extras.web.web_request import WebRequest
from orbax_t5x.extras.web.web_response import WebResponse
from orbax_t5x.extras.web.web_server import WebServer
from orbax_t5x.files.ranges import BoundedRange
from orbax_t5x.files.remote.transport import ResponseClock

_Result = TypeVar("_Result")

_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 5
_STEPS = (("http", "http"), ("http", "https"), ("https", "https"))
_PORTS = {"http": 80, "https": 443}


class HubResponse(NamedTuple):
    """The response of the hub, or of another server.

    The hub has sent on the request to it.

    Attributes:
      url: that was requested.
      response: to it.
      wanted: the bytes.
    """

    url: str
    response: WebResponse
    wanted: BoundedRange


def _ignore(answer: HubResponse) -> None:
    """Looks at no redirect."""


class HubRequests:
    """Client of a hub.

    Attributes:
      endpoint: URL of the hub.
    """

    def __init__(self, clock: ResponseClock):
        """Makes no request."""
        self.endpoint: str = hub_endpoint()
        self._token = hub_token()
        self._clock = clock
        self._servers: dict[str, WebServer] = {}

    def send(
        self,
        url: str,
        wanted: BoundedRange,
        judge: Callable[[HubResponse], _Result],
        request: WebRequest,
        *,
        see: Callable[[HubResponse], None] = _ignore,
    ) -> _Result:
        """Sends a request once, and follows redirects; like `WebServer.exchange`."""

        def follow(response: WebResponse, wanted: BoundedRange) -> _Result | _Redirect:
            answer = HubResponse(url, response, wanted)
            if response.status not in _REDIRECTS:
                return judge(answer)
            see(answer)
            response.body(PAGE_BYTES)
            return _Redirect(_next_url(url, response.headers.get("location")))

        for _ in range(_MOST_REDIRECTS):
            server, target, headers = self._server(url)
            found = server.exchange(target, wanted, follow, request, headers=headers)
            if not isinstance(found, _Redirect):
                return found
            url = found.url
        raise ValueError(f"UNKNOWN: more than {_MOST_REDIRECTS} redirects")

    def _server(self, url: str) -> tuple[WebServer, str, Mapping[str, str]]:
        """Returns a URL's server, path with query, and headers.

        The headers are for that server alone.
        """
        base = server_of(url)
        if base not in self._servers:
            self._servers[base] = WebServer(base, self._clock)
        is_hub = base == server_of(self.endpoint)
        headers = {"Authorization": f"Bearer {self._token}"} if self._token and is_hub else {}
        parts = urllib.parse.urlsplit(url)
        # As it was sent, but for what no request may hold.
        target = urllib.parse.quote(parts.path.removeprefix("/"), safe="%/-._~!$&'()*+,;=:@")
        query = urllib.parse.quote(parts.query, safe="%/-._~!$&'()*+,;=:@?")
        return self._servers[base], f"{target}?{query}" if query else target, headers

    def close_idle(self) -> None:
        """Closes the connections that no request uses."""
        for server in list(self._servers.values()):
            server.close_idle()


class _Redirect(NamedTuple):
    """A redirect of a server."""

    url: str


def _next_url(url: str, location: str | None) -> str:
    """Returns the URL to which a server sends on.

    It is of the web, and encrypted if the server was.
    """
    target = urllib.parse.urljoin(url, location or "")
    parts = urllib.parse.urlsplit(target)
    schemes = (urllib.parse.urlsplit(url).scheme, parts.scheme)
    if location is None or not parts.hostname or schemes not in _STEPS:
        raise ValueError("UNKNOWN: the hub sends on to no URL of the web")
    return target


def server_of(url: str) -> str:
    """Returns scheme, host and port of a URL."""
    parts = urllib.parse.urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    port = parts.port or _PORTS.get(parts.scheme)
    return f"{parts.scheme}://{host}" if port == _PORTS.get(parts.scheme) else f"{parts.scheme}://{host}:{port}"
