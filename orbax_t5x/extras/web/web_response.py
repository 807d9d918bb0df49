"""Responses of a web server, received with a bound.

They are compared with their requests, and have no more than an answer to the request can have. urllib3 and the standard
library parse them. They would read whatever a server sends, for as long as it sends, so that what they read from holds
a bound and a clock.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import re
import socket
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import urllib3

from orbax_t5x.errors import CheckpointIOError, LimitExceededError
from orbax_t5x.files.ranges import BoundedRange
from orbax_t5x.files.remote.responses import RequestError, RequestKind, Response, Version

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


_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)", re.ASCII)
_MISSING = (404, 410)
_PASSING = (408, 429, 500, 502, 503, 504)
_KINDS = {401: RequestKind.DENIED, 403: RequestKind.DENIED, 416: RequestKind.BEYOND_END}
# A page that explains a refusal is read to its end, so that the connection can be used again; a longer one is not.
PAGE_BYTES = 1 << 16


def range_header(wanted: BoundedRange) -> str:
    """Returns the header that asks for bytes."""
    return f"bytes={wanted.start}" if wanted.start < 0 else f"bytes={wanted.start}-{wanted.start + wanted.size - 1}"


def read_answer(response: WebResponse, wanted: BoundedRange) -> Response | None:
    """Checks a response against its request, then reads its body."""
    status = response.status
    if status not in (200, 206):
        response.body(PAGE_BYTES)
        if status == 416 and wanted.stop is None and wanted.start <= 0:
            return Response(b"", _version(response))
        return refusal(status)
    encoding = response.headers.get("content-encoding", "").lower()
    if encoding not in ("", "identity"):
        raise CheckpointIOError(f"the server compresses its answer (Content-Encoding: {encoding[:40]!r})")
    if wanted.is_empty:
        return Response(b"", _version(response))
    if status == 200:
        data = response.body(wanted.size)
        _check_whole(data, wanted)
        file_bytes = None if data is None else len(data)
    else:
        found = _checked_range(response, wanted)
        size, file_bytes = found.stop - found.start, found.total
        if wanted.stop is None and wanted.start >= 0:
            _check_size(found.known_end - wanted.start, wanted)
        if wanted.into is not None and size == wanted.size and response.fill(wanted.into):
            return Response(b"", _version(response), file_bytes, is_in_place=True)
        data = response.body(size)
        if data is None or len(data) != size:
            raise CheckpointIOError(
                f"the answer has {'more' if data is None else 'fewer'} bytes than the {size} of its Content-Range"
            )
    if wanted.stop is None and wanted.start >= 0:
        _check_size(wanted.size if data is None else len(data), wanted)
    assert data is not None
    return Response(data, _version(response), file_bytes)


def _check_size(size: int, wanted: BoundedRange) -> None:
    """Refuses more bytes than there may be."""
    if size > wanted.most:
        raise LimitExceededError(f"more bytes than the limit of {wanted.most} permits")


def refusal(status: int) -> None:
    """Returns None for a missing file; raises other refusals."""
    if status in _MISSING:
        return
    kind = _KINDS.get(status, RequestKind.OTHER)
    if status in _PASSING or 300 <= status < 400:
        kind = RequestKind.PASSING if status in _PASSING else RequestKind.REDIRECT
    raise RequestError(f"HTTP code {status}", kind)


class ContentRange(NamedTuple):
    """Announced range of bytes, and the file's size or None."""

    start: int
    stop: int
    total: int | None

    @property
    def known_end(self) -> int:
        """The end of the file, as far as the answer names it."""
        return self.stop if self.total is None else self.total


def content_range(response: WebResponse, wanted: BoundedRange) -> ContentRange:
    """Parses the range that a response announces."""
    text = response.headers.get("content-range")
    if text is None:
        if response.headers.get("content-type", "").lower().startswith("multipart/"):
            raise CheckpointIOError("the server answers one range in several parts")
        raise RequestError("Expected Content-Range in an answer with HTTP code 206", RequestKind.IGNORED_RANGE)
    match = _CONTENT_RANGE.fullmatch(text)
    found = match and ContentRange(int(match[1]), int(match[2]) + 1, None if match[3] == "*" else int(match[3]))
    if found is None or not found.start < found.stop <= found.known_end:
        raise _another_range(response, wanted)
    return found


def _checked_range(response: WebResponse, wanted: BoundedRange) -> ContentRange:
    """Returns the announced range, proven to be as requested."""
    found = content_range(response, wanted)
    size = found.stop - found.start
    fits = found.start == wanted.start if wanted.start >= 0 else found.stop == found.known_end
    if not fits or size > wanted.size:
        raise _another_range(response, wanted)
    if size < wanted.size:
        if wanted.start >= 0 and found.stop < found.known_end:
            raise CheckpointIOError(f"the answer has only {size} bytes of {range_header(wanted)}")
        if wanted.stop is not None:
            raise RequestError(f"the file ends at byte {found.stop}", RequestKind.BEYOND_END)
    return found


def _another_range(response: WebResponse, wanted: BoundedRange) -> CheckpointIOError:
    text = response.headers["content-range"][:80]
    return CheckpointIOError(f"the answer has the Content-Range {text!r}, and not the requested {range_header(wanted)}")


def _check_whole(data: bytes | None, wanted: BoundedRange) -> None:
    """Checks the body of an answer with the whole file."""
    if wanted.start > 0 or (data is None and (wanted.start < 0 or wanted.stop is not None)):
        raise RequestError(f"the requested {range_header(wanted)} was ignored by server", RequestKind.IGNORED_RANGE)
    if data is not None and wanted.stop is not None and len(data) < wanted.size:
        raise RequestError(f"the file ends at byte {len(data)}", RequestKind.BEYOND_END)


def _version(response: WebResponse) -> Version:
    tag, modified = response.headers.get("etag", ""), response.headers.get("last-modified", "")
    strong, weak = ("", tag[2:]) if tag.startswith("W/") else (tag, "")
    return Version(strong.encode("latin-1"), weak.encode("latin-1"), modified.encode("latin-1"))
