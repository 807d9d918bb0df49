"""A web server: bounded reads of byte ranges.

They never hold more than was asked for.

TensorStore keeps all that a server sends, however much it is, and goes on after it was cancelled. So http and https are
read by urllib3: every request names its last byte, a response is compared with the request before its body is read, the
body is read up to that byte, and a connection that sent anything else is closed. Requests run in threads.
"""

from __future__ import annotations

import functools
import http.client
import os
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from typing import TypeVar

import urllib3

from orbax_t5x.errors import CheckpointError
from orbax_t5x.extras.web.web_answer import range_header, read_answer
from orbax_t5x.extras.web.web_pool import EXCHANGE, Exchange, find_route
from orbax_t5x.extras.web.web_request import WebRequest
from orbax_t5x.extras.web.web_response import PassingError, WebResponse
from orbax_t5x.files.ranges import BoundedRange
from orbax_t5x.files.remote.transport import ResponseClock

_Result = TypeVar("_Result")

# Characters of a key that stand in a URL as they are.
PLAIN_CHARACTERS = "/-._~!$&'()*+,;=:@"
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "orbax-t5x"}
# Of connections that broke, while other failures of TLS mean that there is no understanding.
_BROKEN_TLS = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
_TEXT_LENGTH = 200
# A response that is cut is asked for again as well, which urllib3 leaves to its callers (`WebRequest`).
_NO_RETRIES = urllib3.Retry(False, redirect=False)


class WebServer:
    """A web server; implements `Transport`."""

    is_bounded: bool = True

    def __init__(self, base: str, clock: ResponseClock):
        """Makes no request."""
        self._clock = clock
        self._route = find_route(base)
        self._pool: urllib3.HTTPConnectionPool | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()

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
        except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError) as error:
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


def _plain_error(reason: BaseException) -> Exception:
    """Converts a failure of a request or a response."""
    text = f"{type(reason).__name__}: {reason}"[:_TEXT_LENGTH]
    if isinstance(reason, ssl.SSLError) and not isinstance(reason, _BROKEN_TLS):
        return ValueError(f"UNKNOWN: {text}")
    if isinstance(reason, socket.gaierror) and reason.errno == socket.EAI_NONAME:
        return ValueError(f"UNKNOWN: {text}")
    if isinstance(reason, (OSError, http.client.IncompleteRead, urllib3.exceptions.PoolError)):
        return PassingError(text, is_silence=isinstance(reason, TimeoutError))
    return ValueError(f"UNKNOWN: no HTTP: {text}")
