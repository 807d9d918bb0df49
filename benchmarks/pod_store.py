"""Loopback stores that count what each process of a job asks for, by HTTP and by Amazon's protocol.

A request belongs to the process that holds the other end of its connection, which the kernel tells. Stores may wait
before each answer, and answer at most so many requests a second.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.amazon_store import ENVIRONMENT
from tests.support.http_store import HttpStore, Request


@dataclasses.dataclass
class CountedRequest:
    """One request: when it came, from which process, and how many bytes its answer had."""

    at: float
    process: int
    method: str
    name: str
    range: str | None
    nbytes: int = 0


class RequestLog:
    """Log of requests, which waits for each as long as a far store would.

    Attributes:
      requests: all that came.
      delay: seconds before each answer.
      rate: answers in a second; 0 for no limit.
    """

    def __init__(self) -> None:
        self.requests: list[CountedRequest] = []
        self.delay = 0.0
        self.rate = 0.0
        self._next = 0.0
        self._lock = threading.Lock()
        self._thread = threading.local()  # one serves each connection
        self._processes: set[int] = set()

    def note(self, method: str, name: str, range: str | None, ports: tuple[int, int]) -> None:
        """Adds a request on a connection of two ports of the loopback, and waits until it may be answered.

        Args:
          method, name, range: of the request.
          ports: of the client and of the server.
        """
        at = time.monotonic()
        if getattr(self._thread, "ports", None) != ports:
            self._thread.ports = ports
            self._thread.process = _process_of(ports, set(self._processes))
            self._processes.add(self._thread.process)
        found = self._thread.found = CountedRequest(at, self._thread.process, method, name, range)
        with self._lock:
            self.requests.append(found)
            self._next = max(self._next, found.at) + (1 / self.rate if self.rate else 0.0)
            until = (self._next if self.rate else found.at) + self.delay
        time.sleep(max(0.0, until - time.monotonic()))

    def count(self, nbytes: int) -> None:
        """Adds to the bytes of the answer of this thread's request."""
        self._thread.found.nbytes += nbytes

    def of(self, process: int, begin: float, end: float) -> Iterator[CountedRequest]:
        """Yields the requests of a process within some time."""
        return (one for one in self.requests if one.process == process and begin <= one.at < end)


class CountingStore(HttpStore):
    """A web server of files that counts by process."""

    def __init__(self, directory: Path):
        super().__init__(directory)
        self.requests = RequestLog()

    def note(self, request: Request) -> None:
        """Adds to the log."""
        ports = (request.port, self._server.server_address[1])
        self.requests.note(request.method, request.name, request.range, ports)

    def count(self, size: int) -> None:
        """Adds to the bytes of an answer."""
        self.requests.count(size)


@contextmanager
def counting_http(directory: Path) -> Generator[tuple[str, RequestLog]]:
    """Serves a directory; yields the URL and the log."""
    store = CountingStore(directory)
    tags: dict[int, str] = {}
    store.files = {str(path.relative_to(directory)): path.read_bytes() for path in _files(directory)}
    tags = {id(data): f'"{number}"' for number, data in enumerate(store.files.values())}
    store.etag = lambda data: tags[id(data)]
    try:
        yield store.url, store.requests
    finally:
        store.close()


@contextmanager
def counting_s3(directory: Path) -> Generator[tuple[str, RequestLog]]:
    """Serves a directory as a bucket of moto, whose environment this process and those that it starts then have."""
    import boto3
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    log, backend = RequestLog(), DomainDispatcherApplication(create_backend_app)

    def counted(environment: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        ports = int(environment["REMOTE_PORT"]), server.server_port
        query = f"?{environment['QUERY_STRING']}" if environment.get("QUERY_STRING") else ""
        method = environment["REQUEST_METHOD"]
        log.note(method, environment["PATH_INFO"] + query, environment.get("HTTP_RANGE"), ports)
        for data in backend(environment, start_response):
            log.count(0 if method == "HEAD" else len(data))
            yield data

    server = make_server("127.0.0.1", 0, counted, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        client = boto3.client(
            "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="key", aws_secret_access_key="secret"
        )
        client.create_bucket(Bucket="bucket")
        for path in _files(directory):
            client.put_object(Bucket="bucket", Key=str(path.relative_to(directory)), Body=path.read_bytes())
        with mock.patch.dict(os.environ, {**ENVIRONMENT, "AWS_ENDPOINT_URL": url}):
            yield "s3://bucket", log
    finally:
        server.shutdown()
        thread.join()


@contextmanager
def counting_local(directory: Path) -> Generator[tuple[str, RequestLog]]:
    """Yields a directory, and a log for what processes count of it themselves (`LocalReads`)."""
    yield str(directory), RequestLog()


class LocalReads:
    """Counter of what this process takes from the files below a directory.

    Attributes:
      taken: method, bytes and time of each: "open" of a file or directory, and "read".
    """

    _READS, _BYTES = "/tensorstore/kvstore/file/read", "/tensorstore/kvstore/file/bytes_read"

    def __init__(self, root: str):
        self.taken: list[tuple[str, int, float]] = []
        self._native = self._native_reads()
        preadv = os.preadv

        def counted(fd: int, *given: Any) -> int:
            nbytes = preadv(fd, *given)
            if os.readlink(f"/proc/self/fd/{fd}").startswith(root):
                self._add("read", nbytes)
            return nbytes

        def hear(event: str, given: tuple[Any, ...]) -> None:
            if event in ("open", "os.scandir", "os.listdir") and str(given[0]).startswith(root):
                self._add("open", 0)

        os.preadv = counted
        sys.addaudithook(hear)

    def _add(self, method: str, nbytes: int) -> None:
        self.taken.append((method, nbytes, time.monotonic()))

    def _native_reads(self) -> list[int]:
        import tensorstore as ts

        found = {one["name"]: one["values"] for one in ts.experimental_collect_matching_metrics(self._READS[:-5])}
        return [found[name][0]["value"] if name in found else 0 for name in (self._READS, self._BYTES)]

    def note_native(self) -> None:
        """Adds what TensorStore has read since the last call."""
        before, self._native = self._native, self._native_reads()
        requests, nbytes = (now - then for now, then in zip(self._native, before, strict=True))
        for number in range(requests):
            self._add("read", nbytes if not number else 0)


def _files(directory: Path) -> Iterable[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file())


def _process_of(ports: tuple[int, int], first: set[int]) -> int:
    """Returns the process at the other end of a connection, 0 for none; those in `first` are tried first."""
    wanted = [f"0100007F:{port:04X}" for port in ports]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1:3] == wanted:
            socket = f"socket:[{fields[9]}]"
            others = (int(name) for name in os.listdir("/proc") if name.isdecimal())
            return next((process for process in (*first, *others) if socket in _open_files(process)), 0)
    return 0


def _open_files(process: int) -> Iterator[str]:
    folder = f"/proc/{process}/fd"
    try:
        for name in os.listdir(folder):
            try:
                yield os.readlink(f"{folder}/{name}")
            except OSError:  # closed meanwhile
                continue
    except OSError:  # ended, or another user's
        return
