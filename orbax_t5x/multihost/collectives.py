"""Collectives of the processes of a call: arrays, bytes, errors.

Every process must call each of them, also one that has failed: the others would wait for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orbax_t5x.concurrency import CallThread, call_in_thread
from orbax_t5x.errors import CheckpointError, CheckpointIOError
from orbax_t5x.files.transcript import error_as_data, error_from_data
from orbax_t5x.multihost.coordination import lost_process
from orbax_t5x.multihost.groups import ProcessGroup
from orbax_t5x.multihost.rendezvous import rendezvous_before_collective

_LENGTH = np.dtype("<u8")
_AXIS = "process"

_Result = TypeVar("_Result")


def collective(
    function: Callable[[], _Result], group: ProcessGroup, path: str | None, thread: CallThread | None = None
) -> _Result:
    """Calls a function that waits for all processes; an interrupt ends the wait."""
    rendezvous_before_collective(group, path)
    try:
        future = call_in_thread(function, "orbax_t5x-collective") if thread is None else thread.submit(function)
        return future.result()
    except (RuntimeError, ValueError) as error:  # JAX raises either, by where the failure meets it
        raise lost_process(error, path) from error


def exchange_buffers(
    buffer: np.ndarray, group: ProcessGroup, path: str | None, thread: CallThread | None = None
) -> np.ndarray:
    """Exchanges the send buffers [slot, byte] of all members.

    One `thread` waits in all rounds: each thread keeps memory of its own of what it has let go. The buffer must not
    change before this returns.
    """
    if group.size == 1:
        return buffer
    return collective(lambda: _exchange_slots(buffer, group.members), group, path, thread)


def _exchange_slots(buffer: np.ndarray, members: Sequence[int]) -> np.ndarray:
    """Gathers single slots, or sends each member its slot (all-to-all)."""
    untyped: Any = jax
    mesh = Mesh(np.asarray([untyped.local_devices(process_index=member)[0] for member in members]), (_AXIS,))
    own = untyped.device_put(buffer[None], untyped.local_devices()[0])
    buffers = jax.make_array_from_single_device_arrays(
        (len(members), *buffer.shape), NamedSharding(mesh, PartitionSpec(_AXIS)), [own]
    )
    slots = PartitionSpec() if len(buffer) == 1 else PartitionSpec(None, _AXIS)
    exchanged = untyped.jit(_same, out_shardings=NamedSharding(mesh, slots))(buffers)
    return np.asarray(exchanged.addressable_data(0))[:, 0]


def _same(buffers: jax.Array) -> jax.Array:
    return buffers


def gather(mine: np.ndarray, group: ProcessGroup, path: str | None) -> np.ndarray:
    """Gathers the arrays of all members as rows."""
    rows = exchange_buffers(np.ascontiguousarray(mine).reshape(-1).view(np.uint8)[None], group, path)
    return np.ascontiguousarray(rows).view(mine.dtype).reshape(group.size, *mine.shape)


def exchange(mine: bytes, failed: bool, group: ProcessGroup, path: str | None) -> tuple[list[bytes], list[int]]:
    """Gathers bytes of all members by rank, and the failed ranks."""
    table = gather(np.asarray([len(mine), failed], np.uint32), group, path)
    failures = np.flatnonzero(table[:, 1]).tolist()
    sizes = table[:, 0].tolist()
    if not any(sizes):
        return [b""] * len(sizes), failures
    padded = np.zeros(max(sizes), np.uint8)
    padded[: len(mine)] = np.frombuffer(mine, np.uint8)
    rows = gather(padded, group, path)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)], failures


def gather_bytes(mine: bytes, error: Exception | None, group: ProcessGroup, path: str | None) -> list[bytes]:
    """Gathers bytes of all members by rank, or raises an error."""
    sent, failures = exchange(mine if error is None else error_as_bytes(error), error is not None, group, path)
    if failures:
        failed = [group.members[rank] for rank in failures]
        raise received_error(failed, sent[failures[0]], path) if error is None else error
    return sent


def any_failed(failed: bool, group: ProcessGroup, path: str | None) -> bool:
    """Tests whether some member has failed; errors as `collective`."""
    return bool(gather(np.asarray([failed], np.uint32), group, path).any())


def raise_together(error: Exception | None, group: ProcessGroup, path: str | None) -> None:
    """Raises this process's error, or else that of another; as `gather_bytes`."""
    gather_bytes(b"", error, group, path)


def error_as_bytes(error: BaseException) -> bytes:
    """Encodes an error to be sent to the other processes."""
    return json.dumps(error_as_data(error)).encode()


def received_error(failures: Sequence[int], payload: bytes, path: str | None, what: str = "reading") -> CheckpointError:
    """Returns another process's error, with its type if known."""
    known = json.loads(payload)
    if known is None:
        noun = "process" if len(failures) == 1 else "processes"
        text = f"{what} failed on {noun} {', '.join(map(str, failures))}; the error raised there has the reason"
        return CheckpointIOError(text, path=path)
    return error_from_data(known, f" (on process {failures[0]})")


def gather_texts(mine: Sequence[bytes], group: ProcessGroup, path: str | None) -> list[list[bytes]]:
    """Gathers the texts of each member by rank."""
    lengths = np.asarray([len(mine), *map(len, mine)], _LENGTH)
    return [_texts(payload) for payload in gather_bytes(lengths.tobytes() + b"".join(mine), None, group, path)]


def _texts(payload: bytes) -> list[bytes]:
    count = int(np.frombuffer(payload, _LENGTH, 1)[0])
    stop = (count + 1) * _LENGTH.itemsize
    texts: list[bytes] = []
    for length in np.frombuffer(payload, _LENGTH, count, offset=_LENGTH.itemsize).tolist():
        start, stop = stop, stop + length
        texts.append(payload[start:stop])
    return texts
