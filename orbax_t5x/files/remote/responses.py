"""Responses of servers and buckets, and failed requests.

Here are what they prove, how long they may be awaited, how often a request is sent, and how responses are recorded for
the other processes of a job.
"""

from __future__ import annotations

import concurrent.futures
import enum
import errno
import time
from typing import Any, NamedTuple, Protocol

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointIOError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedCheckpointError,
)
from orbax_t5x.files.transcript import Answer, Transcript


class RequestKind(enum.Enum):
    """Kind of a failed request."""

    DENIED = "credentials are missing or do not suffice"
    MISSING = "no file"
    BEYOND_END = "the file ends before the requested bytes"
    IGNORED_RANGE = "bytes that were not requested"
    REDIRECT = "redirect"
    UNREACHABLE = "no server of this name, or none that is trusted"
    OTHER = "other"
    # A later request may succeed.
    BROKEN = "broken connection"
    SILENT = "silent server"
    PASSING = "failure of the server"


class RequestError(Exception):
    """Failure of a request.

    Attributes:
      reason: for people.
      kind: for callers.
    """

    def __init__(self, reason: str, kind: RequestKind = RequestKind.OTHER):
        super().__init__(reason)
        self.reason = reason
        self.kind = kind

    @property
    def may_pass(self) -> bool:
        """True if a later request may succeed."""
        return self.kind in (RequestKind.BROKEN, RequestKind.SILENT, RequestKind.PASSING)

    @property
    def is_no_file(self) -> bool:
        """True if the failure of a stat means a missing file.

        Servers redirect from a directory's name to the same with a slash, and buckets that may not be listed deny what
        they do not hold.
        """
        return self.kind in (RequestKind.DENIED, RequestKind.REDIRECT)


class BeyondEndError(CorruptCheckpointError):
    """A file that ends before the requested bytes."""


def remote_error(error: RequestError, doing: str, *, path: str, leaf: str | None = None) -> CheckpointError:
    """Makes the typed error of a failed request."""
    message = f"{doing}: {error.reason}"
    match error.kind:
        case RequestKind.DENIED:
            message += "; credentials are missing or do not suffice"
            return CheckpointIOError(message, path=path, leaf=leaf, errno=errno.EACCES)
        case RequestKind.BEYOND_END:
            return BeyondEndError(f"{message}; the file ends before the requested bytes", path=path, leaf=leaf)
        case RequestKind.MISSING:
            return CheckpointNotFoundError(message, path=path, leaf=leaf)
        case RequestKind.IGNORED_RANGE:
            message += "; only a server that answers byte ranges (206) can be read"
            return UnsupportedCheckpointError(message, path=path, leaf=leaf)
        case RequestKind.REDIRECT:
            message += "; redirects are not followed: open the URL to which the server sends"
        case _:
            pass
    return CheckpointIOError(message, path=path, leaf=leaf)


MAX_RETRIES = 8
FIRST_DELAY_SECS = 0.1
LONGEST_DELAY_SECS = 8.0
# Longer than a server in the same building needs, and shorter than any other does.
_NEAR_SECS = 0.002


class Version(NamedTuple):
    """Marks of a file's contents, each empty if it is not sent.

    Attributes:
      tag: a strong ETag, or the generation of an object in a bucket.
      weak: the value of a weak ETag.
      modified: the value of Last-Modified.
    """

    tag: bytes = b""
    weak: bytes = b""
    modified: bytes = b""

    def is_followed_by(self, later: Version) -> bool:
        """Reports whether a later answer may be of the same contents.

        A tag that is missing or weaker than before is another. Answers with bytes may leave Last-Modified out.
        """
        if self.tag:
            return later.tag == self.tag
        if self.weak and (later.tag or later.weak) != self.weak:
            return False
        return not (self.modified and later.modified) or self.modified == later.modified

    def joined(self, later: Version) -> Version:
        """Joins marks; its own take precedence."""
        return Version(self.tag or later.tag, self.weak or later.weak, self.modified or later.modified)

    def __str__(self) -> str:
        mark = self.tag.strip(b"\0\1") or (self.weak and b"W/" + self.weak) or self.modified
        return mark.decode("utf-8", "backslashreplace")


NO_VERSION = Version()
"""Of a server that sends no marks."""


class ResponseClock:
    """Time of the last response of a remote store.

    The store may be silent for `timeout` seconds. One clock serves all requests to it: a request is given up when
    neither it nor any other was answered for so long. A slow line with many requests in its queue is not a dead one.
    """

    def __init__(self, timeout: float):
        self.timeout = timeout
        self._last = -float("inf")
        self._quickest = float("inf")

    def note(self, begun: float | None = None) -> None:
        """Records that a response came, to a request that was begun then."""
        self._last = time.monotonic()
        if begun is not None:
            self._quickest = min(self._quickest, self._last - begun)

    @property
    def is_near(self) -> bool:
        """True if some response came at once."""
        return self._quickest < _NEAR_SECS

    def seconds_left(self, begun: float) -> float:
        """Returns the seconds that a request may still wait.

        It was begun then; zero or less: it is given up.
        """
        return max(begun, self._last) + self.timeout - time.monotonic()

    def timeout_text(self) -> str:
        """Returns the reason for giving up a request, for an error."""
        return f"no answer for {self.timeout:g} s"


class Response(NamedTuple):
    """Bytes of a file.

    Attributes:
      data: the bytes.
      version: of the file.
      file_bytes: size of the file; None where the response does not name it.
      is_in_place: whether the bytes are in `BoundedRange.into`, and not in `data`.
    """

    data: bytes
    version: Version
    file_bytes: int | None = None
    is_in_place: bool = False


class PendingResponse(Protocol):
    """A request that was sent."""

    def result(self, timeout: float | None = None) -> Response | None:
        """Waits for the response.

        None: there is no such file.

        Raises:
          TimeoutError: there is none yet.
          RequestError: the request failed.
          CheckpointError: the response cannot be used.
        """
        ...

    def done(self) -> bool:
        """Reports whether the response came."""
        ...

    def cancel(self) -> object:
        """Gives the request up."""
        ...


class RecordedResponse(PendingResponse):
    """Request whose response goes into a transcript."""

    def __init__(self, pending: PendingResponse, request: tuple[Any, ...], transcript: Transcript):
        self._pending = pending
        self._request = request
        self._transcript = transcript

    def result(self, timeout: float | None = None) -> Response | None:
        try:
            answer = self._pending.result(timeout)
        except RequestError as error:
            self._transcript.add(self._request, ["failed", error.kind.name, error.reason])
            raise
        if answer is None:
            self._transcript.add(self._request, ["none"])
        else:
            marks = [mark.hex() for mark in answer.version]
            self._transcript.add(self._request, ["found", marks, answer.file_bytes], answer.data)
        return answer

    def done(self) -> bool:
        return self._pending.done()

    def cancel(self) -> object:
        return self._pending.cancel()


def known_response(found: Response | Exception | None) -> concurrent.futures.Future[Response | None]:
    """Returns the response to a request that need not be sent."""
    future: concurrent.futures.Future[Response | None] = concurrent.futures.Future()
    if isinstance(found, Exception):
        future.set_exception(found)
    else:
        future.set_result(found)
    return future


def received_response(answer: Answer) -> concurrent.futures.Future[Response | None]:
    """Returns a response of a transcript."""
    kind, *rest = answer.value
    if kind == "failed":
        name, reason = rest
        return known_response(RequestError(reason, RequestKind[name]))
    if kind == "none":
        return known_response(None)
    marks, file_bytes = rest
    return known_response(Response(answer.data, Version(*map(bytes.fromhex, marks)), file_bytes))
