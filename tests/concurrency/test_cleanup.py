"""Cleanup in a thread of its own: what was entered is left, whatever signal handlers raise."""

import contextlib
import threading

import pytest

from orbax_t5x.concurrency.cleanup import call_with_cleanup
from tests.support.interrupts import interrupted_at_random


@contextlib.contextmanager
def noted(events, name, failure=None):
    events.append(f"enter {name}")
    yield name
    events.append(f"leave {name}")
    if failure is not None:
        raise failure


def test_contexts_are_left_in_reverse_order_on_their_own_thread():
    events, threads = [], set()

    def body(cleanup):
        assert cleanup.enter(lambda: noted(events, "a")) == "a"
        cleanup.callback(lambda: threads.add(threading.current_thread().name))
        assert cleanup.enter(lambda: noted(events, "b")) == "b"
        return 7

    assert call_with_cleanup(body) == 7
    assert events == ["enter a", "enter b", "leave b", "leave a"]
    assert threads == {"orbax_t5x-cleanup"}


def test_an_error_of_the_function_of_entering_and_of_leaving_is_raised():
    events = []

    def fails(cleanup):
        cleanup.enter(lambda: noted(events, "a"))
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        call_with_cleanup(fails)
    assert events == ["enter a", "leave a"]
    with pytest.raises(ZeroDivisionError):
        call_with_cleanup(lambda cleanup: cleanup.enter(lambda: noted(events, 1 // 0)))
    with pytest.raises(OSError, match="at the end"):
        call_with_cleanup(lambda cleanup: cleanup.enter(lambda: noted(events, "b", OSError("at the end"))))


def test_signals_at_random_moments_leave_what_was_entered():
    lock = threading.Lock()

    def run():
        try:
            call_with_cleanup(lambda cleanup: [cleanup.enter(lambda: lock), sum(range(1000))])
        finally:
            assert lock.acquire(timeout=60)
            lock.release()

    assert interrupted_at_random(run, 100, seed=3, longest=0.0005)
    run()
