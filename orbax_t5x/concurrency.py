"""Work beside the caller's thread: event loops in threads, pools of threads, and waiting for several things at once.

Three rules hold for all of it. No function of a user can stop the machinery: what it raises is carried to the caller as
a value, because an event loop ends on KeyboardInterrupt and SystemExit, takes CancelledError for its own, and cannot
store StopIteration. No wait is one long wait: a caller wakes every `_POLL_SECS`, notices signals, and notices when the
thread that it waits for has ended. And threads do not survive a fork: a child forgets them all and makes new ones on
first use. No thread is made at import.

One pool is made elsewhere: the workers of a restore (`restoring.execute.executor`) are as many as its plan can use, and
end with it.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import functools
import itertools
import os
import queue
import threading
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any, Generic, ParamSpec, Self, TypeVar, cast

from orbax_t5x.errors import CheckpointError, CheckpointIOError

_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")

# How late a signal, or the end of a thread, may be noticed. Lower: more wake-ups of a caller that waits for long.
_POLL_SECS = 0.2
# Reads release the GIL and checksums do not: beyond a few threads nothing is gained from the page cache, and a disk or
# a network file system sees enough requests in flight because several leaves are read at once.
_HELPER_THREADS = 3
# Threads in which event loops put blocking reads, which may wait on a slow file system while others go on.
_READER_THREADS = 8
# Users' functions block on storage, not on a core; more waits overlap, each at the cost of one array in memory.
_FUNCTION_THREADS = 16


# An event loop's own: those of its selector and of the pair of sockets that wakes it.
_LOOP_DESCRIPTORS = 3


class CarriedError(Exception):
    """Carries an exception through an event loop that would not survive it.

    Attributes:
      error: what the caller is to see.
    """

    def __init__(self, error: BaseException):
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


def as_carried(error: BaseException) -> Exception:
    """An exception as one that event loops and futures pass on unchanged."""
    if isinstance(error, StopIteration):
        # Python itself turns a StopIteration that leaves a coroutine into a RuntimeError (PEP 479).
        failure = RuntimeError("a function raised StopIteration")
        failure.__cause__ = error
        return failure
    return error if isinstance(error, Exception) else CarriedError(error)


def first_failure(error: BaseException) -> BaseException:
    """What the caller is to see of a failure: of a group the first that names a leaf, else the first."""
    flat = list(_leaves_of(error))
    return next((failure for failure in flat if isinstance(failure, CheckpointError)), flat[0])


def _leaves_of(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        for member in group.exceptions:
            yield from _leaves_of(member)
    elif isinstance(error, CarriedError):
        yield from _leaves_of(error.error)
    else:
        yield error


async def carry(awaitable: Awaitable[_Result]) -> _Result:
    """Awaits what a user's code made; what it raises passes through event loops of ours.

    Raises:
      CancelledError: this task was cancelled. One that the user's code raised by itself is carried like the rest.
    """
    try:
        return await awaitable
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise as_carried(error) from None
    except BaseException as error:
        carried = as_carried(error)
        if carried is error:
            raise
        raise carried from carried.__cause__


async def run_in_pool(
    pool: concurrent.futures.Executor | None,
    function: Callable[_Arguments, _Result],
    *arguments: _Arguments.args,
    **keywords: _Arguments.kwargs,
) -> _Result:
    """Awaits a blocking call in a pool of threads (None: the loop's own); what it raises is carried.

    Cancelling does not stop a call that has begun.
    """
    loop = asyncio.get_running_loop()
    result, error = await loop.run_in_executor(pool, functools.partial(_outcome, function, *arguments, **keywords))
    if error is not None:
        raise error
    return result


def call_carried(
    function: Callable[_Arguments, _Result], *arguments: _Arguments.args, **keywords: _Arguments.kwargs
) -> _Result:
    """Calls a user's function on an event loop; what it raises is carried."""
    result, error = _outcome(function, *arguments, **keywords)
    if error is not None:
        raise error
    return result


def _outcome(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> tuple[Any, Exception | None]:
    try:
        return function(*arguments, **keywords), None
    except BaseException as error:
        return None, as_carried(error)


async def wait_all(coroutines: Iterable[Coroutine[Any, Any, Any]] | AsyncIterable[Coroutine[Any, Any, Any]]) -> None:
    """Awaits coroutines together; the first failure cancels the rest, and is raised when all have ended.

    Args:
      coroutines: each is begun as it is taken; an asynchronous iterable may wait before it gives the next.
    """
    failure: BaseException | None = None
    cancelled: list[asyncio.Task[Any]] = []

    def note_end(task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            cancelled.append(task)

    def begin(group: asyncio.TaskGroup, coroutine: Coroutine[Any, Any, Any]) -> None:
        group.create_task(coroutine).add_done_callback(note_end)

    try:
        async with asyncio.TaskGroup() as group:
            if isinstance(coroutines, AsyncIterable):
                async for coroutine in coroutines:
                    begin(group, coroutine)
            else:
                for coroutine in coroutines:
                    begin(group, coroutine)
    except BaseExceptionGroup as failures:
        failure = first_failure(failures)
    if failure is None and cancelled:
        # A task group takes a task that was cancelled from elsewhere for one that is done.
        failure = asyncio.CancelledError("a task was cancelled from within")
    if failure is not None:
        raise as_carried(failure)


class Budget:
    """Bytes in flight, granted first in, first out; a request above the whole budget waits until it is alone.

    For coroutines of one event loop.

    Attributes:
      limit: the whole budget.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._used = 0
        self._waiting: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()

    async def take(self, size: int) -> None:
        """Waits until `size` bytes may be in flight."""
        if not self._waiting and self._fits(size):
            self._used += size
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, granted))
        await granted

    def give(self, size: int) -> None:
        """Gives a share back."""
        self._used -= size
        while self._waiting and self._fits(self._waiting[0][0]):
            next_size, granted = self._waiting.popleft()
            if not granted.cancelled():
                self._used += next_size
                granted.set_result(None)

    def _fits(self, size: int) -> bool:
        return self._used == 0 or self._used + size <= self.limit


async def await_to_end(awaitable: Awaitable[_Result]) -> _Result:
    """Awaits what goes on although nobody waits for it; a cancellation is raised when it has ended."""

    async def wait() -> _Result:
        return await awaitable

    waiting = asyncio.ensure_future(wait())
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        await asyncio.wait([waiting])
        if not waiting.cancelled():
            waiting.exception()  # nobody else asks for it, and asyncio would complain on standard error
        raise


class CallerThread:
    """Functions that an event loop has run in the thread that waits for it.

    JAX's settings (`enable_x64`, `default_device`, the mesh in use) belong to that thread. What a function raises is
    raised there, so that no exception of a user's callback meets the event loop.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    async def run(
        self, function: Callable[_Arguments, _Result], *arguments: _Arguments.args, **keywords: _Arguments.kwargs
    ) -> _Result:
        """Awaits the result of a call in the caller's thread."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[_Result] = loop.create_future()

        def deliver(value: _Result) -> None:
            if not result.done():
                result.set_result(value)

        def job() -> None:
            loop.call_soon_threadsafe(deliver, function(*arguments, **keywords))

        self._jobs.put(job)
        return await result

    def serve(self, timeout: float) -> None:
        """Runs the next function that comes within `timeout` seconds; what it raises is raised here."""
        try:
            job = self._jobs.get(timeout=timeout)
        except queue.Empty:
            return
        if job is not None:
            job()

    def wake(self) -> None:
        """Ends a wait in `serve`."""
        self._jobs.put(None)


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """An event loop.

    Raises:
      CheckpointIOError: the process is short of descriptors.
    """
    try:
        # A loop that cannot be made to its end complains when it is collected: whether it can is tried first.
        with contextlib.ExitStack() as spare:
            for _ in range(_LOOP_DESCRIPTORS):
                spare.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        return asyncio.new_event_loop()
    except OSError as error:
        message = f"an event loop to read with cannot be made: {error.strerror}"
        raise CheckpointIOError(message, errno=error.errno) from error


class LoopThread:
    """An event loop in a thread of its own, on which coroutines are run for callers of other threads.

    Never the caller's loop or thread: it works where a loop is already running, and no coroutine that holds arrays is
    ever handed to `asyncio.run` (whose runner formats the finished task, and so the arrays, on exit).
    """

    def __init__(self, name: str = "orbax_t5x-read") -> None:
        self._loop = _new_event_loop()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closing:
            # A task that fails with KeyboardInterrupt or SystemExit ends the loop, and a user's coroutine may stop it.
            # What is left to do in it is still there.
            with contextlib.suppress(BaseException):
                self._loop.run_forever()

    def is_current(self) -> bool:
        """Whether the caller runs on this thread, where waiting for it would never end."""
        return threading.current_thread() is self._thread

    def is_alive(self) -> bool:
        """Whether the thread still serves."""
        return self._thread.is_alive() and not self._closing

    def run(
        self,
        coroutine: Coroutine[Any, Any, None],
        *,
        wait_for_cancelled: bool = True,
        caller: CallerThread | None = None,
    ) -> None:
        """Runs a coroutine that returns None to its end, and raises what it raises, never a group.

        Args:
          coroutine: what to run.
          wait_for_cancelled: an interrupt of the caller cancels the coroutine. True: the interrupt is raised when the
            coroutine has ended, and nothing that it was doing goes on. False: at once.
          caller: runs functions for the coroutine in the calling thread. What they raise counts as an interrupt.

        Raises:
          RuntimeError: the thread has ended.
        """
        call = _Call(coroutine, caller)
        try:
            self._loop.call_soon_threadsafe(call.start)
            while not call.ended.wait(_POLL_SECS if caller is None else 0):
                if caller is not None:
                    caller.serve(_POLL_SECS)
                if not self._thread.is_alive() and not call.ended.is_set():
                    raise RuntimeError("the thread that reads has ended before this was read")
        except BaseException:
            if not self._thread.is_alive():
                coroutine.close()
                raise
            self._loop.call_soon_threadsafe(call.cancel)
            while wait_for_cancelled and self._thread.is_alive() and not call.ended.wait(_POLL_SECS):
                pass
            raise
        failure, call.failure = call.failure, None
        if failure is not None:
            try:
                raise first_failure(failure)
            finally:
                del failure

    def close(self) -> None:
        """Stops the loop; the thread ends."""
        self._closing = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class ThreadCall(Generic[_Result]):
    """A blocking call in a thread of its own, which goes on where its caller waits no longer.

    Attributes:
      ended: set when it has ended.
    """

    def __init__(self, function: Callable[[], _Result], name: str):
        self.ended = threading.Event()
        self._function = function
        self._outcome: list[_Result] = []
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            self._outcome.append(self._function())
        except BaseException as error:
            self._error = error
        finally:
            self.ended.set()

    def result(self) -> _Result:
        """What the call returned, once it has ended; raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._outcome[0]


class _Call:
    """A coroutine that runs as a task of a loop of another thread; what it raises is kept as a value.

    Attributes:
      ended: set when it has ended.
      failure: what it raised, if anything.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, None], caller: CallerThread | None):
        self.ended = threading.Event()
        self.failure: BaseException | None = None
        self._coroutine = coroutine
        self._caller = caller
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            await self._coroutine
        except BaseException as error:
            self.failure = error
        finally:
            self.ended.set()
            if self._caller is not None:
                self._caller.wake()


class _ProcessThreads:
    """The threads that live as long as the process, made on first use; a forked child makes its own."""

    def __init__(self) -> None:
        self._is_registered = False
        self._forget()

    def _forget(self) -> None:
        # The lock, too: another thread may hold it at the fork, and would never release it in the child.
        self._lock = threading.Lock()
        self._read_thread: LoopThread | None = None
        self._pools: dict[str, concurrent.futures.ThreadPoolExecutor] = {}

    def _register(self) -> None:
        if not self._is_registered:
            os.register_at_fork(after_in_child=self._forget)
            self._is_registered = True

    def read_thread(self) -> LoopThread:
        with self._lock:
            self._register()
            if self._read_thread is None or not self._read_thread.is_alive():
                self._read_thread = LoopThread()
            return self._read_thread

    def pool(self, name: str, threads: int) -> concurrent.futures.ThreadPoolExecutor:
        with self._lock:
            self._register()
            if name not in self._pools:
                self._pools[name] = concurrent.futures.ThreadPoolExecutor(
                    threads, thread_name_prefix=f"orbax_t5x-{name}"
                )
            return self._pools[name]


_process_threads = _ProcessThreads()


def reader_pool() -> concurrent.futures.ThreadPoolExecutor:
    """Where event loops put blocking reads."""
    return _process_threads.pool("read", _READER_THREADS)


def function_pool() -> concurrent.futures.ThreadPoolExecutor:
    """Where event loops put blocking functions of users."""
    return _process_threads.pool("get", _FUNCTION_THREADS)


def run_on_read_thread(coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine to its end on the read thread of the process, or, called from that thread, on another."""
    thread = _process_threads.read_thread()
    if not thread.is_current():
        thread.run(coroutine, wait_for_cancelled=False)
        return
    # An asynchronous function of a user that itself reads: waiting for its own loop would never end.
    with LoopThread() as own:
        own.run(coroutine)


class _SharedJobs(Generic[_Result]):
    """Jobs that several threads take in order, made as they are taken; the first error stops the rest."""

    def __init__(self, jobs: Iterator[Callable[[], _Result]]):
        self._jobs = jobs
        self._lock = threading.Lock()
        self._stop = False
        self.results: list[_Result] = []

    def work(self) -> None:
        while not self._stop:
            try:
                with self._lock:
                    job = next(self._jobs, None)
                if job is None:
                    return
                self.results.append(job())
            except BaseException:
                self._stop = True
                raise


def run_jobs(jobs: Iterable[Callable[[], _Result]]) -> list[_Result]:
    """The results of blocking jobs, in any order. An error is raised once no job is running any more.

    The calling thread takes jobs, too, and waits only for those that a helper thread has begun, so that calls from
    within a helper thread cannot starve each other.
    """
    jobs = iter(jobs)
    first = list(itertools.islice(jobs, 2))
    if len(first) < 2:
        return [job() for job in first]
    shared = _SharedJobs(itertools.chain(first, jobs))
    pool = _process_threads.pool("help", _HELPER_THREADS)
    helpers = [pool.submit(shared.work) for _ in range(_HELPER_THREADS)]
    try:
        shared.work()
    finally:
        begun = [helper for helper in helpers if not helper.cancel()]
        concurrent.futures.wait(begun)
    for helper in begun:
        helper.result()
    return shared.results
