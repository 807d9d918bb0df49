"""Files of one commit on the Hugging Face hub, read by byte range where the hub keeps them.

The hub answers a request for a file with the bytes, or sends on to the server that holds them, under a URL that is
valid for some minutes. The token goes to the hub alone, and that URL into no message. What is read belongs to one
commit: a server that then answers with another ETag or another size gives other bytes.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import os
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from orbax_t5x.errors import CheckpointError, CheckpointGoneError, CheckpointIOError
from orbax_t5x.storage.remote.hub import HubPath, hub_api, hub_endpoint, hub_token, parse_hub_path

_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)
_REDIRECTS = (301, 302, 303, 307, 308)
_PASSING = (408, 429, 500, 502, 503, 504)
_DENIED = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED"}
_MOST_REDIRECTS = 5
_REQUESTS_AT_ONCE = 64
_ATTEMPTS = 5
_FIRST_DELAY_SECS = 0.1


class Stamp(NamedTuple):
    """Part of a `HubAnswer`, as TensorStore's results have it; nothing is compared by it."""

    generation: bytes = b""


class HubAnswer(NamedTuple):
    """Result of a read, as TensorStore's: `state` is "value" or "missing"."""

    state: str
    value: bytes = b""
    stamp: Stamp = Stamp()


class _TransientError(Exception):
    """Failure that another attempt may not have."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Returns redirects as they are."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class Commit(NamedTuple):
    """A commit of a repository, and the sizes of its files by name; a size may be unknown."""

    revision: str
    sizes: Mapping[str, int | None]


# Of the commits that were found, by hub and URL; a commit never changes.
_COMMITS: dict[tuple[str, str], Commit] = {}
_MOST_COMMITS = 64


def find_commit(wanted: HubPath) -> Commit:
    """Asks the hub for the commit of a revision; raises whatever `huggingface_hub` raises."""
    found = hub_api().model_info(wanted.repository, revision=wanted.revision, files_metadata=True)
    sizes = {file.rfilename: file.size if type(file.size) is int else None for file in found.siblings or ()}
    if not isinstance(found.sha, str) or not re.fullmatch(r"[0-9A-Za-z]{1,64}", found.sha):
        raise ValueError("the hub names no commit")
    if len(_COMMITS) >= _MOST_COMMITS:
        _COMMITS.clear()
    return _COMMITS.setdefault((hub_endpoint(), f"hf://{wanted.repository}@{found.sha}"), Commit(found.sha, sizes))


class HubFiles:
    """The files of a commit; reads and lists like a key-value store of TensorStore."""

    def __init__(self, base: str, timeout: float):
        """Holds `hf://org/name@commit`, and the seconds for which a server may be silent."""
        self._wanted = parse_hub_path(base)
        self._timeout = timeout
        self._endpoint = hub_endpoint()
        self._commit = _COMMITS.get((self._endpoint, base)) or find_commit(self._wanted)
        self._sizes = dict(self._commit.sizes)
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._lock = threading.Lock()
        self._locations: dict[str, str] = {}
        self._tags: dict[tuple[str, str], str] = {}

    def list(self, keys: Any = None) -> concurrent.futures.Future[list[bytes]]:
        """Lists the names in a range of keys."""
        names = sorted(name.encode() for name in self._sizes)
        if keys is not None:
            first, stop = bytes(keys.inclusive_min), bytes(keys.exclusive_max)
            names = [name for name in names if first <= name and (not stop or name < stop)]
        return _done(names)

    def read(self, key: str, *, byte_range: slice) -> concurrent.futures.Future[HubAnswer]:
        """Begins to read bytes of a file; what the list of files answers needs no request."""
        start, stop = int(byte_range.start), byte_range.stop
        if key not in self._sizes:
            return _done(HubAnswer("missing"))
        if start == stop:
            return _done(HubAnswer("value"))
        size = self._sizes[key]
        if size is not None:
            start = max(0, size + start) if start < 0 else start
            if (stop is not None and stop > size) or start > size:
                return _failed(ValueError(f"OUT_OF_RANGE: the file ends at byte {size}"))
            if start == size:
                return _done(HubAnswer("value"))
        return _request_pool().submit(self._read, key, start, size if stop is None else stop)

    def takes_ranges(self, key: str) -> bool:
        """Reports whether the hub answers a request for one byte with that byte; blocks."""
        try:
            return len(self._read(key, 0, 1).value) == 1
        except (CheckpointError, ValueError):
            return False

    def _read(self, key: str, start: int, stop: int | None) -> HubAnswer:
        delay = _FIRST_DELAY_SECS
        for attempt in range(_ATTEMPTS):
            try:
                return self._attempt(key, start, stop)
            except _TransientError as error:
                if attempt + 1 == _ATTEMPTS:
                    raise ValueError(f"UNAVAILABLE: {error}") from None
                time.sleep(delay)
                delay *= 2
        raise AssertionError

    def _attempt(self, key: str, start: int, stop: int | None) -> HubAnswer:
        """Sends a request, from where the file was last found; follows redirects."""
        with self._lock:
            found = self._locations.get(key)
        url = found or self._url(key)
        span = f"bytes={start}-{'' if stop is None else stop - 1}" if start >= 0 else f"bytes={start}"
        for _ in range(_MOST_REDIRECTS):
            with self._send(url, span) as response:
                if response.status in _REDIRECTS:
                    self._compare(key, url, response.headers)
                    url = self._next(url, response.headers.get("Location"))
                    continue
                if response.status == 206:
                    self._compare(key, url, response.headers)
                    answer = self._answer(key, start, stop, response)
                    with self._lock:
                        self._locations[key] = url
                    return answer
                if found is not None and response.status in (400, 401, 403, 404, 410):
                    # The URL's time is over; the hub is asked for a new one.
                    with self._lock:
                        self._locations.pop(key, None)
                    raise _TransientError(f"HTTP code {response.status}")
                return self._refused(response.status)
        raise ValueError(f"UNKNOWN: more than {_MOST_REDIRECTS} redirects")

    def _url(self, key: str) -> str:
        path = f"{self._wanted.repository}/resolve/{self._commit.revision}/{urllib.parse.quote(key)}"
        return f"{self._endpoint}/{path}"

    def _send(self, url: str, span: str) -> http.client.HTTPResponse:
        headers = {"Range": span, "Accept-Encoding": "identity", "User-Agent": "orbax-t5x"}
        token = hub_token()
        if token and _server(url) == _server(self._endpoint):
            headers["Authorization"] = f"Bearer {token}"
        try:
            return self._opener.open(urllib.request.Request(url, headers=headers), timeout=self._timeout)
        except urllib.error.HTTPError as response:
            return cast(http.client.HTTPResponse, response)
        except (OSError, http.client.HTTPException) as error:
            raise _TransientError(type(error).__name__) from None

    def _next(self, url: str, location: str | None) -> str:
        """Returns the URL to which a server sends on, of the web, and encrypted where the server was."""
        target = urllib.parse.urljoin(url, location or "")
        schemes = (urllib.parse.urlsplit(url).scheme, urllib.parse.urlsplit(target).scheme)
        if location is None or schemes not in (("http", "http"), ("http", "https"), ("https", "https")):
            raise ValueError("UNKNOWN: the hub sends on to no URL of the web")
        return target

    def _compare(self, key: str, url: str, headers: Any) -> None:
        """Compares what a server says about a file with what it and the hub said before.

        Raises:
          CheckpointGoneError: it is another.
        """
        commit = headers.get("X-Repo-Commit")
        if commit is not None and commit != self._commit.revision:
            raise CheckpointGoneError("the hub answers with a file of another commit")
        for name in ("X-Linked-Etag", "ETag"):
            tag = headers.get(name)
            if tag and not tag.startswith("W/") and self._tags.setdefault((key, name + _server(url)), tag) != tag:
                raise CheckpointGoneError("changed after the checkpoint was opened: its ETag is another")

    def _answer(self, key: str, start: int, stop: int | None, response: http.client.HTTPResponse) -> HubAnswer:
        """Reads a body that was proven to be of the requested bytes; no more than these are read."""
        text = response.headers.get("Content-Range") or ""
        match = _CONTENT_RANGE.fullmatch(text.strip())
        if match is None or response.headers.get("Content-Encoding", "identity") != "identity":
            raise CheckpointIOError(f"the server's answer has the Content-Range {text[:80]!r}")
        first, last, size = map(int, match.groups())
        known = self._sizes[key]
        if known is not None and size != known:
            raise CheckpointGoneError(f"changed after the checkpoint was opened: it has {size} bytes, and had {known}")
        wanted = (size + start if start < 0 else start, size if stop is None else stop)
        if stop is not None and first == start and last + 1 == size < stop:
            self._sizes[key] = size
            raise ValueError(f"OUT_OF_RANGE: the file ends at byte {size}")
        if (first, last + 1) != wanted:
            raise CheckpointIOError(f"the server's answer has the Content-Range {text[:80]!r}, not {list(wanted)}")
        try:
            data = response.read(last + 1 - first)
        except (OSError, http.client.HTTPException) as error:
            raise _TransientError(type(error).__name__) from None
        if len(data) != last + 1 - first:
            raise _TransientError(f"the answer ended after {len(data)} bytes")
        self._sizes[key] = size
        return HubAnswer("value", data)

    def _refused(self, status: int) -> HubAnswer:
        """Returns or raises what a status means that comes with no bytes of the range."""
        if status in (404, 410):
            return HubAnswer("missing")
        if status == 416:
            raise ValueError("OUT_OF_RANGE: HTTP code 416")
        if status in _PASSING:
            raise _TransientError(f"HTTP code {status}")
        if status == 200:
            raise ValueError("UNKNOWN: the requested byte range was ignored by server")
        raise ValueError(f"{_DENIED.get(status, 'UNKNOWN')}: HTTP code {status}")


# By process: threads do not survive a fork.
_POOLS: dict[int, concurrent.futures.ThreadPoolExecutor] = {}


def _request_pool() -> concurrent.futures.ThreadPoolExecutor:
    """Returns the threads of this process that send requests; nothing in them waits for another thread."""
    process = os.getpid()
    if process not in _POOLS:
        made = concurrent.futures.ThreadPoolExecutor(_REQUESTS_AT_ONCE, thread_name_prefix="orbax_t5x-hub")
        _POOLS.setdefault(process, made)
    return _POOLS[process]


def _server(url: str) -> str:
    """Returns scheme, host and port of a URL."""
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}:{parts.port or {'http': 80, 'https': 443}.get(parts.scheme)}"


def _done(value: Any) -> concurrent.futures.Future[Any]:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_result(value)
    return future


def _failed(error: Exception) -> concurrent.futures.Future[Any]:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_exception(error)
    return future
