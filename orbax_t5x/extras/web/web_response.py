"""Responses of a web server, received with a bound.

They have no more than an answer to the request can have. urllib3 and the standard library parse them. They would read
whatever a server sends, for as long as it sends, so that what they read from holds a bound and a clock.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
from collections.abc import Callable
from typing import Any, cast

import urllib3

from orbax_t5x.errors import CheckpointIOError
from orbax_t5x.files.remote.responses import RequestError, RequestKind

# A body is received in parts, for each of which memory is taken before it comes; or in smaller ones into given memory.
_PART_BYTES = 16 << 20
_FILLED_BYTES = 1 << 18
# Of headers, which are fewer in every sound answer; and the most bytes that a byte costs in chunks of one byte.
_HEAD_BYTES = 1 << 18
_FRAMING = 8


class _Input(io.RawIOBase):
    """Bytes of a connection, bounded in number and time."""

    def __init__(self, received: io.RawIOBase, used: socket.socket, seconds_left: Callable[[], float]):
        super().__init__()
        self._received = received
        self._socket = used
        self._seconds_left = seconds_left
        self.left = _HEAD_BYTES
        self.is_ended = self.was_closed = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        """Reads some bytes into memory."""
        if self.is_ended:
            return 0
        if not self.left:
            raise CheckpointIOError("the server sends more than an answer to the request can have")
        if (seconds := self._seconds_left()) <= 0:
            raise TimeoutError("the server is silent")
        self._socket.settimeout(seconds)
        count = self._received.readinto(memoryview(buffer)[: self.left])  # pyright: ignore[reportAttributeAccessIssue]
        self.left -= count or 0
        self.was_closed = not count
        return count

    def readall(self) -> bytes:
        """Refuses reads without a bound.

        A chunk of negative size leads to them.
        """
        raise http.client.HTTPException("a chunk of negative size")

    def shut_down(self) -> None:
        """Ends the connection, and so wakes its owner."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._received.close()
        super().close()


class _BufferedInput(io.BufferedReader):
    """Input by lines and bytes.

    A connection with more than its response had is not used again.
    """

    def __init__(self, received: _Input):
        super().__init__(received)
        self._input = received

    def close(self) -> None:
        if not self.closed:
            self._input.is_ended = True
            if self.peek(1):
                self._input.shut_down()
        super().close()


class BoundedResponse(http.client.HTTPResponse):
    """Response of the standard library, with a bound and a clock."""

    def __init__(self, used: socket.socket, seconds_left: Callable[[], float], size: int, method: str | None = None):
        """Makes it from a connection, for a body of `size` bytes."""
        super().__init__(used, method=method)
        self._input = _Input(cast(Any, self.fp).detach(), used, seconds_left)
        self.fp = _BufferedInput(self._input)
        self._body_bytes = _FRAMING * size

    def begin(self) -> None:
        """Receives the head; from then on a body may come."""
        super().begin()
        if self._input.was_closed:  # which the standard library takes for the end of the headers
            raise http.client.RemoteDisconnected("the server closed the connection before its answer ended")
        self._input.left += self._body_bytes

    def read(self, amt: int | None = None) -> bytes:
        """Reads bytes of the body, as the standard library does."""
        data = super().read(amt)
        if self.chunked and self._input.was_closed:  # which it takes for the end of the last chunk's line
            raise http.client.IncompleteRead(data)
        return data


class WebResponse:
    """The response to a request, with its head received.

    Attributes:
      status: its number.
      headers: by their names, in any case.
    """

    def __init__(self, received: urllib3.BaseHTTPResponse):
        """Wraps a response of urllib3, which decodes nothing."""
        self._received = received
        self.status: int = received.status
        self.headers = received.headers
        if received.length_remaining == 0:
            received.read(1)  # its end leaves the connection to others

    def body(self, most: int) -> bytes | None:
        """Reads the body, or returns None."""
        encoding = self.headers.get("transfer-encoding", "chunked")
        if encoding.lower() != "chunked":
            raise RequestError(f"no HTTP: Transfer-Encoding: {encoding[:80]!r}")
        length = self._received.length_remaining
        if length is not None and length > most:
            return None
        parts: list[bytes] = []
        left = most + 1 if length is None else length
        # Reading on at the end of it leaves the connection to others.
        while part := self._received.read(min(max(left, 1), _PART_BYTES)):
            parts.append(part)
            left -= len(part)
            if left <= 0:
                break
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        return None if len(data) > most else data

    def fill(self, into: memoryview) -> bool:
        """Fills memory with the body; False if sizes differ."""
        if self._received.length_remaining != len(into):
            return False
        done = 0
        while done < len(into):
            part = self._received.read(min(len(into) - done, _FILLED_BYTES))
            if not part:
                raise RequestError(f"the answer ended after {done} of {len(into)} bytes", RequestKind.PASSING)
            into[done : done + len(part)] = part
            done += len(part)
        return True

    def close(self) -> None:
        """Closes the connection, unless it was left to other users."""
        self._received.close()
        self._received.release_conn()
