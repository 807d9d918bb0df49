"""TensorStore's specs and context for reading arrays, and its errors.

Driver, path and settings are written here; nothing of a spec comes from a file.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping
from typing import Any

import tensorstore as ts

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointIOError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LimitExceededError,
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


# Reads of one file each; more threads than this do not read faster, and each holds a decoded chunk.
FILE_IO_CONCURRENCY = 16
# B-tree nodes of an OCDBT database, read once instead of once per leaf.
_OCDBT_CACHE_BYTES = 100_000_000
# TensorStore's own retries go on for half an hour; these end after some 60 s.
_RETRIES = {"max_retries": 12, "initial_delay": "100ms", "max_delay": "8s"}


def make_context() -> ts.Context:
    """Makes a checkpoint's context."""
    retries = {f"{driver}_request_retries": _RETRIES for driver in ("http", "gcs", "s3")}
    return ts.Context(
        {
            "file_io_concurrency": {"limit": FILE_IO_CONCURRENCY},
            "cache_pool": {"total_bytes_limit": 0},
            "cache_pool#ocdbt": {"total_bytes_limit": _OCDBT_CACHE_BYTES},
            **retries,
        }
    )


def array_spec(
    directory: Mapping[str, Any], name: str, *, ocdbt: bool, zarr3: bool, absent_is_fill: bool = False
) -> dict[str, Any]:
    """Makes the spec of an array."""
    inner = f"{name}/" if name else ""
    if ocdbt:
        kvstore = {**_database(directory), "path": inner}
    else:
        kvstore = _below(directory, inner)
    return {
        "driver": "zarr3" if zarr3 else "zarr",
        "kvstore": kvstore,
        "recheck_cached_metadata": False,
        "recheck_cached_data": False,
        "fill_missing_data_reads": absent_is_fill,
    }


def open_known(spec: Mapping[str, Any], context: ts.Context) -> ts.TensorStore:
    """Opens an array by a spec that holds its metadata."""
    return ts.open(dict(spec), open=True, assume_metadata=True, read=True, context=context).result()


def _below(directory: Mapping[str, Any], name: str) -> dict[str, Any]:
    path = directory["path"]
    slash = "" if not path or path.endswith("/") else "/"
    return {**directory, "path": f"{path}{slash}{name}"}


def _database(directory: Mapping[str, Any]) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": _below(directory, ""), "cache_pool": "cache_pool#ocdbt"}


class TensorStoreValues:
    """Values of a local database or directory, read by TensorStore.

    For databases of kinds that `OcdbtValues` refuses, and names that `Files` refuses; implements `Named`.
    """

    def __init__(self, directory: Mapping[str, Any], path: str, context: ts.Context, *, is_database: bool = True):
        """Opens them, reading nothing."""
        spec = {**_database(directory), "path": ""} if is_database else _below(directory, "")
        self.path: str = path
        self._values = ts.KvStore.open(spec, context=context).result()

    def read_whole(self, name: str, *, limit: int, leaf: str | None = None, bound: str = "Limits.index_bytes") -> bytes:
        """Implements `Named.read_whole`."""
        try:
            found = self._values.read(name).result()
        except (ValueError, NotImplementedError) as error:
            doing = "opening its OCDBT database"
            raise typed_error(error, path=self.path, leaf=leaf, doing=doing, is_remote=False) from error
        if found.state != "value":
            raise CheckpointNotFoundError(f"there is no value {name!r}", path=self.path, leaf=leaf)
        if len(found.value) > limit:
            message = f"the value {name!r} has {len(found.value)} bytes, more than {bound} = {limit}"
            raise LimitExceededError(message, path=self.path, leaf=leaf)
        return found.value

    def check(self) -> None:
        """Reads the manifest and the root node."""
        with contextlib.suppress(CheckpointNotFoundError):
            self.read_whole("/", limit=0)
