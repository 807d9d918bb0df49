"""Blocking work on a few threads, started on first use; no caller ever waits for work that nobody has begun.

A read of one large leaf is cut into jobs. The calling thread takes jobs too, and waits only for those that a helper has
begun, so that calls from within a helper thread cannot starve each other.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

_Result = TypeVar("_Result")

# Reads release the GIL and checksums do not: beyond a few threads nothing is gained from the page cache, and a disk or
# a network file system sees enough requests in flight because several leaves are read at once.
_HELPERS = 3
# Threads for `read_into`, which may wait on a slow file system while others go on.
_READERS = 8


@functools.lru_cache(maxsize=4)
def _pool(kind: str, pid: int) -> concurrent.futures.ThreadPoolExecutor:
    """A pool of this process; a forked child has another pid and gets its own."""
    del pid
    threads = _HELPERS if kind == "help" else _READERS
    return concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix=f"orbax_t5x-{kind}")


def reader_pool() -> concurrent.futures.ThreadPoolExecutor:
    """Where event loops put blocking reads."""
    return _pool("read", os.getpid())


class _Shared(Generic[_Result]):
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
    """The results of jobs, in any order; helpers take some. An error is raised once no job is running any more."""
    jobs = iter(jobs)
    first = list(itertools.islice(jobs, 2))
    if len(first) < 2:
        return [job() for job in first]
    shared = _Shared(itertools.chain(first, jobs))
    helpers = [_pool("help", os.getpid()).submit(shared.work) for _ in range(_HELPERS)]
    try:
        shared.work()
    finally:
        begun = [helper for helper in helpers if not helper.cancel()]
        concurrent.futures.wait(begun)
    for helper in begun:
        helper.result()
    return shared.results
