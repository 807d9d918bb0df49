"""Signs of life of the processes of one collective call, so that none waits for ever for one that has stopped.

While a process is in a collective call of this package, a thread of its own writes a new number into the key-value
store of JAX's coordination service every few seconds, and reads those of all in one request. A process that is slow
goes on writing and is waited for, however long; so is one that has not come to the call yet. One whose number stays the
same is stopped, or cannot be reached; where Python has ended, it says so. A process that has died is noticed by JAX
itself, at once where it has computed with the others before.

JAX's own heartbeat is another thing: `jax.distributed.initialize(heartbeat_timeout_seconds=…)`, 100 s by default, after
which JAX ends this process whatever is done here.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, TypeVar

import jax

from orbax_t5x.concurrency import CallThread, ThreadCall
from orbax_t5x.errors import CheckpointIOError
from orbax_t5x.text.wording import listed

# A number that is 20 s old when it is looked at was written at most 25 s ago: below 30 s, and enough for a process that
# is held up.
_BEAT_SECS = 5.0
_SILENT_SECS = 20.0
# How often a waiting caller looks; an interrupt is noticed as often.
_POLL_SECS = 0.1
_KEYS = "orbax_t5x/beat/"
_GONE = "gone"  # what stands in place of the number of a process that is in no call
_UNREACHABLE = "it was stopped or cannot be reached"
_ENDED = "ended"  # and of one that comes to no call any more

_Result = TypeVar("_Result")


class Pulse:
    """This process's signs of life, and what it knows of the others'.

    Attributes:
      beats: how many numbers were written.
    """

    def __init__(self, client: Any, process: int):
        """Starts the thread.

        Args:
          client: of JAX's key-value store.
          process: the index of this process.
        """
        self._client = client
        self._process = process
        self._ended = threading.Event()
        # The last number of each process, and when it was first seen here.
        self._seen: dict[int, tuple[str, float]] = {}
        self._looked = time.monotonic()
        self.beats: int = 0
        self._beating = ThreadCall(self._run, "orbax_t5x-beat")

    def _run(self) -> None:
        for number in itertools.count(time.time_ns()):
            # The coordinator may be gone: then `silent` says so, by how long ago the last look was.
            with contextlib.suppress(RuntimeError, ValueError):
                self._write(str(number))
                self.beats += 1
                self._look()
                self._looked = time.monotonic()
            if self._ended.wait(_BEAT_SECS):
                break
        with contextlib.suppress(RuntimeError, ValueError):
            self._write(_GONE)

    def _write(self, text: str) -> None:
        self._client.key_value_set(f"{_KEYS}{self._process}", text, allow_overwrite=True)

    def _look(self) -> None:
        for key, text in self._client.key_value_dir_get(_KEYS):
            process = int(key.rpartition("/")[2])
            if text == _GONE or process == self._process:
                self._seen.pop(process, None)
            elif self._seen.get(process, ("", 0.0))[0] != text:
                self._seen[process] = (text, time.monotonic())

    def silent(self) -> str | None:
        """Which process gives no sign of life, and why, as text, or None."""
        now = time.monotonic()
        for other, (text, since) in sorted(self._seen.copy().items()):
            # What it sent last may still arrive.
            if now - since > _SILENT_SECS:
                if text == _ENDED:
                    return f"process {other} has ended"
                return f"process {other} has given no sign of life for {now - since:.0f} s: {_UNREACHABLE}"
        if now - self._looked > _SILENT_SECS:
            return f"the coordination service of JAX has not answered for {now - self._looked:.0f} s: {_UNREACHABLE}"
        return None

    def is_beating(self, process: int) -> bool:
        """Whether another process is known to be in a call."""
        return process in self._seen

    def stop(self) -> None:
        """Says that this process is in no call any more."""
        self._ended.set()
        self._beating.ended.wait(_POLL_SECS)  # it may wait for a coordinator that does not answer


def key_value_store() -> Any:
    """The client of JAX's key-value store.

    Raises:
      ValueError: there is none.
    """
    import orbax.checkpoint as ocp  # noqa: PLC0415  (a restore by one process does not wait for importing Orbax)

    return ocp.multihost.get_jax_distributed_client()


class _Shared:
    """The one pulse of this process, for all calls that run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self.pulse: Pulse | None = None

    def enter(self) -> Pulse | None:
        with self._lock:
            self._users += 1
            # Processes that found each other by other means have no such store.
            if self.pulse is None and jax.distributed.is_initialized() and jax.process_count() > 1:
                self.pulse = Pulse(key_value_store(), jax.process_index())
            return self.pulse

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            pulse = None
            if not self._users:
                pulse, self.pulse = self.pulse, None
        if pulse is not None:
            pulse.stop()


_shared = _Shared()


def say_when_ended() -> None:
    """Has this process say when Python ends: where it alone fails in planning, the others may wait for it already."""
    if jax.distributed.is_initialized():
        _say_when_ended(jax.process_index())


@functools.cache
def _say_when_ended(process: int) -> None:
    @atexit.register
    def say_ended() -> None:  # before JAX waits for all processes to end: what is registered last is called first
        with contextlib.suppress(RuntimeError, ValueError):
            key_value_store().key_value_set(f"{_KEYS}{process}", _ENDED, allow_overwrite=True)


@contextlib.contextmanager
def beating() -> Generator[Pulse | None, None, None]:
    """Signs of life while this lasts; calls within calls share them. With one process there are none."""
    pulse = _shared.enter()
    try:
        yield pulse
    finally:
        _shared.leave()


def call_with_living_peers(
    function: Callable[[], _Result], path: str | None, thread: CallThread | None = None
) -> _Result:
    """Calls what waits for all processes, for as long as they live.

    Args:
      function: called in another thread, which goes on where this call gives up.
      path: of what is being restored, for the error.
      thread: that thread; None: one of its own.

    Raises:
      CheckpointIOError: a process that was in the call gives no sign of life any more.
    """
    with beating() as pulse:
        if pulse is None:
            return function()
        return wait_with_living_peers(ThreadCall(function, "orbax_t5x-collective", thread), path)


def wait_with_living_peers(
    call: ThreadCall[_Result], path: str | None, *, expected: Iterable[int] = (), patience_secs: float = math.inf
) -> _Result:
    """The result of a call that waits for other processes; more arguments and errors as above.

    Args:
      call: that waits.
      path: of what is being restored, for the error.
      expected: the processes that are waited for.
      patience_secs: for how long one of these may give no sign of life at all.
    """
    others = [process for process in expected if process != jax.process_index()]
    deadline = time.monotonic() + patience_secs
    with beating() as pulse:
        while not call.ended.wait(_POLL_SECS):
            if pulse is not None and (silent := pulse.silent()) is not None:
                raise CheckpointIOError(f"{silent}, and this restore waits for it no longer", path=path)
            if pulse is not None and time.monotonic() > deadline:
                absent = [process for process in others if not pulse.is_beating(process)]
                if absent:
                    raise CheckpointIOError(absent_text(absent, patience_secs), path=path)
        return call.result()


def absent_text(processes: Sequence[int], seconds: float) -> str:
    """What is said of processes that have given no sign of life yet; none: it is not known which."""
    who = f"process {listed(list(map(str, processes)), 5)}" if processes else "a process of this job"
    return f"{who} has not come to this call within {seconds:.0f} s, nor given a sign of life: it has died, or is late"
