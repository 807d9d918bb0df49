"""What processes tell each other during one restore: whether they read what they had to, and checksums of the parts
that they read.

Four bytes of crc and two offsets per part, in one small all-gather. Every process must call it, with the same leaves in
the same order, also one whose reading failed: the others would wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax.experimental import multihost_utils

from orbax_t5x.errors import CheckpointIOError
from orbax_t5x.lazy import ReadStats
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.lazy.read_stats import ChecksummedRange
from orbax_t5x.restoring.execute.heartbeat import call_with_living_peers

_COLUMNS = 4  # leaf, start, stop, crc


def gather(mine: np.ndarray, path: str | None) -> np.ndarray:
    """The arrays of all processes, one row each; every process must call it.

    Args:
      mine: of one shape and dtype in all processes.
      path: of what is being restored, for the error.

    Raises:
      CheckpointIOError: another process does not answer: JAX's runtime notices that one has died, `heartbeat` that one
        was stopped or is parted from the others.
    """
    try:
        rows = call_with_living_peers(lambda: np.asarray(multihost_utils.process_allgather(mine)), path)
    except RuntimeError as error:  # `jax.errors.JaxRuntimeError` is one, and has no type for checkers
        text = " ".join(str(error).split())
        message = f"another process of this restore has died, or cannot be reached: {text}"
        raise CheckpointIOError(message, path=path) from error
    return rows.reshape(-1, *mine.shape)


def gather_parts(
    stats: ReadStats, leaves: Sequence[Leaf], *, failed: bool, path: str | None
) -> dict[Leaf, list[ChecksummedRange]]:
    """The parts of all processes, by this process's leaf.

    Args:
      stats: what this process noted.
      leaves: of the plan, in an order that all processes have.
      failed: whether this process could not read.
      path: of what is being restored, for errors.

    Raises:
      CheckpointIOError: some process could not, or has died.
    """
    noted = [
        (index, part.start, part.stop, part.crc) for index, leaf in enumerate(leaves) for part in stats.ranges(leaf)
    ]
    # Without jax_enable_x64 an all-gather would narrow int64: each number travels as two uint32.
    mine = np.asarray(noted, np.uint64).reshape(-1, _COLUMNS)
    counts_and_failures = gather(np.asarray([len(mine), failed], np.uint32), path)
    counts, failures = counts_and_failures[:, 0], np.flatnonzero(counts_and_failures[:, 1]).tolist()
    if failures:
        who = ", ".join(map(str, failures))
        raise CheckpointIOError(f"reading failed on process {who}; its own error says why", path=path)
    longest = int(np.max(counts))
    if not longest:
        return {}
    padded = np.zeros((longest, _COLUMNS), np.uint64)
    padded[: len(mine)] = mine
    gathered = gather(padded.view(np.uint32), path)
    parts: dict[Leaf, list[ChecksummedRange]] = {}
    for count, block in zip(counts, gathered, strict=True):
        rows: list[list[int]] = np.ascontiguousarray(block[: int(count)]).view(np.uint64).tolist()
        for index, start, stop, crc in rows:
            parts.setdefault(leaves[index], []).append(ChecksummedRange(start, stop, crc))
    return parts
