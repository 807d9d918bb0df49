"""Types the exceptions of TensorStore, with the checkpoint's path and the leaf."""

from __future__ import annotations

import errno
import os
import re

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointIOError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)

# Where TensorStore's message goes on with the whole spec and other payloads, which add nothing to the error.
_PAYLOADS = re.compile(r" \[(tensorstore_spec|source locations|os_error_code)=.*", re.DOTALL)
_STATUS = re.compile(r"(?P<status>[A-Z_]+): ")
_OS_ERROR = re.compile(r"os_error_code='(?P<errno>\d+)'")
# Errors of the operating system for files that are not as they should be; all others are failures of its own.
_DAMAGE_ERRNOS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG})
# Statuses of absl for a store that failed, not for bytes that are wrong.
_IO_STATUSES = frozenset(
    {"PERMISSION_DENIED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED", "UNAUTHENTICATED"}
)


def os_error_number(error: BaseException) -> int | None:
    """Returns the OS error number in a TensorStore error, or None."""
    found = _OS_ERROR.search(str(error))
    return None if found is None else int(found["errno"])


def typed_error(error: BaseException, *, path: str, leaf: str | None, doing: str, is_remote: bool) -> CheckpointError:
    """Types a failure inside TensorStore, in an action (`doing`) for a leaf."""
    text = _PAYLOADS.sub("", str(error))
    match = _STATUS.match(text)
    status = match["status"] if match else ""
    message = f"{doing}: {text[match.end() if match else 0 :]}"
    if not is_remote and not os.path.isdir(path):
        return CheckpointGoneError(f"the directory vanished ({message})", path=path, leaf=leaf)
    number = os_error_number(error)
    if number not in _DAMAGE_ERRNOS if number is not None else status in _IO_STATUSES:
        return CheckpointIOError(message, path=path, leaf=leaf, errno=number)
    if "Invalid key: " in text or "Invalid file path: " in text:
        return UnsafeCheckpointError(message, path=path, leaf=leaf)
    if isinstance(error, NotImplementedError) or status == "UNIMPLEMENTED":
        return UnsupportedCheckpointError(message, path=path, leaf=leaf)
    return CorruptCheckpointError(message, path=path, leaf=leaf)
