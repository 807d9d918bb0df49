"""Kinds of failed requests to remote stores, and their typed errors."""

from __future__ import annotations

import enum
import errno

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointIOError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedCheckpointError,
)


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
