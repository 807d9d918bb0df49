"""Checksums of leaves, combined from ranges that were read.

Ranges may come in any order, twice, or overlap. A range counts as verified when it is on a chain of them, each
beginning where the one before ends, from the first byte to the last; wherever two chains meet they must agree.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from orbax_t5x.concurrency import reader_pool, run_in_pool
from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.files.crc import CRC32C, Crc
from orbax_t5x.lazy.leaf import Checksums, Leaf
from orbax_t5x.lazy.read_stats import ChecksummedRange, ReadStats
from orbax_t5x.readers.ranges.byte_range import StoredRange


class Coverage(NamedTuple):
    """Result of combining the checksums of ranges.

    Attributes:
      crc: of the whole, or None where no chain of ranges reaches from end to end.
      complete: every range is on such a chain.
      conflict: the range of bytes for which two readings gave different checksums, or None.
    """

    crc: int | None
    complete: bool
    conflict: tuple[int, int] | None = None


def cover(ranges: Sequence[ChecksummedRange], size: int, kind: Crc = CRC32C) -> Coverage:
    """Combines the checksums of `ranges` of `size` bytes."""
    if not size:
        return Coverage(0, True)
    if len(ranges) == 1 and (ranges[0].start, ranges[0].stop) == (0, size):
        return Coverage(ranges[0].crc, True)
    if not ranges:
        return Coverage(None, False)
    table = np.asarray([one for one in ranges], np.int64)
    table = table[np.lexsort((table[:, 1], table[:, 0]))]
    again = np.all(table[1:, :2] == table[:-1, :2], axis=1)
    differ = np.flatnonzero(again & (table[1:, 2] != table[:-1, 2]))
    if differ.size:
        start, stop = table[differ[0], :2].tolist()
        return Coverage(None, False, (start, stop))
    table = table[np.concatenate([[True], ~again])]
    starts, stops, crcs = table.T
    if starts[0] == 0 and stops[-1] == size and np.array_equal(stops[:-1], starts[1:]):
        return Coverage(kind.combine(crcs, stops - starts), True)
    return _chains(table.tolist(), size, kind)


def _chains(ranges: list[list[int]], size: int, kind: Crc) -> Coverage:
    """Combines ranges in general."""
    known = {0: 0}
    for start, stop, crc in ranges:
        if start not in known:
            continue
        value = kind.combine([known[start], crc], [start, stop - start])
        if known.setdefault(stop, value) != value:
            return Coverage(None, False, (start, stop))
    leads_on = {size}
    for start, stop, _ in sorted(ranges, key=lambda one: one[1], reverse=True):
        if stop in leads_on:
            leads_on.add(start)
    complete = all(start in known and stop in leads_on for start, stop, _ in ranges)
    return Coverage(known.get(size), complete and size in known)


def uncovered(ranges: Sequence[ChecksummedRange], size: int) -> list[tuple[int, int]]:
    """Returns the byte ranges that no range covers."""
    holes: list[tuple[int, int]] = []
    reached = 0
    for start, stop, _ in sorted(ranges):
        if start > reached:
            holes.append((reached, start))
        reached = max(reached, stop)
    if reached < size:
        holes.append((reached, size))
    return holes


class RangeChecksums(Checksums):
    """Checksums of a leaf's byte ranges, joined in order."""

    def __init__(self, leaf: Leaf, stored: Sequence[tuple[StoredRange, int]], kind: Crc = CRC32C):
        self._leaf, self._stored, self.kind = leaf, stored, kind

    async def verify(self, stats: ReadStats, ranges: Sequence[ChecksummedRange]) -> bool:
        starts = list(itertools.accumulate([stored.nbytes for stored, _ in self._stored[:-1]], initial=0))
        own: list[list[ChecksummedRange]] = [[] for _ in starts]
        for one in ranges:
            number = bisect.bisect_right(starts, one.start) - 1
            own[number].append(moved(one, -starts[number]))
        verified = True
        for (stored, crc), read in zip(self._stored, own, strict=True):
            if _verify_range(stored, crc, read, self._leaf.name, self.kind):
                continue
            if stats.verify == "full":
                self._leaf.raise_error()
                await run_in_pool(reader_pool(), _verify_rest, stored, crc, read, self._leaf.name, stats, self.kind)
            else:
                verified = False
        return verified


def moved(one: ChecksummedRange, offset: int) -> ChecksummedRange:
    """Returns the range that begins `offset` bytes later."""
    return one._replace(start=one.start + offset, stop=one.stop + offset)


def _verify_range(range: StoredRange, crc: int, read: Sequence[ChecksummedRange], leaf: str, kind: Crc) -> bool:
    found = cover(read, range.nbytes, kind)
    if found.conflict is not None:
        low, high = found.conflict
        message = f"bytes {low} to {high} of the leaf gave different checksums when read twice; the file is changing"
        raise CorruptCheckpointError(message, path=range.file.path, leaf=leaf)
    if found.crc is not None and found.crc != crc:
        raise CorruptCheckpointError(
            f"its {range.nbytes} bytes at {range.offset} have the {kind.name} {found.crc:#010x}, stored is "
            f"{crc:#010x}; the data are damaged",
            path=range.file.path,
            leaf=leaf,
        )
    return found.complete


def _verify_rest(
    range: StoredRange, crc: int, read: Sequence[ChecksummedRange], leaf: str, stats: ReadStats, kind: Crc
) -> bool:
    """Reads the bytes that no range covers, once, and verifies; blocks."""
    holes = uncovered(read, range.nbytes)
    outcome = range.sum(holes, leaf=leaf)
    stats.count(outcome.wanted)
    stats.prove_unchanged(range.file, leaf=leaf)
    if _verify_range(range, crc, [*read, *outcome.ranges], leaf, kind):
        return True
    # Overlapping ranges of different boundaries have no common checksum: only reading the whole decides.
    outcome = range.sum([(0, range.nbytes)], leaf=leaf)
    stats.count(outcome.wanted)
    return _verify_range(range, crc, outcome.ranges, leaf, kind)
