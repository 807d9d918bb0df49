"""Reads views outside a plan: what `View.get()` does.

One event loop in a thread of its own serves the process; it is made on first use and again after a fork. Memory: the
buffers given, what lowering needs beside them, nothing else. Checksums of what is read are checked ("touched").
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from orbax_t5x.concurrency import ReadThread
from orbax_t5x.lazy.box import Box
from orbax_t5x.lazy.leaf import Leaf, Request
from orbax_t5x.lazy.read_stats import ReadStats, Verify

if TYPE_CHECKING:
    from orbax_t5x.lazy.view import View


class _Shared:
    """The read thread of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = -1
        self._thread: ReadThread | None = None

    def get(self) -> ReadThread:
        with self._lock:
            if self._thread is None or self._pid != os.getpid():
                if self._pid == -1:
                    # A child may be forked while another thread holds the lock, which nobody would ever release there.
                    os.register_at_fork(after_in_child=self._forget)
                self._thread, self._pid = ReadThread(), os.getpid()
            return self._thread

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._thread = None


_shared = _Shared()


def run_on_read_thread(coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine to its end on the read thread of the process, or, called from that thread, on another."""
    thread = _shared.get()
    if not thread.is_current():
        thread.run(coroutine)
        return
    # An asynchronous get_fn that itself reads a lazy array: waiting for our own loop would never end.
    own = ReadThread()
    try:
        own.run(coroutine)
    finally:
        own.close()


def group_reads(reads: Iterable[tuple[Leaf, Request]]) -> list[tuple[Leaf, list[Request]]]:
    """The requests of each leaf together, leaves in order of their first request."""
    groups: dict[int, tuple[Leaf, list[Request]]] = {}
    for leaf, request in reads:
        groups.setdefault(id(leaf), (leaf, []))[1].append(request)
    return list(groups.values())


async def read_leaves(groups: Sequence[tuple[Leaf, list[Request]]], stats: ReadStats) -> None:
    """Reads and verifies leaves at the same time; the first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(_read_leaf(leaf, requests, stats)) for leaf, requests in groups]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def _read_leaf(leaf: Leaf, requests: list[Request], stats: ReadStats) -> None:
    await leaf.read_into(requests, stats)
    await leaf.verify_checksum(stats, stats.ranges(leaf))


def read_views(items: Iterable[tuple[View, Box, np.ndarray]], verify: Verify = "touched") -> ReadStats:
    """Fills each `out` with a box of a view; every leaf is asked once for all of them.

    Returns:
      What was read.
    """
    stats = ReadStats(verify)
    lowered = [view.lower(box, out) for view, box, out in items]
    groups = group_reads(read for one in lowered for read in one.reads)
    if all(leaf.is_value for leaf, _ in groups):
        # Constants are in memory: nothing to wait for, nothing to check.
        for leaf, requests in groups:
            leaf.read_blocking(requests, stats)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        run_on_read_thread(read_leaves(groups, stats))
    for one in lowered:
        for finish in one.finish:
            finish()
    return stats
