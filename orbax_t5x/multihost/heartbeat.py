"""Heartbeats between processes that wait for each other in a call.

While a process is in a collective call of this package, a thread of its own writes a new number into the key-value
store of JAX's coordination service every two seconds, and reads those of all processes with every second number, in one
request. A process whose number changes is slow at most and is waited for without limit; so is one between two calls. A
process whose number stays the same for many reads was killed, was stopped or is disconnected. The time is the reader's
own: no clocks of two hosts are compared. A process that ends Python first writes that it has ended.
The death of a process is noticed by JAX itself, at once where it has computed with the others before. JAX's own
heartbeat is independent of this one: `jax.distributed.initialize(heartbeat_timeout_seconds=…)`, 100 s by default, after
which JAX ends this process.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Collection, Generator
from typing import Any, TypeVar

import jax

from orbax_t5x.concurrency import CallThread, call_in_thread
from orbax_t5x.errors import CheckpointIOError
from orbax_t5x.multihost.coordination import has_backend, key_value_store, service_process_count, service_process_id
from orbax_t5x.multihost.groups import ProcessGroup

# A number is first read at most 4 s after it was written, and is the same in five more reads: a dead process is known
# after 24 s, below Gloo's limit of 30 s. A process that is held up for 18 s, and misses nine heartbeats, is not lost.
_BEAT_SECS = 2.0
_BEATS_PER_READ = 2
_SILENT_SECS = 20.0
# How often a waiting caller checks its peers; an interrupt is noticed as often.
POLL_SECS = 0.1
_KEYS = "orbax_t5x/beat/"
_IN_NO_CALL = "gone"  # in place of the number of a process between two calls
_ENDED = "ended"  # in place of the number of a process that has ended Python
_UNREACHABLE = "it was stopped or cannot be reached"

_Result = TypeVar("_Result")


class Heartbeat:
    """Heartbeat of this process, and the last of its peers."""

    def __init__(self, store: Any, process: int):
        """Starts the thread that sends and reads heartbeats."""
        self._store = store
        self._process = process
        self._stopped = threading.Event()
        self._is_forgotten = False
        # The last number of each process in a call, and for how many seconds it was read again.
        self._last: dict[int, tuple[str, float]] = {}
        self._read_time = time.monotonic()
        self._unanswered_since: float | None = None
        self.count: int = 0
        self._thread = call_in_thread(self._run, "orbax_t5x-beat")

    def _run(self) -> None:
        for number in itertools.count(time.time_ns()):
            if self._unanswered_since is None:
                self._unanswered_since = time.monotonic()
            # Where the service is gone, `lost_peer` reports it after a while.
            with contextlib.suppress(RuntimeError, ValueError):
                self._write(str(number))
                if self.count % _BEATS_PER_READ == 0:
                    self._read_others()
                self.count += 1
                self._unanswered_since = None
            if self._stopped.wait(_BEAT_SECS):
                break
        with contextlib.suppress(RuntimeError, ValueError):
            if self._is_forgotten:
                self._store.key_value_delete(f"{_KEYS}{self._process}")
            else:
                self._write(_IN_NO_CALL)

    def _write(self, text: str) -> None:
        self._store.key_value_set(f"{_KEYS}{self._process}", text, allow_overwrite=True)

    def _read_others(self) -> None:
        numbers = read_heartbeats(self._store)
        now = time.monotonic()
        # Where this process itself was held up, nothing was read meanwhile: the others may be well.
        passed = min(now - self._read_time, 2 * _BEATS_PER_READ * _BEAT_SECS)
        self._read_time = now
        last = self._last
        self._last = {
            process: (text, last[process][1] + passed if process in last and last[process][0] == text else 0.0)
            for process, text in numbers.items()
            if text != _IN_NO_CALL and process != self._process
        }

    def lost_peer(self, members: Collection[int] | None = None) -> str | None:
        """Returns text about a lost member or service, or None."""
        for process, (text, secs) in sorted(self._last.items()):
            # What a process sent before it ended may still arrive.
            if (members is None or process in members) and secs >= _SILENT_SECS:
                if text == _ENDED:
                    return f"process {process} has ended"
                return f"process {process} has sent no heartbeat for {secs:.0f} s: {_UNREACHABLE}"
        since = self._unanswered_since
        if since is not None and (secs := time.monotonic() - since) > _SILENT_SECS + _BEATS_PER_READ * _BEAT_SECS:
            return f"the coordination service of JAX has not answered for {secs:.0f} s: {_UNREACHABLE}"
        return None

    def stop(self, *, is_forgotten: bool = False) -> None:
        """Ends the heartbeat; forgets earlier signs of life if asked."""
        self._is_forgotten = is_forgotten
        self._stopped.set()
        # Not longer: the thread may wait for a service that does not answer.
        concurrent.futures.wait([self._thread], POLL_SECS)


def read_heartbeats(store: Any) -> dict[int, str]:
    """Reads the last heartbeat of every process."""
    return {int(key.rpartition("/")[2]): text for key, text in store.key_value_dir_get(_KEYS)}


class _SharedHeartbeat:
    """Heartbeat of this process for all its calls that run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._has_called = False
        self.heartbeat: Heartbeat | None = None

    def enter(self, *, is_call: bool) -> Heartbeat | None:
        with self._lock:
            self._calls += 1
            self._has_called |= is_call
            # Processes that found each other by other means have no such store.
            if self.heartbeat is None and jax.distributed.is_initialized() and service_process_count() > 1:
                self.heartbeat = Heartbeat(key_value_store(), _own_number())
            return self.heartbeat

    def leave(self) -> None:
        with self._lock:
            self._calls -= 1
            stopped = None
            if not self._calls:
                stopped, self.heartbeat = self.heartbeat, None
        if stopped is not None:
            # Until its first call it is as good as starting: to the others it may be late or dead.
            stopped.stop(is_forgotten=not self._has_called)


_shared = _SharedHeartbeat()


def _own_number() -> int:
    """Returns JAX's number of this process, or else the service's."""
    return jax.process_index() if has_backend() else service_process_id()


def announce_exit() -> None:
    """Announces the end of Python at exit to waiting peers."""
    if jax.distributed.is_initialized():
        _announce_exit(jax.process_index())


@functools.cache
def _announce_exit(process: int) -> None:
    @atexit.register
    def write_end() -> None:  # before JAX waits for all processes to end: what is registered last is called first
        with contextlib.suppress(RuntimeError, ValueError):
            key_value_store().key_value_set(f"{_KEYS}{process}", _ENDED, allow_overwrite=True)


@contextlib.contextmanager
def sending_heartbeats() -> Generator[Heartbeat | None, None, None]:
    """Sends heartbeats while the context lasts; nested calls share them."""
    heartbeat = _shared.enter(is_call=True)
    try:
        yield heartbeat
    finally:
        _shared.leave()


@contextlib.contextmanager
def sending_heartbeats_while_loading() -> Generator[None, None, None]:
    """Sends heartbeats while modules load before a first call."""
    _shared.enter(is_call=False)
    try:
        yield
    finally:
        _shared.leave()


def call_with_living_peers(
    function: Callable[[], _Result], group: ProcessGroup, path: str | None, thread: CallThread | None = None
) -> _Result:
    """Calls a function that waits for members while they live."""
    with sending_heartbeats() as heartbeat:
        if heartbeat is None:
            return function()
        future = call_in_thread(function, "orbax_t5x-collective") if thread is None else thread.submit(function)
        return wait_with_living_peers(future, group.members, path)


def wait_with_living_peers(
    future: concurrent.futures.Future[_Result], members: Collection[int] | None, path: str | None
) -> _Result:
    """Returns the result of a future while all members live."""
    with sending_heartbeats() as heartbeat:
        while not concurrent.futures.wait([future], POLL_SECS).done:
            if heartbeat is not None and (lost := heartbeat.lost_peer(members)) is not None:
                raise CheckpointIOError(f"{lost}, and this call waits for it no longer.", path=path)
        return future.result()
