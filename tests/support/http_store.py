"""A web server on the loopback that serves files by ranges, keeps a log, and fails in the ways that servers do.

`HttpStore(directory)` serves a directory; `files` adds or replaces single ones. A `fault` is asked about each request
and says what happens instead of the right answer.
"""

import dataclasses
import email.utils
import functools
import hashlib
import http.server
import re
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


@dataclasses.dataclass(frozen=True)
class Request:
    """One request: its method, its path without the slash at the front, two of its headers, and the client's port."""

    method: str
    name: str
    range: str | None
    authorization: str | None = None
    port: int = dataclasses.field(default=0, compare=False)


Fault = Callable[[Request], str | None]
"""What happens to a request: None for the right answer, or one of the names that `_Handler.fail` knows."""


class HttpStore:
    """A server of files, in threads of its own.

    Attributes:
      files: contents by name, before those of the directory.
      etag: makes the ETag of a file's contents; None for no ETag.
      modified: makes the Last-Modified of a file's contents, or None.
      fault: see `Fault`.
      latency: waited for before each answer, in seconds.
      log: all requests.
      bytes_sent: of all bodies.
    """

    def __init__(self, directory: Path | None = None):
        self.directory = directory
        self.files: dict[str, bytes] = {}
        self.etag: Callable[[bytes], str | None] = lambda data: f'"{digest(data)[:16]}"'
        self.modified: Callable[[bytes], str | None] = lambda data: email.utils.formatdate(0)
        self.fault: Fault = lambda request: None
        self.latency = 0.0
        self.log: list[Request] = []
        self.bytes_sent = 0
        self.stopping = threading.Event()
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._sending = 0
        store = self

        class Handler(_Handler):
            server_store = store

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def url(self) -> str:
        """Of the root."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def contents(self, name: str) -> bytes | None:
        """Of a file, or None."""
        if name in self.files:
            return self.files[name]
        path = self.directory / name if self.directory is not None and name else None
        return path.read_bytes() if path is not None and path.is_file() else None

    def answer_to(self, name: str, query: dict[str, list[str]]) -> bytes | tuple[int, bytes, dict[str, str]] | None:
        """What stands under a name: the contents of a file; status, body and headers of something else; or None."""
        return self.contents(name)

    def accept(
        self, method: str, name: str, query: dict[str, list[str]], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        """The answer to POST, PUT and DELETE; a server that takes nothing, unless a child does."""
        return 405, b"", {}

    def generation(self, data: bytes) -> str | None:
        """The generation of a file's contents, where the protocol has one besides the ETag."""
        return None

    def note(self, request: Request) -> None:
        """Adds to the log."""
        with self._lock:
            self.log.append(request)

    def count(self, size: int) -> None:
        """Adds to the bytes sent."""
        with self._lock:
            self.bytes_sent += size

    def forget(self) -> None:
        """Empties the log and the count."""
        with self._lock:
            self.log.clear()
            self.bytes_sent = 0

    @contextmanager
    def sending(self) -> Iterator[None]:
        """While a hostile answer is sent."""
        with self._changed:
            self._sending += 1
        try:
            yield
        finally:
            with self._changed:
                self._sending -= 1
                self._changed.notify_all()

    def wait_until_closed(self, seconds: float) -> bool:
        """Whether the client closes all connections on which hostile answers are sent."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._sending, seconds)

    def close(self) -> None:
        """Ends all answers and the server."""
        self.stopping.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


# Many requests are for the same file: bytes know their hash, and SHA-256 of a large one takes longer than the answer.
@functools.lru_cache(maxsize=8)
def digest(data: bytes, algorithm: str = "sha256") -> str:
    """Of the contents of a file."""
    return hashlib.new(algorithm, data).hexdigest()


@contextmanager
def serving(directory: Path | None = None) -> Iterator[HttpStore]:
    """A running server."""
    store = HttpStore(directory)
    try:
        yield store
    finally:
        store.close()


class _Server(http.server.ThreadingHTTPServer):
    # Threads that stand still for a fault end with the process, if not before.
    daemon_threads = True
    block_on_close = False
    # A connection that finds no place waits for a second until it is tried again.
    request_queue_size = 1024

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing: clients that give up are what is tested."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_store: HttpStore
    # An answer in two packets would wait for the first one's acknowledgement.
    disable_nagle_algorithm = True
    wbufsize = 1 << 16

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.take()

    def do_PUT(self) -> None:
        self.take()

    def do_DELETE(self) -> None:
        self.take()

    def take(self) -> None:
        store = self.server_store
        url = urllib.parse.urlsplit(self.path)
        name = urllib.parse.unquote(url.path).lstrip("/")
        request = Request(self.command, name, None, self.headers.get("Authorization"))
        store.note(request)
        body = self.body()
        fault = store.fault(request)
        if fault is None or not self.fail(fault, None, request):
            self.send(*store.accept(self.command, name, urllib.parse.parse_qs(url.query), body))

    def body(self) -> bytes:
        """Of the request, of a known length or in chunks."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def answer(self) -> None:
        store = self.server_store
        url = urllib.parse.urlsplit(self.path)
        name = urllib.parse.unquote(url.path).lstrip("/")
        headers = self.headers.get("Range"), self.headers.get("Authorization")
        request = Request(self.command, name, *headers, port=self.client_address[1])
        store.note(request)
        if store.latency:
            store.stopping.wait(store.latency)
        fault = store.fault(request)
        found = store.answer_to(name, urllib.parse.parse_qs(url.query))
        if fault is not None and self.fail(fault, found if isinstance(found, bytes) else None, request):
            return
        if found is None:
            self.send(404, b"<html>not found</html>")
        elif isinstance(found, bytes):
            self.send_file(found, request)
        else:
            self.send(*found)

    def fail(self, fault: str, data: bytes | None, request: Request) -> bool:
        """Makes a failure happen; returns False where the right answer shall be sent after all."""
        if data is None and fault in ("truncated", "shorter", "no content range", "no ranges", "more than announced"):
            return False
        data = data or b""
        if fault == "stall":
            self.server_store.stopping.wait(120)
            self.close_connection = True
        elif fault == "reset":
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif fault in ("401", "403", "404", "429", "500", "503"):
            self.send(int(fault), b"<html>sorry</html>")
        elif fault in ("301", "302"):
            self.send(int(fault), b"", {"Location": "/elsewhere"})
        elif fault == "no ranges":
            self.send(200, data, self.tags(data))
        elif fault == "html":
            self.send(200, b"<html>please log in</html>", self.tags(data))
        elif fault == "html for a range":
            body = b"<html>please log in</html>"
            self.send(206, body, {**self.tags(data), "Content-Range": f"bytes 0-{len(body) - 1}/{len(data)}"})
        elif fault == "206 to every range":
            first, last = map(int, _RANGE.fullmatch(request.range or "bytes=0-0").groups())
            body = bytes(last - first + 1)
            self.send(206, body, {**self.tags(data), "Content-Range": f"bytes {first}-{last}/*"})
        elif fault == "truncated":
            self.send_file(data, request, cut=3)
        elif fault == "shorter":
            self.send_file(data, request, short=3)
        elif fault == "no content range":
            self.send_file(data, request, without_range=True)
        else:
            raise AssertionError(fault)
        return True

    def tags(self, data: bytes) -> dict[str, str]:
        tag, generation = self.server_store.etag(data), self.server_store.generation(data)
        tags = {} if tag is None else {"ETag": tag}
        return tags if generation is None else {**tags, "x-goog-generation": generation}

    def send_file(
        self, data: bytes, request: Request, *, cut: int = 0, short: int = 0, without_range: bool = False
    ) -> None:
        modified = self.server_store.modified(data)
        headers = self.tags(data) | {"Accept-Ranges": "bytes"} | ({"Last-Modified": modified} if modified else {})
        match = _RANGE.fullmatch(request.range or "")
        if match is None:
            self.send(200, data, headers, cut=cut)
            return
        first, last = match.groups()
        start = int(first) if first else max(0, len(data) - int(last))
        stop = min(len(data), int(last) + 1) if first and last else len(data)
        if start >= len(data):
            self.send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            return
        body = data[start : stop - short]
        if not without_range:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        self.send(206, body, headers, cut=cut)

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None, *, cut: int = 0) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            # Before they are sent: whoever has them may ask for the count at once.
            self.server_store.count(len(body) - cut)
            self.wfile.write(body[: len(body) - cut] if cut else body)
        self.wfile.flush()
        if cut:
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
