"""Reads boxes of nodes outside a plan, for `View.get()`.

Leaves are read on the read thread of the process (`concurrency`). Memory: the buffers given, what lowering needs
beside them, nothing else. Checksums of what is read are checked ("touched").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from orbax_t5x.concurrency import run_on_read_thread, wait_all
from orbax_t5x.lazy.box import Box
from orbax_t5x.lazy.leaf import Leaf, Request
from orbax_t5x.lazy.node import Lowering, Node
from orbax_t5x.lazy.read_stats import ReadStats, Verify
from orbax_t5x.lazy.value import ValueLeaf
from orbax_t5x.storage.memory import naming_memory_errors


def group_reads(reads: Iterable[tuple[Leaf, Request]]) -> list[tuple[Leaf, list[Request]]]:
    """Groups requests by leaf, leaves in order of their first request."""
    groups: dict[Leaf, list[Request]] = {}
    for leaf, request in reads:
        groups.setdefault(leaf, []).append(request)
    return list(groups.items())


async def read_leaves(groups: Sequence[tuple[Leaf, list[Request]]], stats: ReadStats) -> None:
    """Reads and verifies leaves at the same time; the first failure cancels the others and is raised."""
    await wait_all(_read_leaf(leaf, requests, stats) for leaf, requests in groups)


async def _read_leaf(leaf: Leaf, requests: list[Request], stats: ReadStats) -> None:
    await leaf.read_into(requests, stats)
    await leaf.verify_checksum(stats, stats.ranges(leaf))


def read_boxes(items: Iterable[tuple[Node, Box, np.ndarray]], verify: Verify = "touched") -> ReadStats:
    """Fills each buffer with a box of a node, reading every leaf once; returns what was read."""
    stats = ReadStats(verify)
    lowered = [(node.leaves()[0], _lower(node, box, out)) for node, box, out in items]
    groups = group_reads(read for _, one in lowered for read in one.reads)
    stored: list[tuple[Leaf, list[Request]]] = []
    for leaf, requests in groups:
        if isinstance(leaf, ValueLeaf):
            # Constants are in memory: nothing to wait for, nothing to check.
            leaf.read_blocking(requests, stats)
        else:
            stored.append((leaf, requests))
    if stored:
        run_on_read_thread(read_leaves(stored, stats))
    for leaf, one in lowered:
        with naming_memory_errors(leaf.path, leaf.name):
            for finish in one.finish:
                finish()
    return stats


def _lower(node: Node, box: Box, out: np.ndarray) -> Lowering:
    leaves = node.leaves()
    if not out.size:
        # No leaf is read, so no unreadable one would raise its error.
        for leaf in leaves:
            leaf.raise_error()
    with naming_memory_errors(leaves[0].path, leaves[0].name):
        return node.lower(box, out)
