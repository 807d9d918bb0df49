"""Collectives of the processes of one call: gathering bytes and texts, and raising the same error on all of them.

Every process must call each of them, also one that has failed: the others would wait for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from jax.experimental import multihost_utils

from orbax_t5x.concurrency import CallThread
from orbax_t5x.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointIOError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LeafMismatchError,
    LimitExceededError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)
from orbax_t5x.multihost.heartbeat import call_with_living_peers
from orbax_t5x.multihost.rendezvous import rendezvous_before_collective

# Errors that say the same on a process that only hears of them.
_TOLD = {
    kind.__name__: kind
    for kind in (
        CheckpointGoneError,
        CheckpointIOError,
        CheckpointNotFoundError,
        CorruptCheckpointError,
        LeafMismatchError,
        LimitExceededError,
        UnsafeCheckpointError,
        UnsupportedCheckpointError,
    )
}

_LENGTH = np.dtype("<u8")

_Result = TypeVar("_Result")


def collective(
    function: Callable[[], _Result],
    path: str | None,
    thread: CallThread | None = None,
    members: Sequence[int] | None = None,
) -> _Result:
    """Calls what waits for other processes, once they have come.

    Args:
      function: what to call, in another thread.
      path: of what is being restored, for the error.
      thread: that thread; None: one of its own.
      members: the processes that call it, where one device of each takes part; None: all, with all their devices.

    Raises:
      CheckpointIOError: another process does not answer: JAX's runtime notices that one has died, `heartbeat` that one
        was stopped or is parted from the others.
    """
    rendezvous_before_collective(members, path)
    try:
        return call_with_living_peers(function, path, thread)
    except (RuntimeError, ValueError) as error:  # JAX raises either, by where the failure meets it
        text = " ".join(str(error).split())
        message = f"another process of this call has died, or cannot be reached: {text}"
        raise CheckpointIOError(message, path=path) from error


def gather(mine: np.ndarray, path: str | None) -> np.ndarray:
    """The arrays of all processes, one row each; every process must call it.

    Args:
      mine: of one shape and dtype in all processes.
      path: of what is being restored, for the error.

    Raises:
      CheckpointIOError: as `collective`.
    """
    rows = collective(lambda: np.asarray(multihost_utils.process_allgather(mine)), path)
    return rows.reshape(-1, *mine.shape)


def gather_bytes(mine: bytes, path: str | None) -> list[bytes]:
    """What each process tells, by its index; every process must call it.

    Raises:
      CheckpointIOError: as `collective`.
    """
    sizes = gather(np.asarray([len(mine)], np.uint32), path)[:, 0].tolist()
    padded = np.zeros(max(1, *sizes), np.uint8)
    padded[: len(mine)] = np.frombuffer(mine, np.uint8)
    rows = gather(padded, path)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def any_failed(failed: bool, path: str | None) -> bool:
    """Whether some process has failed; every process must call it.

    Raises:
      CheckpointIOError: as `collective`.
    """
    return bool(gather(np.asarray([failed], np.uint32), path).any())


def raise_together(error: Exception | None, path: str | None) -> None:
    """Raises this process's error, or else that of another; every process must call it.

    Raises:
      CheckpointError: what another process could not do, as that process has it.
      CheckpointIOError: some process could not go on for another reason, or has died.
    """
    failures = np.flatnonzero(gather(np.asarray([error is not None], np.uint32), path)).tolist()
    if failures:
        told = gather_error(failures, error, path)
        raise told if error is None else error


def gather_error(failures: Sequence[int], error: Exception | None, path: str | None) -> CheckpointError:
    """The error of the first process that failed; every process must call it, with its own error."""
    told = gather_bytes(b"" if error is None else error_as_bytes(error), path)
    return told_error(failures, told[failures[0]], path)


def error_as_bytes(error: BaseException) -> bytes:
    """What a process tells the others of its error."""
    if not isinstance(error, CheckpointError) or type(error).__name__ not in _TOLD:
        return json.dumps(None).encode()
    number = error.errno if isinstance(error, CheckpointIOError) else None
    return json.dumps([type(error).__name__, error.message, error.path, error.leaf, number]).encode()


def told_error(failures: Sequence[int], told: bytes, path: str | None, what: str = "reading") -> CheckpointError:
    """The error of another process as the same type, or that it has one of its own.

    Args:
      failures: the processes that failed.
      told: by the first of them.
      path: of what is being restored or converted.
      what: failed.
    """
    known = json.loads(told)
    if known is None:
        who = ", ".join(map(str, failures))
        return CheckpointIOError(f"{what} failed on process {who}; its own error says why", path=path)
    name, message, where, leaf, number = known
    message = f"{message} (on process {failures[0]})"
    if _TOLD[name] is CheckpointIOError:
        return CheckpointIOError(message, path=where, leaf=leaf, errno=number)
    return _TOLD[name](message, path=where, leaf=leaf)


def exchange_texts(mine: Sequence[bytes], path: str | None) -> list[list[bytes]]:
    """The texts of each process, by its index; every process must call it.

    Raises:
      CheckpointIOError: a process does not answer.
    """
    lengths = np.asarray([len(mine), *map(len, mine)], _LENGTH)
    told = gather_bytes(lengths.tobytes() + b"".join(mine), path)
    return [_texts(payload) for payload in told]


def _texts(payload: bytes) -> list[bytes]:
    count = int(np.frombuffer(payload, _LENGTH, 1)[0])
    stop = (count + 1) * _LENGTH.itemsize
    texts: list[bytes] = []
    for length in np.frombuffer(payload, _LENGTH, count, offset=_LENGTH.itemsize).tolist():
        start, stop = stop, stop + length
        texts.append(payload[start:stop])
    return texts
