"""Checkpoints in memory whose leaves record what is read from them; one kind is read by blocking calls, the other
awaited."""

import asyncio
import threading

import numpy as np

from orbax_t5x.lazy import BlockingLeaf, Leaf
from orbax_t5x.lazy.box import box_slices
from orbax_t5x.readers.checkpoint import Checkpoint


class AwaitedLeaf(Leaf):
    """A leaf over an array, as an asynchronous format has it."""

    path = "/memory"

    def __init__(self, name, array, chunks=None):
        self.name = name
        self.array = array
        self.shape = array.shape
        self.dtype = array.dtype
        self.chunks = chunks
        self.boxes = []
        self.in_flight = None
        self._lock = threading.Lock()

    def _fill(self, requests, stats):
        for box, out in requests:
            assert out.dtype == self.dtype and out.shape == tuple(stop - start for start, stop in box)
            with self._lock:
                self.boxes.append(box)
            out[...] = self.array[box_slices(box)]
        stats.count(self.bytes_of(tuple(box for box, _ in requests)))

    async def read_into(self, requests, stats):
        await asyncio.sleep(0)
        self._fill(requests, stats)


class BlockedLeaf(AwaitedLeaf, BlockingLeaf):
    """The same, read by blocking calls in worker threads."""

    def read_blocking(self, requests, stats):
        self._fill(requests, stats)


class FailingLeaf(AwaitedLeaf):
    """A leaf whose reading fails."""

    def __init__(self, name, array, error):
        super().__init__(name, array)
        self.failure = error

    async def read_into(self, requests, stats):
        for _ in range(10):  # turns of the loop, in which other leaves begin
            await asyncio.sleep(0)
        raise self.failure


def checkpoint(arrays, kind=BlockedLeaf, *, format="orbax", empties=None, metadata=None, **leaves):
    """A Checkpoint over arrays by name; `leaves` adds ready-made ones."""
    made = {
        name: value if isinstance(value, AwaitedLeaf) else kind(name, np.asarray(value))
        for name, value in arrays.items()
    }
    opened = Checkpoint(path="/memory", format=format, step=None, leaves=made, empties=empties, metadata=metadata)
    opened.made = made
    return opened
