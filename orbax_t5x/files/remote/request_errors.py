"""Types failures of TensorStore's requests."""

from __future__ import annotations

import errno
import re

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointIOError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedCheckpointError,
)

_STATUS = re.compile(r"(?P<status>[A-Z_]+): ")
# What follows the message: the body of the answer, the request's id and the like.
_PAYLOADS = re.compile(
    r" \[(http_response_body|x-amzn-requestid|tensorstore_spec|source locations|os_error_code)=.*", re.DOTALL
)
_IGNORED_RANGE = re.compile(r"was ignored by server|Expected Content-Range|Unexpected Content-Range")
_REDIRECT = re.compile(r"HTTP code 3\d\d")
_DENIED = ("PERMISSION_DENIED", "UNAUTHENTICATED")


def status_of(error: BaseException) -> str:
    """Returns the absl status at an error text's begin, or ""."""
    match = _STATUS.match(str(error))
    return match["status"] if match else ""


def is_denied(error: BaseException) -> bool:
    """Reports whether credentials are missing or do not suffice."""
    return status_of(error) in _DENIED


class BeyondEndError(CorruptCheckpointError):
    """A file that ends before the requested bytes."""


def is_no_file(error: BaseException) -> bool:
    """Tests if a failed stat means that no file is there.

    Servers redirect from a directory's name to the same with a slash, and buckets that may not be listed deny what they
    do not hold.
    """
    return is_denied(error) or _REDIRECT.search(str(error)) is not None


def is_ignored_range(error: BaseException) -> bool:
    """Tests if a server sent bytes that were not requested."""
    return _IGNORED_RANGE.search(_PAYLOADS.sub("", str(error))) is not None


def remote_error(error: BaseException, doing: str, *, path: str, leaf: str | None = None) -> CheckpointError:
    """Makes the typed error of a failed request."""
    text = _PAYLOADS.sub("", str(error))
    status = status_of(error)
    message = f"{doing}: {text[len(status) + 2 if status else 0 :]}"
    if is_denied(error):
        message += "; credentials are missing or do not suffice"
        return CheckpointIOError(message, path=path, leaf=leaf, errno=errno.EACCES)
    if status == "OUT_OF_RANGE":
        return BeyondEndError(f"{message}; the file ends before the requested bytes", path=path, leaf=leaf)
    if status == "NOT_FOUND":
        return CheckpointNotFoundError(message, path=path, leaf=leaf)
    if is_ignored_range(error):
        return UnsupportedCheckpointError(
            f"{message}; only a server that answers byte ranges (206) can be read", path=path, leaf=leaf
        )
    if _REDIRECT.search(text):
        message += "; redirects are not followed: open the URL to which the server sends"
    return CheckpointIOError(message, path=path, leaf=leaf)
