"""Responses of a web server, received with a bound: no more than an answer to the request can have."""

from __future__ import annotations

import io
import re
import socket
from collections.abc import Callable
from typing import Any

from orbax_t5x.errors import CheckpointIOError
from orbax_t5x.storage.values import BoundedRange

_STATUS_LINE = re.compile(r"HTTP/1\.([01]) ([2-9]\d\d)(?: .*)?", re.ASCII)
_INTERIM = re.compile(r"HTTP/1\.[01] 1\d\d(?: .*)?", re.ASCII)
_FOLD = re.compile(r"\r\n[ \t]+")
_LENGTH = re.compile(r"\d{1,19}", re.ASCII)
_CHUNK_SIZE = re.compile(rb"[ \t]*([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?")
# Received at a time: of headers, and of a body, for which memory is taken before it comes.
_PIECE_BYTES = 1 << 16
_MOST_PIECE_BYTES = 16 << 20
# Of headers, which are fewer in every sound answer; and the most bytes that a byte costs in chunks of one byte.
_HEAD_BYTES = 1 << 18
_LINE_BYTES = 1 << 12
_FRAMING = 8
_MOST_INTERIM = 16
_MOST_TRAILERS = 256


class PassingError(Exception):
    """Error of a request that may succeed when it is sent again; `at_once` on another connection."""

    def __init__(self, text: str, *, at_once: bool = False):
        super().__init__(text)
        self.at_once = at_once


class _NoHttpError(ValueError):
    """Error of an answer that is not of the protocol."""

    def __init__(self, found: str | bytes):
        text = found if isinstance(found, str) else found.decode("latin-1")
        super().__init__(f"UNKNOWN: no HTTP: {text[:80]!r}")


class _Stream(io.RawIOBase):
    """Bytes of the response to one request: of headers, framing and body together only so many."""

    def __init__(self, received: socket.socket, seconds_left: Callable[[], float], left: int):
        super().__init__()
        self._socket = received
        self._seconds_left = seconds_left
        self._left = left
        self._held = bytearray()

    @property
    def is_empty(self) -> bool:
        """True unless more was received than was read."""
        return not self._held

    def _wait_at_most(self) -> int:
        """Sets how long the next bytes are waited for; returns how many of them there may be."""
        if not self._left:
            raise CheckpointIOError("the server sends more than an answer to the request can have")
        if (seconds := self._seconds_left()) <= 0:
            raise TimeoutError("the server is silent")
        self._socket.settimeout(seconds)
        return self._left

    def _receive(self, most: int) -> bytes:
        """Receives some bytes; none at the end."""
        data = self._socket.recv(min(most, self._wait_at_most()))
        self._left -= len(data)
        return data

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Reads some bytes into memory; none at the end."""
        if self._held:
            count = min(len(buffer), len(self._held))
            buffer[:count] = self._held[:count]
            del self._held[:count]
        else:
            count = self._socket.recv_into(buffer, min(len(buffer), self._wait_at_most()))
            self._left -= count
        return count

    def until(self, mark: bytes, most: int) -> bytes:
        """Reads to a mark, which is not returned."""
        searched = 0
        while (end := self._held.find(mark, searched)) < 0:
            if len(self._held) > most:
                raise _NoHttpError(bytes(self._held[:80]))
            searched = max(0, len(self._held) - len(mark) + 1)
            data = self._receive(_PIECE_BYTES)
            if not data:
                raise ConnectionResetError("the server closed the connection before its answer ended")
            self._held += data
        found = bytes(self._held[:end])
        del self._held[: end + len(mark)]
        return found

    def take(self, size: int) -> bytes:
        """Reads some bytes; fewer where the server sends no more."""
        parts = self._parts(size)
        return b"".join(parts) if len(parts) > 1 else parts[0]

    def read_to_end(self, most: int) -> bytes | None:
        """Reads all that the server sends; None for more than `most` bytes."""
        parts = self._parts(most + 1)
        return None if sum(map(len, parts)) > most else b"".join(parts)

    def fill(self, into: memoryview) -> int:
        """Reads into memory until it is full, or the server sends no more; returns the number of bytes."""
        done = 0
        while done < len(into) and (count := self.readinto(into[done:])):
            done += count
        return done

    def _parts(self, size: int) -> list[bytes]:
        parts: list[bytes] = []
        while not parts or (size and len(parts[-1]) == _MOST_PIECE_BYTES):
            reader = io.BufferedReader(self, 1)  # receives into the memory of the bytes that it returns
            parts.append(reader.read(min(size, _MOST_PIECE_BYTES)))
            reader.detach()
            size -= len(parts[-1])
        return parts


class WebResponse:
    """The response to one request.

    Attributes:
      status: its number.
      headers: by their names in lower case.
    """

    def __init__(self, received: socket.socket, seconds_left: Callable[[], float], wanted: BoundedRange):
        """Receives the head.

        Args:
          received: the connection; only this response is received from it.
          seconds_left: returns how long the server may still be silent.
          wanted: the bytes that were requested; none for a request without a body in its response.

        Raises:
          OSError: the connection broke.
          ValueError: it is no HTTP.
        """
        self._stream = _Stream(received, seconds_left, _HEAD_BYTES + _FRAMING * wanted.size)
        first, *lines = self._head()
        for _ in range(_MOST_INTERIM):
            if not _INTERIM.fullmatch(first):
                break
            first, *lines = self._head()  # what came before only says that the response will come
        match = _STATUS_LINE.fullmatch(first)
        if match is None:
            raise _NoHttpError(first)
        self.status: int = int(match[2])
        self.headers: dict[str, str] = _headers(lines)
        self._is_chunked = "transfer-encoding" in self.headers
        self._length = None if self._is_chunked else _length(self.headers)
        if wanted.is_empty or self.status in (204, 304):
            self._is_chunked, self._length = False, 0
        is_closed = match[1] == "0" or "close" in self.headers.get("connection", "").lower()
        self._is_kept = not is_closed and (self._is_chunked or self._length is not None)
        self._is_ended = self._length == 0

    def _head(self) -> list[str]:
        return _FOLD.sub(" ", self._stream.until(b"\r\n\r\n", _HEAD_BYTES).decode("latin-1")).split("\r\n")

    @property
    def leaves_connection(self) -> bool:
        """True once the response has ended as it announced, and the connection may be used again."""
        return self._is_ended and self._is_kept and self._stream.is_empty

    def body(self, most: int) -> bytes | None:
        """Reads the body; None for one of more bytes, of which no more than that are read.

        Raises:
          PassingError: it was cut.
          OSError: the connection broke.
          ValueError: it is no HTTP.
        """
        if self._is_chunked:
            data = self._chunks(most)
        elif self._length is not None:
            if self._length > most:
                return None
            data = self._stream.take(self._length)
            if len(data) < self._length:
                raise _cut(len(data), self._length)
        else:
            data = self._stream.read_to_end(most)
        self._is_ended = data is not None
        return data

    def fill(self, into: memoryview) -> bool:
        """Reads the body into memory of its size; False where it is not announced to have that: nothing is read then.

        Raises:
          PassingError: it was cut.
          OSError: the connection broke.
        """
        if self._is_chunked or self._length != len(into):
            return False
        if (count := self._stream.fill(into)) < len(into):
            raise _cut(count, len(into))
        self._is_ended = True
        return True

    def _chunks(self, most: int) -> bytes | None:
        if self.headers["transfer-encoding"].lower() != "chunked":
            raise _NoHttpError(f"Transfer-Encoding: {self.headers['transfer-encoding']}")
        found = bytearray()
        while True:
            line = self._stream.until(b"\r\n", _LINE_BYTES)
            match = _CHUNK_SIZE.fullmatch(line)
            if match is None:
                raise _NoHttpError(line)
            size = int(match[1], 16)
            if not size:
                break
            if len(found) + size > most:
                return None
            found += self._stream.take(size)
            if self._stream.until(b"\r\n", _LINE_BYTES):
                raise _NoHttpError("a chunk is longer than its size")
        for _ in range(_MOST_TRAILERS):
            if not self._stream.until(b"\r\n", _LINE_BYTES):
                return bytes(found)
        raise _NoHttpError("trailers without end")


def _cut(count: int, size: int) -> PassingError:
    return PassingError(f"the answer ended after {count} of {size} bytes")


def _headers(lines: list[str]) -> dict[str, str]:
    """Parses headers; the values of one that is repeated are joined."""
    found: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or name != name.strip():
            raise _NoHttpError(line)
        value = value.strip()
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found


def _length(headers: dict[str, str]) -> int | None:
    text = headers.get("content-length")
    if text is None:
        return None
    if not _LENGTH.fullmatch(text):
        raise _NoHttpError(f"Content-Length: {text}")
    return int(text)
