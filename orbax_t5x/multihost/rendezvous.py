"""Barriers of the processes of a job before JAX waits.

JAX waits for all processes when the first use of a device makes its backend, and when some devices first compute
together; an interrupt does not end these waits, and with Gloo the second one lasts 30 s at most. So the processes wait
for each other before, through the coordination service of `jax.distributed`. A process that sends heartbeats is waited
for without limit. One that has not sent a first heartbeat is starting, or has died: it is waited for as long as JAX
waits at its own start (`ORBAX_T5X_FIRST_HEARTBEAT_TIMEOUT_SECS` sets another limit), and named in the log meanwhile.
Where processes found each other by other means there is no such service, and nothing is waited for here. A barrier is
passed once for the backend, which all processes of the job make, and once for each group.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from orbax_t5x.concurrency import call_in_thread
from orbax_t5x.errors import CheckpointIOError, Fix
from orbax_t5x.multihost.coordination import (
    has_backend,
    key_value_store,
    lost_process,
    service_process_count,
    service_process_id,
    waited_for_key,
)
from orbax_t5x.multihost.groups import ProcessGroup
from orbax_t5x.multihost.heartbeat import read_heartbeats, sending_heartbeats, wait_with_living_peers
from orbax_t5x.multihost.openings import call_of_group
from orbax_t5x.text.wording import listed

_KEYS = "orbax_t5x/rendezvous/"
_TIMEOUT_VARIABLE = "ORBAX_T5X_FIRST_HEARTBEAT_TIMEOUT_SECS"
_DEFAULT_TIMEOUT_SECS = 300.0  # `initialization_timeout` of `jax.distributed.initialize`
_REPORT_SECS = 10.0  # between two log lines

_logger = logging.getLogger(__name__)

_passed: set[str] = set()


def rendezvous_before_backend(processes: Any = None) -> ProcessGroup:
    """Waits for all processes, and makes JAX's backend.

    A process of a group that is not the whole job leaves the wait to JAX: others may never call it.
    """
    if jax.distributed.is_initialized() and "backend" not in _passed:
        with sending_heartbeats():
            active = None if processes is None else processes.active_processes
            _make_backend(is_alone=active is not None and len(active) < service_process_count())
    return ProcessGroup.of(processes)


def _make_backend(*, is_alone: bool) -> None:
    barrier = _Barrier("backend", service_process_id(), range(service_process_count()), None)

    def wait_and_make_backend() -> None:
        if has_backend():  # for which JAX has waited, and this process sends heartbeats soon
            barrier.arrive()
            return
        if is_alone:
            barrier.arrive()
        else:
            barrier.wait()
        jax.process_count()

    barrier.pass_by(wait_and_make_backend, None)


@contextmanager
def collective_operation(processes: Any = None) -> Generator[ProcessGroup, None, None]:
    """Holds for a call that every member makes together."""
    group = rendezvous_before_backend(processes)
    with member_call(group):
        yield group


@contextmanager
def member_call(group: ProcessGroup) -> Generator[None, None, None]:
    """Marks the call of a group, and sends heartbeats."""
    with sending_heartbeats(), call_of_group(group):
        yield


def rendezvous_before_collective(group: ProcessGroup, path: str | None) -> None:
    """Waits for the processes of devices about to compute together."""
    if not jax.distributed.is_initialized():
        return
    if group.key not in _passed:
        barrier = _Barrier(group.key, group.process, group.members, path)
        barrier.pass_by(barrier.wait, group.members)


class _Barrier:
    """Barrier in the key-value store; to arrive twice changes nothing."""

    def __init__(self, name: str, process: int, expected: Iterable[int], path: str | None):
        self._name = name
        self._arrivals = f"{_KEYS}{name}/arrived/"
        self._process = process
        self._expected = frozenset(expected)
        self._path = path
        self._timeout_secs = _first_heartbeat_timeout_secs()
        self._is_abandoned = threading.Event()

    def pass_by(self, function: Callable[[], None], members: Collection[int] | None) -> None:
        """Calls a function that waits at the barrier while all live."""
        try:
            wait_with_living_peers(call_in_thread(function, "orbax_t5x-rendezvous"), members, self._path)
            _passed.add(self._name)
        finally:
            self._is_abandoned.set()

    def arrive(self) -> None:
        """Records that this process has arrived."""
        # A barrier of the service's own would take the service's process numbers, which may differ from the backend's.
        try:
            key_value_store().key_value_set(f"{self._arrivals}{self._process}", "", allow_overwrite=True)
        except (RuntimeError, ValueError) as error:  # JAX raises either
            raise lost_process(error, self._path) from error

    def wait(self) -> None:
        """Waits until all processes have arrived."""
        self.arrive()
        try:
            self._wait_for_others(key_value_store())
        except (RuntimeError, ValueError) as error:
            raise lost_process(error, self._path) from error

    def _wait_for_others(self, store: Any) -> None:
        complete = f"{_KEYS}{self._name}/complete"
        begin = time.monotonic()
        while True:
            arrived = {int(key.rpartition("/")[2]) for key, _ in store.key_value_dir_get(self._arrivals)}
            absent = self._expected - arrived
            if not absent:
                store.key_value_set(complete, "", allow_overwrite=True)
                return
            waited = time.monotonic() - begin
            if waited >= min(_REPORT_SECS, self._timeout_secs):
                self._report(sorted(absent - read_heartbeats(store).keys()), waited)
            remaining = self._timeout_secs - waited
            pause = min(_REPORT_SECS, remaining) if remaining > 0 else _REPORT_SECS
            if waited_for_key(store, complete, pause):
                return
            if self._is_abandoned.is_set():
                raise CheckpointIOError("the wait for the other processes was interrupted", path=self._path)

    def _report(self, absent: Sequence[int], waited_secs: float) -> None:
        if not absent:
            return
        noun = "process" if len(absent) == 1 else "processes"
        who = f"{noun} {listed(list(map(str, absent)), 5)}"
        if waited_secs >= self._timeout_secs:
            raise CheckpointIOError(
                f"no first heartbeat has come from {who} within {self._timeout_secs:g} s",
                path=self._path,
                fix=Fix(
                    f"find the reason in the log of the {noun}, or set {_TIMEOUT_VARIABLE} if processes need longer to "
                    "start"
                ),
            )
        _logger.warning(
            "Have waited %.0f s for the first heartbeat of %s; the limit is %g s (%s)",
            *(waited_secs, who, self._timeout_secs, _TIMEOUT_VARIABLE),
        )


def _first_heartbeat_timeout_secs() -> float:
    """Reads the time limit for a first heartbeat."""
    text = os.environ.get(_TIMEOUT_VARIABLE)
    try:
        seconds = _DEFAULT_TIMEOUT_SECS if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise ValueError(f"{_TIMEOUT_VARIABLE} is a positive number of seconds, not {text!r}.")
    return seconds
