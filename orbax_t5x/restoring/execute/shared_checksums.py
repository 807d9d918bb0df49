"""Gathers the checksums of the ranges that each process read, so that all processes together verify what they cover.

Six numbers for each range, in one small all-gather.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orbax_t5x.lazy import ReadStats
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.lazy.read_stats import ChecksummedRange
from orbax_t5x.multihost.collectives import gather_bytes
from orbax_t5x.readers.ranges.coverage import fold_columns

_COLUMNS = 6  # leaf, start, stop, crc, stride, times


def gather_checksums(
    stats: ReadStats, leaves: Sequence[Leaf], *, error: Exception | None, path: str | None
) -> dict[Leaf, list[ChecksummedRange]]:
    """Gathers the checksummed ranges of all processes, by this process's leaf.

    Every process must call it, also one whose reading failed with `error`: the others would wait for it.
    """
    # What `verify="full"` has to read in addition is only seen in the ranges themselves.
    ranges = [stats.ranges(leaf) for leaf in leaves]
    if stats.verify != "full":
        ranges = [
            fold_columns(found, checksums.kind) if (checksums := leaf.checksums) is not None else []
            for leaf, found in zip(leaves, ranges, strict=True)
        ]
    numbers = [(index, *one) for index, found in enumerate(ranges) for one in found]
    mine = np.asarray(numbers, np.uint64).reshape(-1, _COLUMNS)
    gathered: dict[Leaf, list[ChecksummedRange]] = {}
    for sent in gather_bytes(mine.tobytes(), error, path):
        rows: list[list[int]] = np.frombuffer(sent, np.uint64).reshape(-1, _COLUMNS).tolist()
        for index, *one in rows:
            gathered.setdefault(leaves[index], []).append(ChecksummedRange(*one))
    return gathered
