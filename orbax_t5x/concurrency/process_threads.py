"""Threads that live as long as the process, and their work."""

from __future__ import annotations

import concurrent.futures
import heapq
import itertools
import os
import threading
from collections.abc import Callable, Coroutine, Hashable, Iterable
from typing import Any, Generic, TypeVar

from orbax_t5x.concurrency.loops import LoopThread

_Key = TypeVar("_Key", bound=Hashable)
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# Reads release the GIL and checksums do not: beyond a few threads nothing is gained from the page cache, and a disk or
# a network file system sees enough requests in flight because several leaves are read at once.
_HELPER_THREADS = 3
# Threads in which event loops put blocking reads, which may wait on a slow file system while others go on.
_READER_THREADS = 8
# Threads in which event loops put calls that wait for another machine and compute next to nothing: fewer would line up
# round trips one behind the other.
_WAITING_THREADS = 128
# Users' functions block on storage, not on a core; more waits overlap, each at the cost of one array in memory.
_FUNCTION_THREADS = 16


class _ProcessThreads:
    """Threads of the process, made on first use.

    They live as long as the process; a forked child makes its own. Without a lock, which a fork or an interrupt could
    leave locked: of two threads or pools that are made at once, one ends when its user has finished.
    """

    def __init__(self) -> None:
        self._is_registered = False
        self._forget()

    def _forget(self) -> None:
        self._read_thread: LoopThread | None = None
        self._pools: dict[str, concurrent.futures.ThreadPoolExecutor] = {}

    def _register(self) -> None:
        if not self._is_registered:
            os.register_at_fork(after_in_child=self._forget)
            self._is_registered = True

    def read_thread(self) -> LoopThread:
        self._register()
        thread = self._read_thread
        if thread is None or not thread.is_alive():
            thread = self._read_thread = LoopThread()
        return thread

    def pool(self, name: str, threads: int) -> concurrent.futures.ThreadPoolExecutor:
        self._register()
        if name not in self._pools:
            made = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix=f"orbax_t5x-{name}")
            self._pools.setdefault(name, made)
        return self._pools[name]


_process_threads = _ProcessThreads()


def reader_pool() -> concurrent.futures.ThreadPoolExecutor:
    """Returns the pool for blocking reads of event loops."""
    return _process_threads.pool("read", _READER_THREADS)


def waiting_pool() -> concurrent.futures.ThreadPoolExecutor:
    """Returns the pool for calls that wait for another machine."""
    return _process_threads.pool("wait", _WAITING_THREADS)


def function_pool() -> concurrent.futures.ThreadPoolExecutor:
    """Returns the pool for blocking functions of users."""
    return _process_threads.pool("get", _FUNCTION_THREADS)


def run_on_read_thread(coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine to its end on the read thread."""
    thread = _process_threads.read_thread()
    if not thread.is_current():
        thread.run(coroutine, wait_for_cancelled=False)
        return
    # An asynchronous function of a user that itself reads: waiting for its own loop would never end.
    with LoopThread() as own:
        own.run(coroutine)


def run_jobs(jobs: Iterable[Callable[[], _Result]]) -> list[_Result]:
    """Runs blocking jobs and returns their results in any order.

    Each job is made when it begins. The first error stops the rest, and is raised once no job is running any more. The
    calling thread takes jobs, too, and waits only for those that a helper thread has begun, so that calls from within a
    helper thread cannot starve each other.
    """
    jobs = iter(jobs)
    first = list(itertools.islice(jobs, 2))
    if len(first) < 2:
        return [job() for job in first]
    pending = itertools.chain(first, jobs)
    results: list[_Result] = []
    failures: list[BaseException] = []
    running: set[object] = set()
    changed = threading.Condition()
    stopped = threading.Event()

    def work(me: object) -> None:
        try:
            while True:
                with changed:
                    running.add(me)
                    job = None if stopped.is_set() else next(pending, None)
                if job is None:
                    return
                results.append(job())
        except BaseException as error:
            failures.append(error)
            stopped.set()
        finally:
            with changed:
                running.discard(me)
                changed.notify_all()

    pool, caller = _process_threads.pool("help", _HELPER_THREADS), object()
    try:
        for _ in range(_HELPER_THREADS):
            pool.submit(work, object())
        work(caller)
    finally:
        # Also where an interrupt came before the first job: a helper that begins from now on takes none.
        stopped.set()
        with changed:
            changed.wait_for(lambda: running <= {caller})
    if failures:
        del failures[1:]
        raise failures.pop()
    return results


class OnceEach(Generic[_Key, _Result]):
    """Results by key that the first thread computes.

    Other threads wait for it; after a failure the next thread tries again.
    """

    def __init__(self) -> None:
        self._results: dict[_Key, concurrent.futures.Future[_Result]] = {}
        self._lock = threading.Lock()

    def get(self, key: _Key, compute: Callable[[], _Result]) -> _Result:
        """Returns the result for a key."""
        if (known := self._results.get(key)) is not None:
            return known.result()
        made: concurrent.futures.Future[_Result] = concurrent.futures.Future()
        with self._lock:
            future = self._results.setdefault(key, made)
        if future is made:
            try:
                made.set_result(compute())
            except BaseException as error:
                with self._lock:
                    del self._results[key]
                made.set_exception(error)
                raise
        return future.result()


def balanced_shares(items: Iterable[_Item], size: Callable[[_Item], int], count: int) -> list[list[_Item]]:
    """Divides items into shares of nearly equal size, always alike."""
    shares: list[list[_Item]] = [[] for _ in range(count)]
    heap = [(0, share) for share in range(count)]
    for item in sorted(items, key=size, reverse=True):
        held, share = heapq.heappop(heap)
        shares[share].append(item)
        heapq.heappush(heap, (held + size(item), share))
    return shares
