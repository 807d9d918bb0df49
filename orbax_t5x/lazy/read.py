"""Reads views outside a plan: what `View.get()` does.

Leaves are read on the read thread of the process (`concurrency.py`). Memory: the buffers given, what lowering needs
beside them, nothing else. Checksums of what is read are checked ("touched").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from orbax_t5x.concurrency import run_on_read_thread, wait_all
from orbax_t5x.lazy.box import Box
from orbax_t5x.lazy.leaf import Leaf, Request
from orbax_t5x.lazy.read_stats import ReadStats, Verify

if TYPE_CHECKING:
    from orbax_t5x.lazy.view import View


def group_reads(reads: Iterable[tuple[Leaf, Request]]) -> list[tuple[Leaf, list[Request]]]:
    """The requests of each leaf together, leaves in order of their first request."""
    groups: dict[int, tuple[Leaf, list[Request]]] = {}
    for leaf, request in reads:
        groups.setdefault(id(leaf), (leaf, []))[1].append(request)
    return list(groups.values())


async def read_leaves(groups: Sequence[tuple[Leaf, list[Request]]], stats: ReadStats) -> None:
    """Reads and verifies leaves at the same time; the first failure cancels the others and is raised."""
    await wait_all(_read_leaf(leaf, requests, stats) for leaf, requests in groups)


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
