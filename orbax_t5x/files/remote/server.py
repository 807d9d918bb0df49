"""A server or bucket: stats, reads of byte ranges and lists.

Each scheme has a class that sends a request and retries what may pass (429, 5xx, broken connections). What all share is
here: a deadline, a bound, typed errors, the record for other processes, and a cache for one opening, so that detection
and reader see the same files and nothing is requested twice.
"""

from __future__ import annotations

import abc
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import ClassVar, NamedTuple

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointIOError,
    LimitExceededError,
    UnsupportedCheckpointError,
    error_at,
)
from orbax_t5x.files.places import StoreUrl, current_opening, scheme_of
from orbax_t5x.files.ranges import NO_BYTES, BoundedRange, ReadContext
from orbax_t5x.files.remote.responses import (
    BeyondEndError,
    PendingResponse,
    RequestError,
    Response,
    ResponseClock,
    Version,
    remote_error,
)

_logger = logging.getLogger(__name__)


class PendingRead(NamedTuple):
    """A request that was sent and has no response yet."""

    key: str
    future: PendingResponse
    begun: float


# Below this a file is read whole without finding out its size; nearly all metadata are.
_SMALL_BYTES = 1 << 20
_BEYOND_SMALL = BoundedRange.between(_SMALL_BYTES, _SMALL_BYTES + 1)
_MEASURING = "measuring it"
# Requested before it is needed, by all threads that read: enough to hide a wait of 50 ms at 10 Gbit/s.
_AHEAD_BYTES = 64 << 20


class ReadAheadBudget:
    """Bound on bytes requested early, by many threads; never blocks."""

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


class Server(abc.ABC):
    """A server or bucket; each scheme has a class of its own.

    Attributes:
      is_bounded: whether a response can hold no more than was asked for, and names the size of its file.
      can_list: whether it lists its files.
      has_list: whether the list is known without a request.
      base: its URL.
      clock: of its answers.
      ahead: bytes requested before they are needed, by all reads of files together.
      refused: responses that were taken for missing files, by key: refusals for want of credentials, and redirects.
      first_blocks: the beginnings of files that were read, and the files' sizes if they are known.
      kinds: what keys were found to be: "file", "directory" or "missing".
    """

    is_bounded: ClassVar[bool] = True
    can_list: ClassVar[bool] = True
    has_list: ClassVar[bool] = False

    def __init__(self, base: str, clock: ResponseClock):
        """Makes no request."""
        self.base = base
        self.clock = clock
        self.ahead = ReadAheadBudget(_AHEAD_BYTES)
        self.refused: dict[str, RequestError] = {}
        self._stats: dict[str, Version | None] = {}
        self._lists: dict[str, list[str]] = {}
        self._listed: dict[str, frozenset[str]] = {}
        self._wholes: dict[str, Response] = {}
        self._small: set[str] = set()
        self.first_blocks: dict[str, tuple[bytes, int | None]] = {}
        self.kinds: dict[str, str] = {}
        self._at_end: list[Callable[[], None]] = []
        self._has_warned = False

    # -- of each scheme

    @abc.abstractmethod
    def request(self, key: str, wanted: BoundedRange, *, is_awaited: bool = False) -> PendingResponse:
        """Requests bytes of a file.

        Args:
          key: of the file.
          wanted: the bytes.
          is_awaited: whether the caller waits for the response at once; its thread may then send the request.
        """

    def names(self, prefix: str, timeout: float) -> list[str]:
        """Lists the files with a prefix of their names, if it can.

        Raises:
          TimeoutError: there is no list after `timeout` seconds.
          RequestError: the request failed.
        """
        raise UnsupportedCheckpointError("web servers do not list their files", path=self.url(prefix.rstrip("/")))

    @abc.abstractmethod
    def close_idle(self) -> None:
        """Closes the connections that no request uses."""

    # -- of all

    def warn_of_weak_proof(self) -> None:
        """Warns once that exchanged files may not be noticed."""
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "%s sends no strong ETag: a file that is exchanged while it is read is noticed only by another size or "
                "Last-Modified",
                self.base,
            )

    def url(self, key: str) -> str:
        """Returns the URL of a key."""
        return f"{self.base}/{key}" if key else self.base

    # -- single requests

    def begin(self, key: str, wanted: BoundedRange, *, is_awaited: bool = False) -> PendingRead:
        """Requests bytes of a file like `request`."""
        return PendingRead(key, self.request(key, wanted, is_awaited=is_awaited), time.monotonic())

    def end(
        self, request: PendingRead, doing: str, *, leaf: str | None = None, is_known: bool = False
    ) -> Response | None:
        """Waits for the response to a request.

        Args:
          request: that was sent.
          doing: for errors.
          leaf: for errors.
          is_known: whether the file exists; of others a refusal means that there is none.

        Raises:
          BeyondEndError: the file ends before the range.
          CheckpointError: the request failed.
        """
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
            except RequestError as error:
                self.clock.note()
                if is_known or not error.is_no_file:
                    raise remote_error(error, doing, path=path, leaf=leaf) from error
                self.refused[request.key] = error
                return None
            self.clock.note(request.begun)
            return response
        request.future.cancel()
        self.close_idle()
        raise CheckpointIOError(f"{doing}: {self.clock.timeout_text()}", path=path, leaf=leaf)

    def read(self, key: str, wanted: BoundedRange, context: ReadContext) -> bytes | None:
        """Reads bytes of a file, or returns None."""
        request = self.begin(key, wanted, is_awaited=True)
        with nullcontext() if context.group is None else context.group.holding(request.future):
            answer = self.end(request, "reading it", leaf=context.leaf, is_known=True)
        return None if answer is None else answer.data

    # -- several at once, each once in an opening

    def stat(self, keys: Iterable[str]) -> list[Version | None]:
        """Returns the versions of keys, None for missing files."""
        keys = list(keys)
        new = [key for key in dict.fromkeys(keys) if key not in self._stats]
        self._stats.update(zip(new, self.stat_again(new), strict=True))
        return [self._stats[key] for key in keys]

    def stat_again(self, keys: Sequence[str]) -> list[Version | None]:
        """Stats like `stat`, with new requests."""
        answers = self._end_all([self.begin(key, NO_BYTES) for key in keys], "reading its status")
        return [answer and answer.version for answer in answers]

    def has_file(self, key: str) -> bool:
        """Tests if a key is a file."""
        for directory, names in self._listed.items():
            if not directory or key.startswith(f"{directory}/"):
                return key[len(directory) + 1 if directory else 0 :] in names
        return self.stat([key])[0] is not None

    def stat_small(self, keys: Sequence[str]) -> list[Version | None]:
        """Stats files that will be read whole if they exist."""
        new = [key for key in dict.fromkeys(keys) if key not in self._stats]
        probes = [self.begin(key, _BEYOND_SMALL) for key in new]
        try:
            stats = self.stat(keys)
            self._small.update(key for key, probe in zip(new, probes, strict=True) if not self._has_byte(probe))
        finally:
            _cancel(probes)
        return stats

    def measure(self, key: str) -> bool:
        """Tests if a key is a file."""
        if key not in self._stats:
            try:
                answer = self.end(self.begin(key, _BEYOND_SMALL), _MEASURING)
                self._stats[key] = answer and answer.version
            except BeyondEndError:
                self._small.add(key)
                self.whole([key], _SMALL_BYTES)
        return self._stats[key] is not None

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
        for key, is_longer in zip(unknown, self.have_bytes([(key, limit) for key in unknown]), strict=True):
            if is_longer:
                raise LimitExceededError(f"more bytes than the limit of {limit} permits", path=self.url(key))
        answers = self._end_all([self.begin(key, BoundedRange.whole(limit)) for key in new], "reading it")
        for key, answer in zip(new, answers, strict=True):
            self._stats[key] = answer and answer.version
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
            answer = self.end(self.begin(key, BoundedRange.last(size)), "reading its end")
        except BeyondEndError:
            answer = self.end(self.begin(key, BoundedRange.whole(size)), "reading it")
        return answer and answer.data

    def have_bytes(self, places: Iterable[tuple[str, int]]) -> list[bool]:
        """Tests for each key and offset if there is a byte."""
        requests = [self.begin(key, BoundedRange.between(at, at + 1)) for key, at in places]
        try:
            return list(map(self._has_byte, requests))
        finally:
            _cancel(requests)

    def _has_byte(self, request: PendingRead) -> bool:
        try:
            return self.end(request, _MEASURING) is not None
        except BeyondEndError:
            return False

    def _end_all(self, requests: Sequence[PendingRead], doing: str) -> list[Response | None]:
        """Ends requests in their order."""
        try:
            return [self.end(request, doing) for request in requests]
        finally:
            _cancel(requests)

    def names_below(self, key: str) -> list[str]:
        """Lists all files below a directory, at any depth, relative to it."""
        if key not in self._lists:
            prefix = f"{key}/" if key else ""
            self._lists[key] = sorted(name[len(prefix) :] for name in self._list(key, prefix))
            self._listed[key] = frozenset(self._lists[key])
        return self._lists[key]

    def _list(self, key: str, prefix: str) -> list[str]:
        try:
            names = self.names(prefix, self.clock.timeout)
        except CheckpointError:
            raise
        except TimeoutError:
            raise CheckpointIOError(f"listing it: {self.clock.timeout_text()}", path=self.url(key)) from None
        except RequestError as error:
            raise remote_error(error, "listing it", path=self.url(key)) from error
        self.clock.note()
        return names

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


def _cancel(requests: Iterable[PendingRead]) -> None:
    for request in requests:
        request.future.cancel()


def connect(url: str) -> tuple[Server, StoreUrl]:
    """Finds the server and the parts of a URL."""
    scheme = scheme_of(url)
    if scheme is None:
        raise ValueError(f"{url!r} is no URL")
    parsed, opening = scheme.parse(url), current_opening()
    if parsed.base not in opening.servers:
        try:
            opening.servers[parsed.base] = scheme.server(parsed.base, ResponseClock(opening.timeout))
        except ValueError as error:
            # Without its cause, which repeats the URL.
            raise UnsupportedCheckpointError(f"the URL cannot be used: {error}", path=parsed.base) from None
    return opening.servers[parsed.base], parsed
