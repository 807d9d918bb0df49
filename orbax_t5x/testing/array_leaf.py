"""A leaf over a NumPy array that records its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from orbax_t5x.lazy import Box, ChecksummedRange, Leaf, ReadStats, Request, box_slices


class ArrayLeaf(Leaf):
    """Leaf over an array, which counts reads of each element.

    It serves boxes after a turn of the event loop.

    Attributes:
      array: what it serves.
      calls: the boxes of each call of `read_into`.
      counts: how often each element was read.
      verified: how often `verify_checksum` was called.
    """

    def __init__(self, array: np.ndarray, name: str = "leaf"):
        self.array: np.ndarray = array
        self.name = name
        self.path: str = f"/checkpoints/{name}"
        self.shape: tuple[int, ...] = array.shape
        self.dtype: np.dtype = array.dtype
        self.calls: list[list[Box]] = []
        self.counts: np.ndarray = np.zeros(array.shape, np.int64)
        self.verified: int = 0

    async def read_into(self, requests: Sequence[Request], stats: ReadStats) -> None:
        """Fills requests that are as `Leaf.read_into` promises them."""
        self.calls.append([request.box for request in requests])
        await asyncio.sleep(0)
        for box, out in requests:
            assert all(0 <= first < last <= size for (first, last), size in zip(box, self.shape, strict=True)), box
            assert out.dtype == self.dtype and out.flags.writeable
            assert out.shape == tuple(last - first for first, last in box)
            out[...] = self.array[box_slices(box)]
            self.counts[box_slices(box)] += 1
        stats.count(self.bytes_of(tuple([box for box, _ in requests])))

    async def verify_checksum(self, stats: ReadStats, ranges: Sequence[ChecksummedRange]) -> bool | None:
        """Counts the call; an array has no checksum."""
        self.verified += 1
        return None
