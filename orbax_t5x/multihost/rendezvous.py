"""Barriers of the processes of a job before JAX waits.

JAX waits for all processes when the first use of a device makes its backend, and when some devices first compute
together; an interrupt does not end these waits, and with Gloo the second one lasts 30 s at most. So the processes wait
for each other before, through the coordination service of `jax.distributed`, without limit: if one of them dies, the
service ends the job. The log names those that have not arrived.
Where processes found each other by other means there is no such service, and nothing is waited for here. A barrier is
passed once for the backend, which all processes of the job make, and once for each group.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import jax

from orbax_t5x.concurrency import call_in_thread
from orbax_t5x.errors import CheckpointIOError
from orbax_t5x.multihost.coordination import (
    has_backend,
    key_value_store,
    lost_process,
    service_process_count,
    service_process_id,
    waited_for_key,
)
from orbax_t5x.multihost.groups import ProcessGroup
from orbax_t5x.multihost.openings import call_of_group
from orbax_t5x.text.wording import listed

_KEYS = "orbax_t5x/rendezvous/"
# How long a wait is before the log names those that are missing, and between two such lines.
_FIRST_REPORT_SECS = 60.0
_REPORT_SECS = 300.0
_POLL_SECS = 10.0  # how soon the thread of an interrupted wait ends

_logger = logging.getLogger(__name__)

_passed: set[str] = set()


def rendezvous_before_backend(processes: Any = None) -> ProcessGroup:
    """Waits for all processes, and makes JAX's backend.

    A process of a group that is not the whole job leaves the wait to JAX: others may never call it.
    """
    if jax.distributed.is_initialized() and "backend" not in _passed:
        active = None if processes is None else processes.active_processes
        _make_backend(is_alone=active is not None and len(active) < service_process_count())
    return ProcessGroup.of(processes)


def _make_backend(*, is_alone: bool) -> None:
    barrier = _Barrier("backend", service_process_id(), range(service_process_count()), None)

    def wait_and_make_backend() -> None:
        if has_backend():  # for which JAX has waited
            barrier.arrive()
            return
        if is_alone:
            barrier.arrive()
        else:
            barrier.wait()
        jax.process_count()

    barrier.pass_by(wait_and_make_backend)


@contextmanager
def collective_operation(processes: Any = None) -> Generator[ProcessGroup, None, None]:
    """Holds for a call that every member makes together."""
    group = rendezvous_before_backend(processes)
    with call_of_group(group):
        yield group


def rendezvous_before_collective(group: ProcessGroup, path: str | None) -> None:
    """Waits for the processes of devices about to compute together."""
    if not jax.distributed.is_initialized():
        return
    if group.key not in _passed:
        barrier = _Barrier(group.key, group.process, group.members, path)
        barrier.pass_by(barrier.wait)


class _Barrier:
    """Barrier in the key-value store; to arrive twice changes nothing."""

    def __init__(self, name: str, process: int, expected: Iterable[int], path: str | None):
        self._name = name
        self._arrivals = f"{_KEYS}{name}/arrived/"
        self._process = process
        self._expected = frozenset(expected)
        self._path = path
        self._is_abandoned = threading.Event()

    def pass_by(self, function: Callable[[], None]) -> None:
        """Calls a function that waits at the barrier; an interrupt ends the wait."""
        try:
            call_in_thread(function, "orbax_t5x-rendezvous").result()
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
        next_report_secs = _FIRST_REPORT_SECS
        while True:
            arrived = {int(key.rpartition("/")[2]) for key, _ in store.key_value_dir_get(self._arrivals)}
            absent = self._expected - arrived
            if not absent:
                store.key_value_set(complete, "", allow_overwrite=True)
                return
            waited = time.monotonic() - begin
            if waited >= next_report_secs:
                next_report_secs += _REPORT_SECS
                noun = "process" if len(absent) == 1 else "processes"
                who = f"{noun} {listed(list(map(str, sorted(absent))), 5)}"
                _logger.warning("Have waited %.0f s for %s to arrive", waited, who)
            if waited_for_key(store, complete, _POLL_SECS):
                return
            if self._is_abandoned.is_set():
                raise CheckpointIOError("the wait for the other processes was interrupted", path=self._path)
