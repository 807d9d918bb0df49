"""What processes tell each other during one restore: bytes of any kind, whether they read what they had to, and
checksums of the parts that they read.

Six numbers for each part, in one small all-gather. Every process must call it, with the same leaves in the same order,
also one whose reading failed: the others would wait for it.
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
from orbax_t5x.lazy import ReadStats
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.lazy.read_stats import ChecksummedRange
from orbax_t5x.readers.ranges.coverage import fold_columns
from orbax_t5x.restoring.execute.heartbeat import call_with_living_peers
from orbax_t5x.restoring.execute.meeting import meet_before_collective

_COLUMNS = 6  # leaf, start, stop, crc, stride, times
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
    try:
        meet_before_collective(members, path)
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


def gather_parts(
    stats: ReadStats, leaves: Sequence[Leaf], *, error: Exception | None, path: str | None
) -> dict[Leaf, list[ChecksummedRange]]:
    """The parts of all processes, by this process's leaf.

    Args:
      stats: what this process noted.
      leaves: of the plan, in an order that all processes have.
      error: why this process could not read, or None.
      path: of what is being restored, for errors.

    Raises:
      CheckpointError: what another process could not read, as that process has it.
      CheckpointIOError: some process could not go on for another reason, or has died.
    """
    # What `verify="full"` has to read besides is only seen in the parts themselves.
    ranges = [stats.ranges(leaf) for leaf in leaves]
    if stats.verify != "full":
        ranges = [fold_columns(parts) for parts in ranges]
    noted = [(index, *part) for index, parts in enumerate(ranges) for part in parts]
    # Without jax_enable_x64 an all-gather would narrow int64: each number travels as two uint32.
    mine = np.asarray(noted, np.uint64).reshape(-1, _COLUMNS)
    counts_and_failures = gather(np.asarray([len(mine), error is not None], np.uint32), path)
    counts, failures = counts_and_failures[:, 0], np.flatnonzero(counts_and_failures[:, 1]).tolist()
    if failures:
        raise _gather_error(failures, error, path)
    longest = int(np.max(counts))
    if not longest:
        return {}
    padded = np.zeros((longest, _COLUMNS), np.uint64)
    padded[: len(mine)] = mine
    gathered = gather(padded.view(np.uint32), path)
    parts: dict[Leaf, list[ChecksummedRange]] = {}
    for count, block in zip(counts, gathered, strict=True):
        rows: list[list[int]] = np.ascontiguousarray(block[: int(count)]).view(np.uint64).tolist()
        for index, *part in rows:
            parts.setdefault(leaves[index], []).append(ChecksummedRange(*part))
    return parts


def raise_together(error: Exception | None, path: str | None) -> None:
    """Raises this process's error, or else that of another; every process must call it.

    Raises:
      CheckpointError: what another process could not do, as that process has it.
      CheckpointIOError: some process could not go on for another reason, or has died.
    """
    failures = np.flatnonzero(gather(np.asarray([error is not None], np.uint32), path)).tolist()
    if failures:
        told = _gather_error(failures, error, path)
        raise told if error is None else error


def _gather_error(failures: Sequence[int], error: Exception | None, path: str | None) -> CheckpointError:
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
