"""A server or bucket: stats, reads of byte ranges and lists.

Each has a deadline and a bound.

Its transport (that of its scheme) retries what may pass (429, 5xx, broken connections) and
proves the length of every answer; it follows no redirect. A connection adds a deadline, typed errors, and a cache for
one opening, so that detection and reader see the same files and nothing is requested twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import NamedTuple, TypeVar, cast

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointIOError,
    LimitExceededError,
    UnsupportedCheckpointError,
    error_at,
)
from orbax_t5x.files.places import current_opening, current_recorder
from orbax_t5x.files.ranges import NO_BYTES, BoundedRange, ReadContext
from orbax_t5x.files.remote.request_errors import is_beyond_end, is_no_file, remote_error
from orbax_t5x.files.remote.transport import ListedTransport, PendingResponse, Response, Transport
from orbax_t5x.files.remote.versions import Version
from orbax_t5x.files.response_clock import ResponseClock
from orbax_t5x.files.schemes import Scheme, scheme_of
from orbax_t5x.files.transcript import Transcript

_Result = TypeVar("_Result")


class FileStat(NamedTuple):
    """Result of a request without bytes for a file."""

    version: Version


class PendingRead(NamedTuple):
    """A request that was sent and has no response yet."""

    key: str
    future: PendingResponse
    begun: float


# Below this a file is read whole without finding out its size; nearly all metadata are.
_SMALL_BYTES = 1 << 20
# Requested before it is needed, by all threads that read: enough to hide a wait of 50 ms at 10 Gbit/s.
_AHEAD_BYTES = 64 << 20


class ReadAheadBudget:
    """Bound on the bytes requested before they are needed.

    Many threads share it, and it blocks none of them.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._used = 0
        self._lock = threading.Lock()

    def take(self, size: int, *, needed: bool) -> bool:
        """Takes bytes if they fit or are needed now."""
        with self._lock:
            if not needed and self._used + size > self._limit:
                return False
            self._used += size
            return True

    def give(self, size: int) -> None:
        """Gives back bytes that arrived or are no longer wanted."""
        with self._lock:
            self._used -= size


class Connection:
    """A server or bucket.

    Attributes:
      base: its URL.
      scheme: of its URL.
      clock: of its answers.
      ahead: bytes requested before they are needed, by all reads of files together.
      is_bounded: see `Transport`.
      refused: responses that were taken for missing files, by key: refusals for want of credentials, and redirects.
      first_blocks: the beginnings of files that were read, and the files' sizes if they are known.
      kinds: what keys were found to be: "file", "directory" or "missing".
      transcript: of the opening, where processes share it; else None.
    """

    def __init__(self, base: str, scheme: Scheme, timeout: float):
        self.base = base
        self.scheme = scheme
        self.clock = ResponseClock(timeout)
        self.ahead = ReadAheadBudget(_AHEAD_BYTES)
        self.refused: dict[str, ValueError] = {}
        self._stats: dict[str, FileStat | None] = {}
        self._lists: dict[str, list[str]] = {}
        self._listed: dict[str, frozenset[str]] = {}
        self._wholes: dict[str, Response] = {}
        self._small: set[str] = set()
        self.first_blocks: dict[str, tuple[bytes, int | None]] = {}
        self.kinds: dict[str, str] = {}
        self._at_end: list[Callable[[], None]] = []
        recorder = current_recorder()
        self.transcript: Transcript | None = None if recorder is None else recorder.transcript
        try:
            self._server: Transport = scheme.transport(base, self.clock)
            if recorder is not None:
                self._server = recorder.transport(self._server, base)
            self.is_bounded = self._server.is_bounded
        except ValueError as error:
            # Without its cause, which repeats the URL.
            raise UnsupportedCheckpointError(f"the URL cannot be used: {error}", path=base) from None

    def url(self, key: str) -> str:
        """Returns the URL of a key."""
        return f"{self.base}/{key}" if key else self.base

    # -- single requests

    def begin(self, key: str, wanted: BoundedRange, *, is_awaited: bool = False) -> PendingRead:
        """Requests bytes of a file, like `Transport.read`."""
        return PendingRead(key, self._server.read(key, wanted, is_awaited=is_awaited), time.monotonic())

    def end(self, request: PendingRead, *, doing: str, leaf: str | None = None) -> Response | None:
        """Waits for the response to a request."""
        path = self.url(request.key)
        while (left := self.clock.seconds_left(request.begun)) > 0:
            try:
                response = request.future.result(left)
            except TimeoutError:
                if request.future.done():
                    break
                continue
            except CheckpointError as error:
                self.clock.note()
                self.close_idle()
                raise error_at(error, path=path, leaf=leaf) from None
            except ValueError:
                self.clock.note()
                raise
            self.clock.note(request.begun)
            return response
        request.future.cancel()
        self.close_idle()
        raise CheckpointIOError(f"{doing}: {self.clock.timeout_text()}", path=path, leaf=leaf)

    # -- several at once

    def stat(self, keys: Iterable[str]) -> list[FileStat | None]:
        """Stats the keys in a batch, each once in an opening."""
        keys = list(keys)
        new = [key for key in dict.fromkeys(keys) if key not in self._stats]
        self._stats.update(zip(new, self.stat_again(new), strict=True))
        return [self._stats[key] for key in keys]

    def _end_stat(self, request: PendingRead) -> FileStat | None:
        try:
            answer = self.end(request, doing="reading its status")
        except ValueError as error:
            if isinstance(error, CheckpointError):
                raise
            if self._is_no_file(request.key, error):
                return None
            raise remote_error(error, "reading its status", path=self.url(request.key)) from error
        return None if answer is None else FileStat(answer.version)

    def has_file(self, key: str) -> bool:
        """Tests if a key is a file."""
        for directory, names in self._listed.items():
            if not directory or key.startswith(f"{directory}/"):
                return key[len(directory) + 1 if directory else 0 :] in names
        return self.stat([key])[0] is not None

    def stat_again(self, keys: Sequence[str]) -> list[FileStat | None]:
        """Stats like `stat`, with new requests."""
        return _end_all([self.begin(key, NO_BYTES) for key in keys], self._end_stat)

    def stat_small(self, keys: Sequence[str]) -> list[FileStat | None]:
        """Stats files that will be read whole if they exist."""
        new = [key for key in dict.fromkeys(keys) if key not in self._stats]
        probes = [self.begin(key, BoundedRange.between(_SMALL_BYTES, _SMALL_BYTES + 1)) for key in new]
        try:
            stats = self.stat(keys)
            self._small.update(key for key, probe in zip(new, probes, strict=True) if not self._has_bytes(probe))
        finally:
            _cancel(probes)
        return stats

    def measure(self, key: str) -> bool:
        """Tests if a key is a file."""
        if key in self._stats:
            return self._stats[key] is not None
        request = self.begin(key, BoundedRange.between(_SMALL_BYTES, _SMALL_BYTES + 1))
        try:
            answer = self.end(request, doing="measuring it")
        except ValueError as error:
            if isinstance(error, CheckpointError):
                raise
            if is_beyond_end(error):
                self._small.add(key)
                return self.whole([key], _SMALL_BYTES)[0] is not None
            if not self._is_no_file(key, error):
                raise remote_error(error, "measuring it", path=self.url(key)) from error
            answer = None
        self._stats[key] = None if answer is None else FileStat(answer.version)
        return answer is not None

    def whole_if_small(self, key: str) -> Response | None:
        """Returns all bytes of a file found small, or None."""
        return self.whole([key], _SMALL_BYTES)[0] if key in self._small else None

    def whole(self, keys: Sequence[str], limit: int, *, may_be_larger: bool = True) -> list[Response | None]:
        """Reads all bytes of each file, or None."""
        new = [key for key in dict.fromkeys(keys) if key not in self._wholes]
        # TensorStore bounds no response, and a response that is broken off costs a connection: of a file that is not
        # known to be small one byte beyond the limit is requested first. A bounded response names the file's size.
        unknown = [key for key in new if not self._is_within(key, limit)]
        unknown = unknown if may_be_larger or not self.is_bounded else []
        beyond = BoundedRange.between(limit, limit + 1)
        probes = _end_all([self.begin(key, beyond) for key in unknown], self._has_bytes)
        for key, too_long in zip(unknown, probes, strict=True):
            if too_long:
                raise LimitExceededError(f"more bytes than the limit of {limit} permits", path=self.url(key))
        answers = _end_all([self.begin(key, BoundedRange.whole(limit)) for key in new], self._end_whole)
        for key, answer in zip(new, answers, strict=True):
            self._stats[key] = None if answer is None else FileStat(answer.version)
            if answer is not None:
                self._wholes[key] = answer
        return [self._wholes.get(key) for key in keys]

    def _is_within(self, key: str, limit: int) -> bool:
        """Reports whether a file is known to have at most some bytes."""
        _, size = self.first_blocks.get(key, (b"", None))
        return (key in self._small and limit >= _SMALL_BYTES) or (size is not None and size <= limit)

    def end_of(self, key: str, size: int) -> bytes | None:
        """Reads the last `size` bytes of a file, or a shorter file."""
        try:
            answer = self.end(self.begin(key, BoundedRange.last(size)), doing="reading its end")
        except ValueError as error:
            if isinstance(error, CheckpointError):
                raise
            if self._is_no_file(key, error):
                return None
            if not is_beyond_end(error):
                raise remote_error(error, "reading its end", path=self.url(key)) from error
            answer = self._end_whole(self.begin(key, BoundedRange.whole(size)))
        return None if answer is None else answer.data

    def _end_whole(self, request: PendingRead) -> Response | None:
        try:
            return self.end(request, doing="reading it")
        except ValueError as error:
            if isinstance(error, CheckpointError):
                raise
            if self._is_no_file(request.key, error):
                return None
            raise remote_error(error, "reading it", path=self.url(request.key)) from error

    def _is_no_file(self, key: str, error: ValueError) -> bool:
        if not is_no_file(error):
            return False
        self.refused[key] = error
        return True

    def _has_bytes(self, request: PendingRead) -> bool:
        try:
            return self.end(request, doing="measuring it") is not None
        except ValueError as error:
            if isinstance(error, CheckpointError):
                raise
            if is_beyond_end(error) or self._is_no_file(request.key, error):
                return False
            raise remote_error(error, "measuring it", path=self.url(request.key)) from error

    def have_bytes(self, key: str, offsets: Sequence[int]) -> list[bool]:
        """Reports for each offset whether a file has a byte there."""
        requests = [self.begin(key, BoundedRange.between(offset, offset + 1)) for offset in offsets]
        return _end_all(requests, self._has_bytes)

    def names_below(self, key: str) -> list[str]:
        """Lists all files below a directory, at any depth, relative to it."""
        if not self.scheme.can_list:
            raise UnsupportedCheckpointError("web servers do not list their files", path=self.url(key))
        if key not in self._lists:
            prefix = f"{key}/" if key else ""
            self._lists[key] = sorted(
                name[len(prefix) :] for name in self._list(key, prefix, cast("ListedTransport", self._server))
            )
            self._listed[key] = frozenset(self._lists[key])
        return self._lists[key]

    def _list(self, key: str, prefix: str, bucket: ListedTransport) -> list[str]:
        try:
            names = bucket.names(prefix, self.clock.timeout)
        except TimeoutError:
            raise CheckpointIOError(f"listing it: {self.clock.timeout_text()}", path=self.url(key)) from None
        except ValueError as error:
            raise remote_error(error, "listing it", path=self.url(key)) from error
        self.clock.note()
        return names

    def read(self, key: str, wanted: BoundedRange, context: ReadContext) -> bytes | None:
        """Reads bytes of a file, or returns None."""
        request = self.begin(key, wanted, is_awaited=True)
        try:
            with nullcontext() if context.group is None else context.group.holding(request.future):
                answer = self.end(request, doing="reading it", leaf=context.leaf)
        except ValueError as error:
            if isinstance(error, CheckpointError):
                raise
            raise remote_error(error, "reading it", path=self.url(key), leaf=context.leaf) from error
        return None if answer is None else answer.data

    def close_idle(self) -> None:
        """Closes connections that no request uses."""
        self._server.close_idle()

    def at_end(self, function: Callable[[], None]) -> None:
        """Adds an action for the end of the opening."""
        self._at_end.append(function)

    def forget(self) -> None:
        """Clears the memory of an opening."""
        for function in self._at_end:
            function()
        self._at_end.clear()
        self._stats, self._lists, self._listed, self._wholes, self.refused = {}, {}, {}, {}, {}
        self._small = set()
        self.first_blocks, self.kinds = {}, {}


def _end_all(requests: Sequence[PendingRead], end: Callable[[PendingRead], _Result]) -> list[_Result]:
    """Ends requests in their order."""
    try:
        return [end(request) for request in requests]
    finally:
        _cancel(requests)


def _cancel(requests: Iterable[PendingRead]) -> None:
    for request in requests:
        request.future.cancel()


class RemoteLocation(NamedTuple):
    """A connection and a key."""

    connection: Connection
    key: str
    is_directory: bool


def connect(url: str) -> RemoteLocation:
    """Returns the connection of this session and the key for a URL."""
    scheme = scheme_of(url)
    if scheme is None:
        raise ValueError(f"{url!r} is no URL")
    parsed, session = scheme.parse(url), current_opening()
    if parsed.base not in session.connections:
        session.connections[parsed.base] = Connection(parsed.base, scheme, session.timeout)
    return RemoteLocation(session.connections[parsed.base], parsed.key, parsed.is_directory)
