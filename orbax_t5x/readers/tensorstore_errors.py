"""Types the exceptions of TensorStore, with the checkpoint's path and the leaf."""

from __future__ import annotations

import errno
import os

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointIOError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)
from orbax_t5x.files.native_errors import parse_error

# Errors of the operating system for files that are not as they should be; all others are failures of its own.
_DAMAGE_ERRNOS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG})
# Statuses of absl for a store that failed, not for bytes that are wrong.
_IO_STATUSES = frozenset(
    {"PERMISSION_DENIED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED", "UNAUTHENTICATED"}
)


def typed_error(error: BaseException, *, path: str, leaf: str | None, doing: str, is_remote: bool) -> CheckpointError:
    """Types a failure inside TensorStore, in an action (`doing`) for a leaf."""
    found = parse_error(error)
    message, number = f"{doing}: {found.reason}", found.errno
    if not is_remote and not os.path.isdir(path):
        return CheckpointGoneError(f"the directory vanished ({message})", path=path, leaf=leaf)
    if number not in _DAMAGE_ERRNOS if number is not None else found.status in _IO_STATUSES:
        return CheckpointIOError(message, path=path, leaf=leaf, errno=number)
    if found.is_unsafe_key:
        return UnsafeCheckpointError(message, path=path, leaf=leaf)
    if isinstance(error, NotImplementedError) or found.status == "UNIMPLEMENTED":
        return UnsupportedCheckpointError(message, path=path, leaf=leaf)
    return CorruptCheckpointError(message, path=path, leaf=leaf)
