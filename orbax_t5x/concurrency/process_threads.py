"""Threads that live as long as the process, made on first use, and the work that is divided between them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, TypeVar

from orbax_t5x.concurrency.loops import LoopThread

_Result = TypeVar("_Result")

# Reads release the GIL and checksums do not: beyond a few threads nothing is gained from the page cache, and a disk or
# a network file system sees enough requests in flight because several leaves are read at once.
_HELPER_THREADS = 3
# Threads in which event loops put blocking reads, which may wait on a slow file system while others go on.
_READER_THREADS = 8
# Threads in which event loops put calls that wait for another machine and compute next to nothing: fewer would line up
# round trips one behind the other.
_WAITING_THREADS = 64
# Users' functions block on storage, not on a core; more waits overlap, each at the cost of one array in memory.
_FUNCTION_THREADS = 16


class _ProcessThreads:
    """Threads that live as long as the process, made on first use; a forked child makes its own."""

    def __init__(self) -> None:
        self._is_registered = False
        self._forget()

    def _forget(self) -> None:
        # The lock, too: another thread may hold it at the fork, and would never release it in the child.
        self._lock = threading.Lock()
        self._read_thread: LoopThread | None = None
        self._pools: dict[str, concurrent.futures.ThreadPoolExecutor] = {}

    @contextlib.contextmanager
    def _locked(self) -> Generator[None, None, None]:
        with self._lock:
            if not self._is_registered:
                os.register_at_fork(after_in_child=self._forget)
                self._is_registered = True
            yield

    def read_thread(self) -> LoopThread:
        with self._locked():
            if self._read_thread is None or not self._read_thread.is_alive():
                self._read_thread = LoopThread()
            return self._read_thread

    def pool(self, name: str, threads: int) -> concurrent.futures.ThreadPoolExecutor:
        with self._locked():
            if name not in self._pools:
                prefix = f"orbax_t5x-{name}"
                self._pools[name] = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix=prefix)
            return self._pools[name]


_process_threads = _ProcessThreads()


def reader_pool() -> concurrent.futures.ThreadPoolExecutor:
    """Returns the pool for blocking reads of event loops."""
    return _process_threads.pool("read", _READER_THREADS)


def waiting_pool() -> concurrent.futures.ThreadPoolExecutor:
    """Returns the pool for calls of event loops that wait for another machine."""
    return _process_threads.pool("wait", _WAITING_THREADS)


def function_pool() -> concurrent.futures.ThreadPoolExecutor:
    """Returns the pool for blocking functions of users."""
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


def run_jobs(jobs: Iterable[Callable[[], _Result]]) -> list[_Result]:
    """Runs blocking jobs, made as they are begun, and returns their results in any order.

    The first error stops the rest, and is raised once no job is running any more. The calling thread takes jobs, too,
    and waits only for those that a helper thread has begun, so that calls from within a helper thread cannot starve
    each other.
    """
    jobs = iter(jobs)
    first = list(itertools.islice(jobs, 2))
    if len(first) < 2:
        return [job() for job in first]
    pending = itertools.chain(first, jobs)
    results: list[_Result] = []
    lock, failed = threading.Lock(), threading.Event()

    def next_job() -> Callable[[], _Result] | None:
        with lock:
            return None if failed.is_set() else next(pending, None)

    def work() -> None:
        try:
            while (job := next_job()) is not None:
                results.append(job())
        except BaseException:
            failed.set()
            raise

    pool = _process_threads.pool("help", _HELPER_THREADS)
    helpers = [pool.submit(work) for _ in range(_HELPER_THREADS)]
    try:
        work()
    finally:
        begun = [helper for helper in helpers if not helper.cancel()]
        concurrent.futures.wait(begun)
    for helper in begun:
        helper.result()
    return results
