"""Cleanup that no exception of a signal handler stops.

Python runs signal handlers in the main thread, between any two instructions: two interrupts in a row end a `with` block
by the first and its `__exit__` by the second, and a lock stays locked. Here what is to be undone is made, noted and
undone in another thread. The calling thread only asks for the end, by one call of the interpreter, before which no
handler can run.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from orbax_t5x.concurrency.loops import Latch, wait_undisturbed

_Result = TypeVar("_Result")


class Cleanup:
    """Stack of contexts that are entered and left in a thread."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self.ended = Latch()
        self.failures: list[BaseException] = []
        self._stack = contextlib.ExitStack()
        threading.Thread(target=_run_all, args=(self.jobs,), name="orbax_t5x-cleanup", daemon=True).start()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # an interrupt came before its first attribute
            self.jobs.put(lambda: False)

    def enter(self, make: Callable[[], contextlib.AbstractContextManager[_Result]]) -> _Result:
        """Makes and enters a context in the thread."""
        results: list[_Result] = []
        failures: list[BaseException] = []
        entered = Latch()

        def job() -> bool:
            try:
                results.append(self._stack.enter_context(make()))
            except BaseException as error:
                failures.append(error)
            entered.set()
            return True

        self.jobs.put(job)
        wait_undisturbed(entered.wait)
        if failures:
            raise failures.pop()
        return results.pop()

    def callback(self, function: Callable[[], object]) -> None:
        """Notes a function that is called in the thread at the end."""
        self._stack.callback(function)

    def close(self) -> bool:
        """Leaves all contexts in the thread, which ends."""
        try:
            self._stack.close()
        except BaseException as error:
            self.failures.append(error)
        self.ended.set()
        return False


def call_with_cleanup(function: Callable[[Cleanup], _Result]) -> _Result:
    """Calls a function, then leaves everything that it has entered."""
    cleanup = Cleanup()
    jobs, close = cleanup.jobs, cleanup.close
    try:
        return function(cleanup)
    finally:
        jobs.put(close)  # one call of the interpreter: a signal handler runs after it
        wait_undisturbed(cleanup.ended.wait)
        if cleanup.failures:
            raise cleanup.failures.pop()


def _run_all(jobs: queue.SimpleQueue[Callable[[], bool]]) -> None:
    while jobs.get()():
        pass
