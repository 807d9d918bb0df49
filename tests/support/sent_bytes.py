"""Responses made of given bytes, of a server that then closes the connection."""

import io
from typing import Any, cast

import urllib3

from orbax_t5x.extras.web.web_response import BoundedResponse, WebResponse
from orbax_t5x.files.ranges import BoundedRange


class _Received(io.RawIOBase):
    def __init__(self, data: bytes, size: int):
        super().__init__()
        self._data = io.BytesIO(data)
        self._size = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        return self._data.readinto(memoryview(buffer)[: self._size])


class SentBytes:
    """The part of a socket that a response is received from; `size` bytes at a time at the most.

    Attributes:
      is_shut: whether the connection was found to be of no further use.
    """

    def __init__(self, data: bytes, size: int = 1 << 20):
        self._received = _Received(data, size)
        self.is_shut = False

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(self._received)

    def settimeout(self, seconds: float) -> None:
        assert seconds > 0

    def shutdown(self, how: int) -> None:
        self.is_shut = True


def received(sent: SentBytes, wanted: BoundedRange, seconds_left: float = 1.0) -> WebResponse:
    """The response that a socket has to a request, as a connection of urllib3 makes it."""
    method = "HEAD" if wanted.is_empty else "GET"
    response = BoundedResponse(cast(Any, sent), lambda: seconds_left, wanted.size, method)
    response.begin()
    made = urllib3.HTTPResponse(
        response,
        headers=urllib3.HTTPHeaderDict(response.headers.items()),
        status=response.status,
        preload_content=False,
        decode_content=False,
        original_response=cast(Any, response),
        request_method=method,
    )
    return WebResponse(made)


def response_of(data: bytes, wanted: BoundedRange, size: int = 1 << 20, seconds_left: float = 1.0) -> WebResponse:
    """The response that some bytes are."""
    return received(SentBytes(data, size), wanted, seconds_left)
