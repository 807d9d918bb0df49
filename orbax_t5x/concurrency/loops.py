"""Event loops and blocking calls in threads of their own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, Self, TypeVar

from orbax_t5x.concurrency.carried import first_failure
from orbax_t5x.errors import CheckpointIOError

_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")

# How late a signal, or the end of a thread, may be noticed. Lower: more wake-ups of a caller that waits for long.
_POLL_SECS = 0.2
# For so long after an interrupt further interrupts wait for the end of what was cancelled; then the next is raised at
# once, because a disk or a server may never answer.
_PATIENCE_SECS = 10.0
# A call from another thread ends as soon as that thread gets the interpreter's lock.
_CALL_SECS = 0.0005


class Latch:
    """Event that an exception of a signal handler cannot break.

    `threading.Event.wait` gives its lock back and takes it again: an exception between the two makes it raise "release
    unlocked lock" instead. Here each step is one call of the interpreter.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Ends all waits; only a single thread may call this."""
        if not self._is_set:
            self._is_set = True
            self._lock.release()

    def is_set(self) -> bool:
        """Tests whether the latch was set."""
        return self._is_set

    def wait(self, timeout: float = _POLL_SECS) -> bool:
        """Waits for some seconds at most; returns whether the latch is set."""
        if not self._is_set and self._lock.acquire(timeout=timeout):
            self._lock.release()
        return self._is_set


def wait_undisturbed(is_over: Callable[[], bool]) -> None:
    """Waits to the end although signal handlers raise."""
    given_up: list[bool] = []
    # Where one wait handles an interrupt, the next may come: there is always a block around that waits on.
    try:
        try:
            _wait_on(is_over, given_up)
        finally:
            _wait_on(is_over, given_up)
    finally:
        _wait_on(is_over, given_up)


def _wait_on(is_over: Callable[[], bool], given_up: list[bool]) -> None:
    interrupt: BaseException | None = None
    began = 0.0
    while True:
        try:
            while not given_up and not is_over():
                pass
            break
        except BaseException as error:
            began = began or time.monotonic()
            interrupt = interrupt or error
            if time.monotonic() - began > _PATIENCE_SECS:
                given_up.append(True)
    try:
        if interrupt is not None:
            raise interrupt
    finally:
        del interrupt  # whose traceback holds this frame


class _EventLoop(asyncio.SelectorEventLoop):
    """Event loop that ignores callbacks after it was closed.

    A future of TensorStore that is cancelled in the moment of its completion calls its loop nevertheless, as soon as
    its thread gets the interpreter's lock, and the loop may be closed by then. Python ends a native thread that waits
    for the lock at the exit, which aborts the process: `wait_for_calls` waits for such threads first.
    """

    def __init__(self) -> None:
        super().__init__()
        # By threads; to set and to pop an item is atomic.
        self._calls: dict[int, None] = {}

    def wait_for_calls(self) -> None:
        """Waits until no other thread is in `call_soon_threadsafe`."""
        deadline = time.monotonic() + _PATIENCE_SECS
        while self._calls and time.monotonic() < deadline:
            time.sleep(_CALL_SECS)

    def call_soon_threadsafe(self, callback: Any, *arguments: Any, context: Any = None) -> asyncio.Handle:
        """Has a function called in the loop, or not at all."""
        try:
            self._calls[threading.get_ident()] = None
            return super().call_soon_threadsafe(callback, *arguments, context=context)
        except RuntimeError:
            if not self.is_closed():
                raise
            handle = asyncio.Handle(callback, arguments, self, context)
            handle.cancel()
            return handle
        finally:
            self._calls.pop(threading.get_ident(), None)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # made in part only: the process was short of descriptors
            super().__del__()


def _new_event_loop() -> _EventLoop:
    try:
        return _EventLoop()
    except OSError as error:
        message = f"the event loop that reads cannot be made: {error.strerror}"
        raise CheckpointIOError(message, errno=error.errno) from error


class _Serving:
    """Event loop that a thread makes, serves and closes.

    No interrupt of another thread can stop it half-way.

    `begun` is set when the loop is made, or cannot be made (`error`); `ended` when the thread has nothing left to do.
    """

    def __init__(self) -> None:
        self.loop: _EventLoop | None = None
        self.error: BaseException | None = None
        self.begun = Latch()
        self.ended = Latch()
        self.is_closing = False

    def serve(self) -> None:
        try:
            try:
                self.loop = loop = _new_event_loop()
            except BaseException as error:
                self.error = error
                return
            finally:
                self.begun.set()
            while not self.is_closing:
                # A task that fails with KeyboardInterrupt or SystemExit ends the loop, and a user's coroutine may stop
                # it. What is left to do in it is still there.
                with contextlib.suppress(BaseException):
                    loop.run_forever()
            # Of a call whose caller was interrupted while it waited for the end.
            while tasks := asyncio.all_tasks(loop):
                for task in tasks:
                    task.cancel()
                with contextlib.suppress(BaseException):
                    loop.run_until_complete(asyncio.wait(tasks))
            loop.wait_for_calls()
            loop.close()
        finally:
            self.ended.set()

    def stop(self) -> None:
        """Ends the thread without waiting."""
        self.is_closing = True
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self.loop.stop)


class _Call:
    """Coroutine that an event loop runs for another thread.

    Its methods are called in the loop.

    The end is signalled by the task, not by the coroutine: one that is cancelled before its first step never runs.
    `is_wanted` is set to False by a caller that is interrupted. The loop looks at it several times a second: the
    caller's next step, to wake the loop, may be interrupted, too.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, None]):
        self.ended = Latch()
        self.is_wanted = True
        self.failures: list[BaseException] = []
        self._coroutine = coroutine
        self._task: asyncio.Task[None] | None = None
        self._is_cancelled = False
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        if self.ended.is_set():  # cancelled before
            return
        self._task = asyncio.get_running_loop().create_task(self._coroutine)
        self._task.add_done_callback(self._end)
        self._look()

    def _look(self) -> None:
        if not self.is_wanted:
            self.cancel()
        elif self._task is not None:
            self._timer = asyncio.get_running_loop().call_later(_POLL_SECS, self._look)

    def cancel(self) -> None:
        if self._task is None and not self.ended.is_set():  # it has not begun, and never will
            self._coroutine.close()
            self.ended.set()
        elif self._task is not None and not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()

    def _end(self, task: asyncio.Task[None]) -> None:
        self._task = None  # which holds the exception, and so its frames
        if self._timer is not None:
            self._timer.cancel()
        try:
            error = task.exception()
        except asyncio.CancelledError as cancelled:
            error = cancelled
        if error is not None:
            self.failures.append(error)
        del task, error
        self.ended.set()


class LoopThread:
    """Event loop in a thread that runs coroutines for other threads.

    Never the caller's loop or thread: it works where a loop is already running, and no coroutine that holds arrays is
    ever handed to `asyncio.run` (whose runner formats the finished task, and so the arrays, on exit).

    The thread ends after `close`, and when nothing refers to this object any more: an interrupt may come before the
    first line that could close it, or instead of the last.
    """

    def __init__(self, name: str = "orbax_t5x-read") -> None:
        """Begins a thread."""
        self._serving = _Serving()
        # `Thread.is_alive` and `join` take a living thread for an ended one when an interrupt comes in them.
        self._thread = threading.Thread(target=self._serving.serve, name=name, daemon=True)
        self._thread.start()
        while not self._serving.begun.wait():
            pass
        if self._serving.loop is None:
            raise self._serving.error or RuntimeError("the thread that reads has ended at once")
        self._loop = self._serving.loop

    def is_current(self) -> bool:
        """Tests if the caller runs on this thread."""
        return threading.current_thread() is self._thread

    def is_alive(self) -> bool:
        """Tests whether the thread still serves."""
        return not self._serving.ended.is_set()

    def run(self, coroutine: Coroutine[Any, Any, None], *, wait_for_cancelled: bool = True) -> None:
        """Runs a coroutine to its end and raises its exception."""
        call = _Call(coroutine)
        try:
            self._loop.call_soon_threadsafe(call.begin)
            while not call.ended.wait():
                if not self.is_alive() and not call.ended.is_set():
                    raise self._has_ended()
        except BaseException:
            call.is_wanted = False  # first, in one instruction: a signal handler cannot come before it
            self._loop.call_soon_threadsafe(call.cancel)
            if wait_for_cancelled:
                with contextlib.suppress(BaseException):  # the first interrupt is raised below
                    wait_undisturbed(lambda: call.ended.wait() or not self.is_alive())
            if not self.is_alive():
                coroutine.close()
            raise
        if call.failures:
            failure = first_failure(call.failures.pop())
            is_closed = self._serving.is_closing and isinstance(failure, asyncio.CancelledError)
            raise self._has_ended() if is_closed else failure

    def begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Begins a coroutine that handles its own exceptions; `close` cancels it."""
        asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _has_ended(self) -> RuntimeError:
        return RuntimeError("the thread that reads has ended before this was read")

    def close(self) -> None:
        """Stops the loop, cancels its work and ends the thread."""
        self._serving.stop()
        wait_undisturbed(self._serving.ended.wait)
        self._thread.join()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # an interrupt came before its first attribute
            self._serving.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
