"""Where the processes of a job wait for each other before JAX does.

JAX waits for all processes when the first use of a device makes its backend, and when some devices first compute
together. There it hears no interrupt. So the processes meet before it, by the coordination service of
`jax.distributed`. Whoever gives signs of life is waited for, however long. One that has given none yet is late, or
dead: on CPU it is taken for dead soon, as by Gloo, whose limit is 30 s; elsewhere it is waited for as JAX does, whose
own heartbeat ends the job. Where processes found each other by other means there is no such service, and nothing is
waited for here.

This is done once for each backend and for each set of devices: who has met there knows each other.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from orbax_t5x.concurrency import ThreadCall
from orbax_t5x.errors import CheckpointIOError
from orbax_t5x.multihost.heartbeat import absent_text, key_value_store, wait_with_living_peers

_KEYS = "orbax_t5x/met/"
_POLL_SECS = 0.1  # an interrupt just before a wait without an end would not be noticed
_FOREVER_MILLISECONDS = (1 << 31) - 1  # 24 days; the service takes no more

_TOO_LATE = "DEADLINE_EXCEEDED"  # how JAX says that a time limit has passed
_CPU_PATIENCE_SECS = 25.0

# Where this process has met the others, and what keeps it from saying twice that it has come: a thread says it, which
# goes on where its caller was interrupted and comes again.
_met: set[str] = set()
_locks: dict[str, threading.Lock] = {}


def meet_before_backend() -> None:
    """Waits for all processes, and makes JAX's backend; every process must call it.

    There are no signs of life yet: they bear the index that the backend gives a process.

    Raises:
      CheckpointIOError: a process has died, or has not come for too long.
      RuntimeError: of JAX; there is no backend.
    """
    if not jax.distributed.is_initialized():
        return

    def come(store: Any) -> None:
        patience = _patience_secs()
        try:
            store.wait_at_barrier(f"{_KEYS}backend", int(min(patience * 1000, _FOREVER_MILLISECONDS)))
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            message = absent_text((), patience) if _TOO_LATE in reason else f"another process has died: {reason}"
            raise CheckpointIOError(message) from error
        jax.process_count()

    if "backend" not in _met:
        call = _arrival("backend", come)
        while not call.ended.wait(_POLL_SECS):
            pass
        call.result()


def meet_before_collective(members: Sequence[int] | None, path: str | None) -> None:
    """Waits for the processes whose devices are about to compute together; each of them must call it.

    Args:
      members: their indices, where one device of each takes part; None: all processes, with all their devices.
      path: of what is being restored, for the error.

    Raises:
      CheckpointIOError: a process that was in the call gives no sign of life any more, or has given none for too long.
      RuntimeError: of JAX; a process has died.
    """
    if not jax.distributed.is_initialized():
        return
    meet_before_backend()  # others may have come to a call that begins with it
    expected = range(jax.process_count()) if members is None else members
    key = f"{_KEYS}{'all' if members is None else ','.join(map(str, members))}"

    def come(store: Any) -> None:
        # A barrier of some processes takes their indices in the service, which may be others than the backend's.
        if store.key_value_increment(f"{key}/count", 1) == len(expected):
            store.key_value_set(f"{key}/complete", "")
        store.blocking_key_value_get(f"{key}/complete", _FOREVER_MILLISECONDS)

    if key not in _met:
        wait_with_living_peers(_arrival(key, come), path, expected=expected, patience_secs=_patience_secs())


def _patience_secs() -> float:
    """For how long a process may give no sign of life. There may be no backend yet to ask what it is."""
    config: Any = jax.config  # whose options have no types
    return _CPU_PATIENCE_SECS if config.jax_platforms == "cpu" else math.inf


def _arrival(name: str, come: Callable[[Any], None]) -> ThreadCall[None]:
    def come_once() -> None:
        with _locks.setdefault(name, threading.Lock()):
            if name not in _met:
                come(key_value_store())
                _met.add(name)

    return ThreadCall(come_once, "orbax_t5x-meeting")
