"""What processes tell each other during one restore: checksums of the parts that each has read.

Four bytes of crc and two offsets per part, in one small all-gather. Every process must call it, with the same leaves in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax.experimental import multihost_utils

from orbax_t5x.lazy import Ledger
from orbax_t5x.lazy._leaf import Leaf, Part

_COLUMNS = 4  # leaf, start, stop, crc


def gather_parts(ledger: Ledger, leaves: Sequence[Leaf]) -> dict[int, list[Part]]:
    """The parts of all processes, by `id` of this process's leaf."""
    rows = [
        (index, part.start, part.stop, part.crc) for index, leaf in enumerate(leaves) for part in ledger.parts(leaf)
    ]
    # Without jax_enable_x64 an all-gather would narrow int64: each number travels as two uint32.
    mine = np.asarray(rows, np.uint64).reshape(-1, _COLUMNS)
    counts = multihost_utils.process_allgather(np.asarray([len(mine)], np.uint32))
    longest = int(np.max(counts))
    padded = np.zeros((longest, _COLUMNS), np.uint64)
    padded[: len(mine)] = mine
    gathered = np.asarray(multihost_utils.process_allgather(padded.view(np.uint32)))
    parts: dict[int, list[Part]] = {}
    for count, block in zip(np.ravel(counts), gathered.reshape(-1, longest, 2 * _COLUMNS), strict=True):
        told = np.ascontiguousarray(block[: int(count)]).view(np.uint64)
        for index, start, stop, crc in told.tolist():
            parts.setdefault(id(leaves[index]), []).append(Part(start, stop, crc))
    return parts
