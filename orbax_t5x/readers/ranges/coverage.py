"""Combines checksums of ranges to the checksum of the whole.

All processes together read the ranges. Pure, on integers.

Ranges may come in any order, twice, or overlap (replicas read what others read). A range counts as verified when it is
on a chain of them, each beginning where the one before ends, from the first byte to the last; wherever two chains meet
they must agree. Columns (`ChecksummedRange.times`) that are side by side are first joined to whole rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from orbax_t5x.files.crc import CRC32C, Crc
from orbax_t5x.lazy.read_stats import ChecksummedRange

# Fewer ranges than this are sent one by one.
_FEW = 16


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
    if any(one.times > 1 for one in ranges):
        columns = [one for one in ranges if one.times > 1]
        joined, rest = _join_columns(columns, kind)
        if isinstance(joined, Coverage):
            return joined
        found = cover([one for one in ranges if one.times == 1] + joined, size, kind)
        return found._replace(complete=found.complete and not rest)
    if not ranges:
        return Coverage(None, False)
    table = np.asarray([one[:3] for one in ranges], np.int64)
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


def fold_columns(ranges: Sequence[ChecksummedRange], kind: Crc = CRC32C) -> list[ChecksummedRange]:
    """Folds plain ranges into columns of many rows."""
    rest = sorted(ranges)
    folded: list[ChecksummedRange] = []
    at = 0
    while at < len(rest):
        row = _row_of_equal(rest, at)
        if len(row) < _FEW:
            folded.append(rest[at])
            at += 1
            continue
        first, stride = row[0], row[1].start - row[0].start
        crcs = np.asarray([one.crc for one in row], np.uint32)
        folded.append(first._replace(crc=kind.combine_spread(crcs, stride), stride=stride, times=len(row)))
        at += len(row)
    return folded


def _row_of_equal(ranges: Sequence[ChecksummedRange], at: int) -> Sequence[ChecksummedRange]:
    """Returns the ranges of equal length and distance from an index."""
    first = ranges[at]
    length = first.stop - first.start
    stride = ranges[at + 1].start - first.start if at + 1 < len(ranges) else 0
    if first.times > 1 or stride <= length:
        return ranges[at : at + 1]
    for after in range(at + 1, len(ranges)):
        start, stop, _, _, times = ranges[after]
        if start - ranges[after - 1].start != stride or stop - start != length or times > 1:
            return ranges[at:after]
    return ranges[at:]


def _join_columns(ranges: Sequence[ChecksummedRange], kind: Crc) -> tuple[list[ChecksummedRange] | Coverage, bool]:
    """Joins columns that fill every stride, or returns a conflict.

    Also returned is whether there were others: those have no checksum together.
    """
    known: dict[tuple[int, int, int, int], int] = {}
    for start, stop, crc, stride, times in ranges:
        if known.setdefault((stride, times, start, stop), crc) != crc:
            return Coverage(None, False, (start, start + (times - 1) * stride + stop - start)), False
    joined: list[ChecksummedRange] = []
    rest = False
    for (stride, times), group in itertools.groupby(sorted(known), key=lambda key: key[:2]):
        begun: list[tuple[int, int]] = []
        for _, _, start, stop in group:
            if begun and start != begun[-1][1]:
                rest, begun = True, []
            begun.append((start, stop))
            first = begun[0][0]
            if stop - first < stride:
                continue
            if stop - first == stride:
                end = first + stride * times
                crc = 0
                for low, high in begun:
                    crc ^= kind.move(known[stride, times, low, high], first + stride - high)
                joined.append(ChecksummedRange(first, end, crc))
            else:
                rest = True
            begun = []
        rest = rest or bool(begun)
    return joined, rest


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
    """Returns the byte ranges that no plain range covers."""
    holes: list[tuple[int, int]] = []
    reached = 0
    for start, stop, *_ in sorted(ranges):
        if start > reached:
            holes.append((reached, start))
        reached = max(reached, stop)
    if reached < size:
        holes.append((reached, size))
    return holes
