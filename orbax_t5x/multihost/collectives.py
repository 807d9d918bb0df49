"""Collectives of the processes of one call: gathering arrays and bytes, and raising the same error on all of them.

Every process must call each of them, also one that has failed: the others would wait for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from jax.experimental import multihost_utils

from orbax_t5x.concurrency import CallThread
from orbax_t5x.errors import CheckpointError, CheckpointIOError
from orbax_t5x.multihost.heartbeat import call_with_living_peers
from orbax_t5x.multihost.rendezvous import rendezvous_before_collective
from orbax_t5x.storage.error_data import error_as_data, error_from_data

_LENGTH = np.dtype("<u8")

_Result = TypeVar("_Result")


def collective(
    function: Callable[[], _Result],
    path: str | None,
    thread: CallThread | None = None,
    members: Sequence[int] | None = None,
) -> _Result:
    """Calls what waits for other processes, once all have arrived.

    Args:
      function: what to call, in another thread.
      path: of what is being restored, for the error.
      thread: that thread; None: one of its own.
      members: the processes that call it, where one device of each takes part; None: all, with all their devices.

    Raises:
      CheckpointIOError: another process does not answer: JAX's runtime notices that one has died, `heartbeat` that one
        was stopped or is disconnected.
    """
    rendezvous_before_collective(members, path)
    try:
        return call_with_living_peers(function, path, thread)
    except (RuntimeError, ValueError) as error:  # JAX raises either, by where the failure meets it
        text = " ".join(str(error).split())
        message = f"another process of this call has died, or cannot be reached: {text}"
        raise CheckpointIOError(message, path=path) from error


def gather(mine: np.ndarray, path: str | None) -> np.ndarray:
    """Gathers the arrays of all processes, of one shape and dtype, one row each; errors as `collective`."""
    rows = collective(lambda: np.asarray(multihost_utils.process_allgather(mine)), path)
    return rows.reshape(-1, *mine.shape)


def exchange(mine: bytes, failed: bool, path: str | None) -> tuple[list[bytes], list[int]]:
    """Gathers bytes of all processes by index, and the indices of those that `failed`; errors as `collective`."""
    table = gather(np.asarray([len(mine), failed], np.uint32), path)
    failures = np.flatnonzero(table[:, 1]).tolist()
    sizes = table[:, 0].tolist()
    if not any(sizes):
        return [b""] * len(sizes), failures
    padded = np.zeros(max(sizes), np.uint8)
    padded[: len(mine)] = np.frombuffer(mine, np.uint8)
    rows = gather(padded, path)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)], failures


def gather_bytes(mine: bytes, error: Exception | None, path: str | None) -> list[bytes]:
    """Gathers bytes of all processes by index, or raises this process's error, or else that of another."""
    sent, failures = exchange(mine if error is None else error_as_bytes(error), error is not None, path)
    if failures:
        raise received_error(failures, sent[failures[0]], path) if error is None else error
    return sent


def any_failed(failed: bool, path: str | None) -> bool:
    """Tests whether some process has failed; errors as `collective`."""
    return bool(gather(np.asarray([failed], np.uint32), path).any())


def raise_together(error: Exception | None, path: str | None) -> None:
    """Raises this process's error, or else that of another; as `gather_bytes`."""
    gather_bytes(b"", error, path)


def error_as_bytes(error: BaseException) -> bytes:
    """Encodes an error to be sent to the other processes."""
    return json.dumps(error_as_data(error)).encode()


def received_error(failures: Sequence[int], payload: bytes, path: str | None, what: str = "reading") -> CheckpointError:
    """Returns the error of another process (`error_as_bytes`) as the same type, or one that refers to it."""
    known = json.loads(payload)
    if known is None:
        noun = "process" if len(failures) == 1 else "processes"
        text = f"{what} failed on {noun} {', '.join(map(str, failures))}; the error raised there has the reason"
        return CheckpointIOError(text, path=path)
    return error_from_data(known, f" (on process {failures[0]})")


def gather_texts(mine: Sequence[bytes], path: str | None) -> list[list[bytes]]:
    """Gathers the texts of each process, by its index; errors as `collective`."""
    lengths = np.asarray([len(mine), *map(len, mine)], _LENGTH)
    return [_texts(payload) for payload in gather_bytes(lengths.tobytes() + b"".join(mine), None, path)]


def _texts(payload: bytes) -> list[bytes]:
    count = int(np.frombuffer(payload, _LENGTH, 1)[0])
    stop = (count + 1) * _LENGTH.itemsize
    texts: list[bytes] = []
    for length in np.frombuffer(payload, _LENGTH, count, offset=_LENGTH.itemsize).tolist():
        start, stop = stop, stop + length
        texts.append(payload[start:stop])
    return texts
