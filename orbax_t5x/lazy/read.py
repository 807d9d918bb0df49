"""Reads of many leaves, for executions and for `View.get()`.

Small leaves that are near in a file are read by windows of it (`files.windows`), in the order of the file, with one
proof that it has not changed. Outside a plan, leaves are read on the read thread of the process (`concurrency`).
Memory: the buffers given, what lowering needs beside them, one window per thread. Checksums of what `View.get()` reads
are checked ("touched").
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from orbax_t5x.concurrency import reader_pool, run_in_pool, run_on_read_thread, wait_all, waiting_pool
from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.files.interface import StoredBytes
from orbax_t5x.files.memory import empty_array, naming_memory_errors
from orbax_t5x.files.windows import MAX_GAP_BYTES, holding, read_windows, windows_of
from orbax_t5x.lazy.box import Box, box_shape
from orbax_t5x.lazy.leaf import BlockingLeaf, HeldRead, Leaf, Request
from orbax_t5x.lazy.node import Lowering, Node
from orbax_t5x.lazy.read_stats import ReadStats, Verify, note_read
from orbax_t5x.lazy.value import ValueLeaf

# Larger leaves are read straight into their buffers: a copy would cost more than a read of their own.
_SHARED_BYTES = 1 << 18

LeafReads = tuple[Leaf, list[Request]]
"""A leaf, with all that is wanted of it."""


def group_reads(reads: Iterable[tuple[Leaf, Request]]) -> list[LeafReads]:
    """Groups requests by leaf, leaves in order of their first request."""
    groups: dict[Leaf, list[Request]] = {}
    for leaf, request in reads:
        groups.setdefault(leaf, []).append(request)
    return list(groups.items())


async def read_leaves(groups: Sequence[LeafReads], stats: ReadStats) -> None:
    """Reads and verifies leaves at the same time."""
    await read_all(groups, stats)
    await wait_all(leaf.verify_checksum(stats, stats.ranges(leaf)) for leaf, _ in groups)


async def read_all(reads: Iterable[LeafReads], stats: ReadStats) -> None:
    """Reads leaves at the same time, without verification."""
    neighbours, rest = _neighbours(reads)
    together = [
        run_in_pool(waiting_pool() if file.is_remote else reader_pool(), _read_neighbours, file, rows, stats)
        for file, rows in neighbours
    ]
    await wait_all([*together, *[leaf.read_into(requests, stats) for leaf, requests in rest]])


def read_all_blocking(reads: Iterable[LeafReads], stats: ReadStats, is_stopped: Callable[[], bool]) -> bool:
    """Does `read_all` for blocking leaves, in this thread."""
    neighbours, rest = _neighbours(reads)
    for file, rows in neighbours:
        if is_stopped():
            return False
        _read_neighbours(file, rows, stats)
    for leaf, requests in rest:
        if is_stopped():
            return False
        assert isinstance(leaf, BlockingLeaf), "all leaves here block"
        leaf.read_blocking(requests, stats)
    return True


class _Row(NamedTuple):
    """Bytes [start, stop) of a file, with the leaf and its requests."""

    start: int
    stop: int
    leaf: BlockingLeaf
    requests: list[Request]


def _neighbours(reads: Iterable[LeafReads]) -> tuple[list[tuple[StoredBytes, list[_Row]]], list[LeafReads]]:
    """Divides reads into small whole leaves, by file, and the rest."""
    by_file: dict[StoredBytes, list[_Row]] = {}
    rest: list[LeafReads] = []
    for leaf, requests in reads:
        extent = leaf.extent if isinstance(leaf, BlockingLeaf) and leaf.error is None else None
        if extent is not None and _is_shared(leaf, extent.stop - extent.start, requests):
            assert isinstance(leaf, BlockingLeaf)
            by_file.setdefault(extent.file, []).append(_Row(extent.start, extent.stop, leaf, requests))
        else:
            rest.append((leaf, requests))
    for file, rows in list(by_file.items()):
        if len(rows) == 1:
            del by_file[file]
            rest.append((rows[0].leaf, rows[0].requests))
    return list(by_file.items()), rest


def _is_shared(leaf: Leaf, size: int, requests: Sequence[Request]) -> bool:
    """Tests if a leaf is small and mostly wanted."""
    if size > _SHARED_BYTES:
        return False
    if requests[0].out.shape == leaf.shape:
        return True
    return size - leaf.bytes_of(tuple([request.box for request in requests])) < MAX_GAP_BYTES


def _read_neighbours(file: StoredBytes, rows: Sequence[_Row], stats: ReadStats) -> None:
    """Reads small leaves of a file by windows.

    A window that cannot be read is read again leaf by leaf, so that the error names the right one.
    """
    windows = deque(windows_of([row[:2] for row in rows]))
    first = rows[0].leaf.name
    try:
        for window, data in read_windows(file, list(windows), leaf=first):
            wanted, covered, end = 0, 0, window.start
            with holding(file, window.start, data):
                alike: dict[type[BlockingLeaf], list[HeldRead]] = {}
                for number in window.members:
                    start, stop, leaf, requests = rows[number]
                    held = HeldRead(leaf, requests, data[start - window.start : stop - window.start])
                    alike.setdefault(type(leaf), []).append(held)
                    covered += max(0, stop - max(start, end))
                    end = max(end, stop)
                for kind, reads in alike.items():
                    wanted += kind.read_held(reads, stats)
            stats.count(wanted, window.size - covered)
            windows.popleft()
    except CorruptCheckpointError as error:
        file.check_unchanged(leaf=error.leaf)
        for window in windows:
            for number in window.members:
                rows[number].leaf.read_blocking(rows[number].requests, stats)
        raise
    stats.prove_unchanged(file, leaf=first)


def read_boxes(items: Iterable[tuple[Node, Box, np.ndarray]], verify: Verify = "touched") -> ReadStats:
    """Fills buffers with boxes of a node, each leaf read once."""
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
        stats.check_watched()
        note_read(stats)
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


async def read_block(
    node: Node, box: Box, stats: ReadStats, snapshots: Mapping[Leaf, Leaf] | None = None
) -> np.ndarray:
    """Reads a box of a node into a new buffer."""
    first = node.leaves()[0]
    with naming_memory_errors(first.path, first.name):
        out = empty_array(box_shape(box), node.dtype)
        lowered = node.lower(box, out)
    reads = group_reads(lowered.reads)
    await read_all([((snapshots or {}).get(leaf, leaf), requests) for leaf, requests in reads], stats)
    if lowered.finish:
        await run_in_pool(reader_pool(), _finish, lowered.finish)
    return out


def _finish(steps: Sequence[Callable[[], object]]) -> None:
    for step in steps:
        step()
