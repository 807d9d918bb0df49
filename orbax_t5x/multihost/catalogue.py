"""Opens a checkpoint once for all processes of a job: one process reads its metadata, the others receive the answers.

The opener, the primary process of the group that calls, runs the readers, records what the store answered
(`files.transcript`), and puts that into the key-value store of `jax.distributed`, compressed and in pieces below the
limit of a message. It waits for no one. The others run the same readers over these answers. What fails in the opener is
raised by all, with the same type and text.

The others wait for the opener to begin the same opening, and then for its end as long as the heartbeats go on. Where it
does not begin, because it opens something else, has failed before or is late, a process opens for itself. Outside of
collective calls (`plan_restore`) a process may be the only one that calls, and waits less.
"""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import jax

from orbax_t5x.errors import CheckpointError, CheckpointIOError
from orbax_t5x.files.places import current_recorder
from orbax_t5x.files.recorded import using
from orbax_t5x.multihost.coordination import has_backend, key_value_store, service_process_count
from orbax_t5x.multihost.groups import ProcessGroup
from orbax_t5x.multihost.heartbeat import sending_heartbeats

_Result = TypeVar("_Result")


class _Call(NamedTuple):
    group: ProcessGroup
    is_collective: bool
    # Openings of each name: a comparison may open a path twice.
    openings: collections.Counter[str]


_call: ContextVar[_Call | None] = ContextVar("orbax_t5x_call", default=None)


@contextmanager
def call_of_group(group: ProcessGroup, *, is_collective: bool = True) -> Generator[None, None, None]:
    """Marks a call of a group; openings inside it are waited for if every member makes it."""
    token = _call.set(_Call(group, is_collective, collections.Counter()))
    try:
        yield
    finally:
        _call.reset(token)


@contextmanager
def openings_of(processes: Any) -> Generator[None, None, None]:
    """Holds for a call that only some members of a group may make; `processes` are Orbax's options of the group."""
    with call_of_group(ProcessGroup.of(processes), is_collective=False):
        yield


def opened_once(call: Sequence[Any], path: str, function: Callable[[], _Result]) -> _Result:
    """Calls a function that only reads metadata, from a store that one process of the job asks for all.

    Args:
      call: names the call and its arguments; equal on processes that open the same.
      path: for errors and the log.
      function: opens, the same on every process.

    Raises:
      CheckpointError: what the function raises on this process, or has raised on the opener; or a process is lost.
    """
    if current_recorder() is not None or not jax.distributed.is_initialized() or service_process_count() < 2:
        return function()
    current = _call.get()
    if current is None:
        if not has_backend():
            return function()  # which numbers the members
        current = _Call(ProcessGroup.of(), False, collections.Counter())
    group, is_collective, counts = current
    if group.size == 1:
        return function()
    from orbax_t5x.multihost import openings  # noqa: PLC0415  (several processes)

    text = json.dumps([group.key, is_collective, *call])
    name = hashlib.sha256(f"{text}{counts[text] if is_collective else 0}".encode()).hexdigest()[:32]
    counts[text] += 1
    with sending_heartbeats():
        try:
            store = key_value_store()
            if group.is_primary:
                return openings.publish(store, name, function, is_collective)
            received = openings.received(store, name, path, group, is_collective)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, CheckpointError) or not _is_of_service(error):
                raise
            reason = " ".join(str(error).split())
            message = f"another process of this call has died, or cannot be reached: {reason}"
            raise CheckpointIOError(message, path=path) from error
        if received is None:
            return function()
        with using(received):
            return function()


def _is_of_service(error: BaseException) -> bool:
    """Tests whether an error is of the coordination service, and not of the function."""
    return type(error).__module__.partition(".")[0] in ("jaxlib", "jax")
