"""Interrupts of the calling thread at every point of some modules, and what they must not leave behind."""

import contextlib
import dis
import gc
import linecache
import os
import random
import signal
import sys
import threading

# More events than any call here has; a call that never ends without one is a defect of its own.
_MOST_EVENTS = 5_000


def interrupted_everywhere(function, files):
    """Calls a function once for each event (line or call) of the calling thread in files whose path ends in `files`.

    Each call is interrupted at another event. Returns how many were.
    """
    for count in range(1, _MOST_EVENTS):
        before = left_open()
        tracer = _Tracer(count, tuple(files))
        sys.settrace(tracer)
        try:
            function()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        where, tracer = tracer.where, None
        assert_nothing_left(before, where)
        if where is None:
            return count - 1
    raise AssertionError(f"more than {_MOST_EVENTS} events")


class _Tracer:
    """Trace function that raises KeyboardInterrupt at one event, wherever a signal handler could."""

    def __init__(self, count, files):
        self.where = None
        self._left = count
        self._files = files

    def __call__(self, frame, event, _):
        # An interrupt in `__del__` is lost, and the end of a `with` calls `__exit__` before Python looks for signals.
        if not frame.f_code.co_filename.endswith(self._files):
            return None
        if event in ("call", "line") and not _leaves_with(frame) and not _is_deleting(frame):
            self._left -= 1
            if not self._left:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
                raise KeyboardInterrupt(self.where)
        return self


def _is_deleting(frame):
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def _leaves_with(frame):
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).split()
    is_with = "with" in line[:2]
    return is_with and dis.opname[frame.f_code.co_code[frame.f_lasti]] in ("LOAD_CONST", "SWAP", "PUSH_NULL")


def interrupted_at_random(function, count, seed, longest):
    """Calls a function `count` times, each with a signal after at most `longest` seconds; counts the interrupts."""
    rng = random.Random(seed)
    interrupts = 0
    is_over = threading.Event()

    def interrupt(*_):
        if not is_over.is_set():  # else it was sent when the call ended
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGUSR1, interrupt)
    try:
        for _ in range(count):
            before = left_open()
            is_over = threading.Event()
            timer = threading.Thread(target=_signal_after, args=(is_over, rng.uniform(0, longest)))
            try:
                timer.start()
                function()
                is_over.set()
            except KeyboardInterrupt:
                interrupts += 1
            is_over.set()
            timer.join()
            assert_threads_ended(before, "a random point")
    finally:
        signal.signal(signal.SIGUSR1, previous)
    return interrupts


def _signal_after(is_over, seconds):
    if not is_over.wait(seconds):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)


def left_open():
    """Returns the threads of this package, and the open descriptors with what they are open on."""
    return _threads(), _descriptors()


def _threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("orbax_t5x")}


def _descriptors():
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add((int(number), os.readlink(f"/proc/self/fd/{number}")))
    return found


# Pools that live as long as the process.
_POOLS = ("orbax_t5x-read_", "orbax_t5x-help_", "orbax_t5x-get_", "orbax_t5x-wait_")


def assert_nothing_left(before, where):
    """Waits for threads that are ending; asserts that none is left, nor a descriptor."""
    if left_open() == before:
        return
    assert_threads_ended(before, where)
    left = {path for _, path in _descriptors() - before[1]}
    assert not left, f"{left} are left by an interrupt at {where}"


def assert_threads_ended(before, where):
    """Waits for threads that are ending. A descriptor may be left by an interrupt right after `os.open`."""
    gc.collect()  # an exception holds the frames that it left
    for thread in _threads() - before[0]:
        # One that was interrupted in `Thread.start` may never have become a thread; Python lists it for ever.
        if not thread.name.startswith(_POOLS) and thread._started.wait(1):
            thread.join(60)
            assert not thread.is_alive(), f"{thread.name} is left by an interrupt at {where}"
