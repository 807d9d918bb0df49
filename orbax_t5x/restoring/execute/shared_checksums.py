"""Gathers the checksums of the ranges that each process read, so that all processes together verify what they cover.

Six numbers for each range, in one small all-gather. Every process must call it, with the same leaves in the same order,
also one whose reading failed: the others would wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orbax_t5x.lazy import ReadStats
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.lazy.read_stats import ChecksummedRange
from orbax_t5x.multihost.collectives import gather, gather_error
from orbax_t5x.readers.ranges.coverage import fold_columns

_COLUMNS = 6  # leaf, start, stop, crc, stride, times


def gather_parts(
    stats: ReadStats, leaves: Sequence[Leaf], *, error: Exception | None, path: str | None
) -> dict[Leaf, list[ChecksummedRange]]:
    """The parts of all processes, by this process's leaf.

    Args:
      stats: what this process noted.
      leaves: of the plan, in an order that all processes have.
      error: why this process could not read, or None.
      path: of what is being restored, for errors.

    Raises:
      CheckpointError: what another process could not read, as that process has it.
      CheckpointIOError: some process could not go on for another reason, or has died.
    """
    # What `verify="full"` has to read besides is only seen in the parts themselves.
    ranges = [stats.ranges(leaf) for leaf in leaves]
    if stats.verify != "full":
        ranges = [fold_columns(parts) for parts in ranges]
    noted = [(index, *part) for index, parts in enumerate(ranges) for part in parts]
    # Without jax_enable_x64 an all-gather would narrow int64: each number travels as two uint32.
    mine = np.asarray(noted, np.uint64).reshape(-1, _COLUMNS)
    counts_and_failures = gather(np.asarray([len(mine), error is not None], np.uint32), path)
    counts, failures = counts_and_failures[:, 0], np.flatnonzero(counts_and_failures[:, 1]).tolist()
    if failures:
        raise gather_error(failures, error, path)
    longest = int(np.max(counts))
    if not longest:
        return {}
    padded = np.zeros((longest, _COLUMNS), np.uint64)
    padded[: len(mine)] = mine
    gathered = gather(padded.view(np.uint32), path)
    parts: dict[Leaf, list[ChecksummedRange]] = {}
    for count, block in zip(counts, gathered, strict=True):
        rows: list[list[int]] = np.ascontiguousarray(block[: int(count)]).view(np.uint64).tolist()
        for index, *part in rows:
            parts.setdefault(leaves[index], []).append(ChecksummedRange(*part))
    return parts
