"""Do the parts that were read, by all processes together, add up to the checksum of the whole? Pure, on integers.

Parts may come in any order, twice, or overlap (replicas read what others read). A part counts as verified when it lies
on a chain of parts, each beginning where the one before ends, from the first byte to the last; wherever two chains meet
they must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from orbax_t5x.lazy.read_stats import ChecksummedRange
from orbax_t5x.storage import crc32c as _crc


class Coverage(NamedTuple):
    """What parts say together.

    Attributes:
      crc: of the whole, or None where no chain of parts reaches from end to end.
      complete: every part lies on such a chain.
      conflict: the range of bytes for which two readings gave different checksums, or None.
    """

    crc: int | None
    complete: bool
    conflict: tuple[int, int] | None = None


def cover(parts: Sequence[ChecksummedRange], size: int) -> Coverage:
    """What `parts` say about `size` bytes."""
    if not size:
        return Coverage(0, True)
    if len(parts) == 1 and (parts[0].start, parts[0].stop) == (0, size):
        return Coverage(parts[0].crc, True)
    if not parts:
        return Coverage(None, False)
    table = np.asarray(parts, np.int64)
    table = table[np.lexsort((table[:, 1], table[:, 0]))]
    again = np.all(table[1:, :2] == table[:-1, :2], axis=1)
    differ = np.flatnonzero(again & (table[1:, 2] != table[:-1, 2]))
    if differ.size:
        start, stop = table[differ[0], :2].tolist()
        return Coverage(None, False, (start, stop))
    table = table[np.concatenate([[True], ~again])]
    starts, stops, crcs = table.T
    if starts[0] == 0 and stops[-1] == size and np.array_equal(stops[:-1], starts[1:]):
        return Coverage(_crc.combine(crcs, stops - starts), True)
    return _chains(table.tolist(), size)


def _chains(parts: list[list[int]], size: int) -> Coverage:
    """The general case: checksums of all prefixes that chains reach; parts are sorted by start."""
    known = {0: 0}
    for start, stop, crc in parts:
        if start not in known:
            continue
        value = _crc.combine([known[start], crc], [start, stop - start])
        if known.setdefault(stop, value) != value:
            return Coverage(None, False, (start, stop))
    leads_on = {size}
    for start, stop, _ in sorted(parts, key=lambda part: part[1], reverse=True):
        if stop in leads_on:
            leads_on.add(start)
    complete = all(start in known and stop in leads_on for start, stop, _ in parts)
    return Coverage(known.get(size), complete and size in known)


def uncovered(parts: Sequence[ChecksummedRange], size: int) -> list[tuple[int, int]]:
    """The byte ranges that no part covers."""
    holes: list[tuple[int, int]] = []
    reached = 0
    for start, stop, _ in sorted(parts):
        if start > reached:
            holes.append((reached, start))
        reached = max(reached, stop)
    if reached < size:
        holes.append((reached, size))
    return holes
