"""The threads that live as long as the process, made on first use, and the work that is shared among them."""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, Generic, TypeVar

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


def waiting_pool() -> concurrent.futures.ThreadPoolExecutor:
    """Where event loops put calls that wait for another machine."""
    return _process_threads.pool("wait", _WAITING_THREADS)


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
