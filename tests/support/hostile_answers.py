"""Answers of a web server that wants to do harm: without end, larger than asked for, compressed, or of other bytes.

`KINDS` has each by name, for `HttpStore.fault`. Answers without end go on until the client closes the connection.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterator
from typing import Any

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_BLOCK = bytes(1 << 16)
_BOMB = gzip.compress(bytes(32 << 20), 9)


def _head(handler: Any, size: int, *lines: str) -> bytes:
    """The first lines of an answer that has the range asked for, as the request wants it."""
    match = _RANGE.fullmatch(handler.headers.get("Range") or "")
    status = "HTTP/1.1 200 OK"
    if match is not None:
        first = int(match[1]) if match[1] else max(0, size - int(match[2]))
        last = min(size - 1, int(match[2])) if match[1] and match[2] else size - 1
        status = (
            f"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {first}-{max(first, last)}/{max(size, first + 1)}"
        )
    return ("\r\n".join([status, *lines]) + "\r\n").encode()


def _repeated(block: bytes) -> Iterator[bytes]:
    while True:
        yield block


def _until_closed(*lines: str, block: bytes = _BLOCK) -> Callable[[Any, bytes], Iterator[bytes]]:
    def answer(handler: Any, data: bytes) -> Iterator[bytes]:
        yield _head(handler, len(data), *lines) + b"\r\n"
        yield from _repeated(block)

    return answer


def _once(*lines: str, body: bytes) -> Callable[[Any, bytes], Iterator[bytes]]:
    def answer(handler: Any, data: bytes) -> Iterator[bytes]:
        yield _head(handler, len(data), *lines, f"Content-Length: {len(body)}") + b"\r\n"
        yield body

    return answer


def _plain(status: str, *lines: str, block: bytes = _BLOCK) -> Callable[[Any, bytes], Iterator[bytes]]:
    def answer(handler: Any, data: bytes) -> Iterator[bytes]:
        yield ("\r\n".join([f"HTTP/1.1 {status}", *lines]) + "\r\n\r\n").encode()
        yield from _repeated(block)

    return answer


def _endless_head(first: bytes, block: bytes) -> Callable[[Any, bytes], Iterator[bytes]]:
    def answer(handler: Any, data: bytes) -> Iterator[bytes]:
        yield first
        yield from _repeated(block)

    return answer


def _endless_trailer(handler: Any, data: bytes) -> Iterator[bytes]:
    yield _head(handler, len(data), "Transfer-Encoding: chunked") + b"\r\n0\r\n"
    yield from _repeated(b"x: y\r\n" * 1000)


def _more_than_announced(handler: Any, data: bytes) -> Iterator[bytes]:
    match = _RANGE.fullmatch(handler.headers.get("Range") or "")
    if match is None or not match[1]:
        yield _head(handler, len(data), f"Content-Length: {len(data)}") + b"\r\n"
    elif int(match[1]) >= len(data):
        yield b"HTTP/1.1 416 Range Not Satisfiable\r\nContent-Length: 0\r\n\r\n"
    else:
        body = data[int(match[1]) : int(match[2]) + 1]
        yield _head(handler, len(data), f"Content-Length: {len(body)}") + b"\r\n" + body
    yield from _repeated(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n" * 100)


_CHUNKED = "Transfer-Encoding: chunked"
KINDS: dict[str, Callable[[Any, bytes], Iterator[bytes]]] = {
    "no length and no end": _until_closed(),
    "chunks without end": _until_closed(_CHUNKED, block=b"10000\r\n" + _BLOCK + b"\r\n"),
    "chunks of negative size": _until_closed(_CHUNKED, block=b"-1\r\n" + _BLOCK),
    "a chunk of 2^63 bytes": _until_closed(_CHUNKED, block=b"8000000000000000\r\n" + _BLOCK),
    "a length of a terabyte": _until_closed("Content-Length: 1099511627776"),
    "a negative length": _until_closed("Content-Length: -1"),
    "two lengths": _until_closed("Content-Length: 5", "Content-Length: 1099511627776"),
    "the whole file without end": _plain("200 OK"),
    "the whole file of a terabyte": _plain("200 OK", "Content-Length: 1099511627776"),
    "a page without end": _plain("404 Not Found"),
    "a refusal without end": _plain("403 Forbidden", _CHUNKED, block=b"10000\r\n" + _BLOCK + b"\r\n"),
    "a failure without end": _plain("501 Not Implemented"),
    "no range here, without end": _plain("416 Range Not Satisfiable"),
    "a redirect without end": _plain("301 Moved", "Location: /elsewhere"),
    "nothing, without end": _plain("204 No Content"),
    "headers without end": _endless_head(b"HTTP/1.1 200 OK\r\n", b"x: y\r\n" * 1000),
    "a line without end": _endless_head(b"HTTP/1.1 200 OK\r\nx: ", _BLOCK.replace(b"\0", b"x")),
    "no HTTP": _endless_head(b"", _BLOCK),
    "always to be continued": _endless_head(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "a trailer without end": _endless_trailer,
    "a gzip bomb": _once("Content-Encoding: gzip", body=_BOMB),
    "deflated": _once("Content-Encoding: deflate", body=b"x"),
    "brotli": _once("Content-Encoding: br", body=b"x"),
    "several parts": lambda handler, data: iter(
        [b"HTTP/1.1 206 OK\r\nContent-Type: multipart/byteranges; boundary=x\r\nContent-Length: 3\r\n\r\n--x"]
    ),
    "a range of another place": lambda handler, data: iter(
        [b"HTTP/1.1 206 OK\r\nContent-Range: bytes 7-9/10\r\nContent-Length: 3\r\n\r\nabc"]
    ),
    "a range that is none": lambda handler, data: iter(
        [b"HTTP/1.1 206 OK\r\nContent-Range: bytes 9-7/" + b"9" * 5000 + b"\r\nContent-Length: 3\r\n\r\nabc"]
    ),
    "a body longer than its range": _once(body=bytes(8 << 20)),
    "an empty body": _once(body=b""),
    "more than announced": _more_than_announced,
}
"""By name: what makes the bytes of an answer, of the handler of a request and the contents of the file."""


def send(handler: Any, kind: str, data: bytes) -> None:
    """Sends an answer until it has ended, or until the client has closed the connection."""
    store = handler.server_store
    handler.close_connection = True
    with store.sending():
        try:
            for block in KINDS[kind](handler, data):
                handler.connection.sendall(block)
                if store.stopping.is_set():
                    return
        except OSError:
            return
