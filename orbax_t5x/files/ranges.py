"""Bounded ranges of bytes, and requests that end together."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from orbax_t5x.errors import CorruptCheckpointError, LimitExceededError

# Requests under way at a time. TensorStore's own limit of 32 makes a checkpoint of hundreds of small arrays wait for
# ten round trips where two would do; servers take hundreds.
REQUESTS_AT_ONCE = 128


class BoundedRange(NamedTuple):
    """Range of the bytes of a file or a value.

    Attributes:
      start: of the first byte; below zero it counts from the end.
      stop: behind the last byte; equal to `start` for none, None for all to the end.
      most: bytes that an answer may have.
      into: memory of just these bytes, which an answer may fill instead of holding them; None for none.
    """

    start: int
    stop: int | None
    most: int
    into: memoryview | None = None

    @classmethod
    def between(cls, start: int, stop: int, into: memoryview | None = None) -> BoundedRange:
        """Makes the range of bytes [start, stop)."""
        return cls(start, stop, stop - start, into)

    @classmethod
    def rest(cls, start: int, most: int) -> BoundedRange:
        """Makes the range from a byte to the end."""
        return cls(start, None, most)

    @classmethod
    def whole(cls, most: int) -> BoundedRange:
        """Makes the range of all bytes, at most `most`."""
        return cls(0, None, most)

    @classmethod
    def last(cls, size: int) -> BoundedRange:
        """Makes the range of the last bytes, or of all if fewer."""
        return cls(-size, None, size)

    @property
    def is_empty(self) -> bool:
        """True for no bytes: only existence is asked for."""
        return self.start == self.stop

    @property
    def size(self) -> int:
        """The number of requested bytes; the bound plus 1 without an end."""
        if self.start < 0:
            return -self.start
        return self.most + 1 if self.stop is None else self.stop - self.start

    def within(self, size: int, what: str, *, path: str, leaf: str | None) -> slice:
        """Returns the place of the range within so many bytes.

        Raises:
          CorruptCheckpointError: it ends before the range.
          LimitExceededError: the range has more bytes than it may.
        """
        start = max(0, size + self.start) if self.start < 0 else self.start
        stop = size if self.stop is None else self.stop
        if stop > size or start > stop:
            raise CorruptCheckpointError(f"{what} ends at byte {size}", path=path, leaf=leaf)
        if stop - start > self.most:
            message = f"{what} has {stop - start} bytes, more than the {self.most} that it may have"
            raise LimitExceededError(message, path=path, leaf=leaf)
        return slice(start, stop)


NO_BYTES = BoundedRange(0, 0, 0)
"""Asks only whether there is a file."""


class Cancellable(Protocol):
    """A request that may be given up."""

    def cancel(self) -> object:
        """Gives it up."""
        ...


class RequestGroup:
    """Requests under way that may be given up together, from any thread."""

    def __init__(self) -> None:
        self._requests: set[Cancellable] = set()
        self._is_cancelled = False
        self._lock = threading.Lock()

    @contextmanager
    def holding(self, request: Cancellable) -> Generator[None, None, None]:
        """Adds a request to the group while it is under way."""
        with self._lock:
            self._requests.add(request)
            if self._is_cancelled:
                request.cancel()
        try:
            yield
        finally:
            with self._lock:
                self._requests.discard(request)

    def cancel(self) -> None:
        """Gives up all present and later requests."""
        with self._lock:
            self._is_cancelled = True
            for request in self._requests:
                request.cancel()


class ReadContext(NamedTuple):
    """Leaf and group of requests that a read belongs to.

    Attributes:
      leaf: for errors, or None.
      group: of its requests; None if they are never given up.
    """

    leaf: str | None = None
    group: RequestGroup | None = None


ANYONE = ReadContext()
"""Of a read that belongs to no leaf."""
