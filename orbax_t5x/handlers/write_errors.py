"""Types the errors of failed writes, with path and leaf."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from orbax_t5x.errors import CheckpointError, CheckpointIOError
from orbax_t5x.files.native_errors import parse_error

# TensorStore's statuses for a store that failed, which no change of the arguments would mend.
_STORE_FAILURES = frozenset(
    "UNAVAILABLE PERMISSION_DENIED UNAUTHENTICATED RESOURCE_EXHAUSTED DATA_LOSS ABORTED CANCELLED DEADLINE_EXCEEDED "
    "NOT_FOUND FAILED_PRECONDITION OUT_OF_RANGE INTERNAL UNKNOWN".split()
)


def raise_as_checkpoint_error(error: BaseException, directory: Any, *, leaf: str | None = None) -> NoReturn:
    """Raises a failure to write as `CheckpointIOError`.

    It has its `errno`; every other error is raised as it is.
    """
    if isinstance(error, CheckpointError) or not isinstance(error, Exception):
        raise error
    if isinstance(error, TimeoutError) and error.errno is None:
        raise error  # Orbax's limit on the time of a save; that of an operating system has a number
    text = " ".join(str(error).split()) or type(error).__name__
    found = parse_error(error)
    number = error.errno if isinstance(error, OSError) else found.errno
    if number is None and not isinstance(error, OSError) and found.status not in _STORE_FAILURES:
        if leaf is not None:
            error.add_note(f"while the leaf {leaf!r} was written to {os.fspath(directory)}")
        raise error
    message = f"could not be written: {text}"
    raise CheckpointIOError(message, path=os.fspath(directory), leaf=leaf, errno=number) from error
