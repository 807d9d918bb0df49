"""Pairs of arrays are read block by block and compared, in bounded memory, several blocks at a time.

A block is the same box of both sides. Which boxes those are is decided once for each pair, from what reading one of
them would decode: a chunk of either side is not cut where that can be had, so that it is decoded once. What cannot be
read of one array is an outcome of that pair, and the others go on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from orbax_t5x.concurrency import BlocksInFlight, LoopThread, reader_pool, run_in_pool, wait_all
from orbax_t5x.errors import CheckpointError
from orbax_t5x.lazy import Box, Leaf, ReadStats, View, full_box
from orbax_t5x.lazy.box import box_shape, box_size
from orbax_t5x.lazy.chunks import choose_chunk, grid_boxes
from orbax_t5x.lazy.read import group_reads, read_all
from orbax_t5x.operations.diff.values import Tolerance, ValueDifference, compare_values, scratch_bytes
from orbax_t5x.storage.memory import empty_array, naming_memory_errors
from orbax_t5x.text.progress_bar import OnProgress

Side = Literal["a", "b"]

# Of each side, at a time. Larger ones compare no faster; smaller ones cost a read each.
_BLOCK_BYTES = 16 << 20
# Fraction of the limit for one buffer, so that several blocks are in flight: two buffers are an eighth.
_BLOCK_FRACTION = 16
_LEAST_BLOCK_BYTES = 1 << 20


class LeafPair(NamedTuple):
    """Two arrays of one name and shape to compare, of dtypes whose values can be compared."""

    name: str
    a: View
    b: View

    @property
    def sides(self) -> tuple[tuple[Side, View], tuple[Side, View]]:
        """Both, by name."""
        return ("a", self.a), ("b", self.b)

    @property
    def bytes_to_read(self) -> int:
        """Of both sides, decoded."""
        return self.a.nbytes + self.b.nbytes


class PairOutcome:
    """Outcome of comparing one pair so far; `failure` has the side that could not be read or verified, and why."""

    def __init__(self) -> None:
        self.apart = ValueDifference()
        self.failure: tuple[Side, CheckpointError] | None = None


def compare_pairs(
    pairs: Sequence[LeafPair], tolerance: Tolerance, limit: int, on_progress: OnProgress | None, stats: ReadStats
) -> dict[str, PairOutcome]:
    """Reads and compares pairs of arrays, in `limit` bytes of memory (a larger block by itself); outcomes by name."""
    run = _BlockComparison(pairs, tolerance, limit, on_progress, stats)
    if pairs:
        # An interrupt is raised when nothing is being read any more: the caller closes the files.
        with LoopThread("orbax_t5x-diff") as thread:
            thread.run(run.compare_all())
    return run.outcomes


class _BlockComparison:
    """State of a comparison: the outcomes, and the blocks in flight."""

    def __init__(
        self,
        pairs: Sequence[LeafPair],
        tolerance: Tolerance,
        limit: int,
        on_progress: OnProgress | None,
        stats: ReadStats,
    ):
        self.outcomes: dict[str, PairOutcome] = {pair.name: PairOutcome() for pair in pairs}
        self._pairs = pairs
        self._tolerance = tolerance
        self._limit = limit
        self._stats = stats
        self._in_flight = BlocksInFlight(limit, sum(pair.bytes_to_read for pair in pairs), on_progress)

    async def compare_all(self) -> None:
        await wait_all(self._blocks())
        await self._verify_checksums()

    async def _blocks(self) -> AsyncIterator[Coroutine[Any, Any, None]]:
        """Yields the comparison of each block of each pair, as soon as the budget has room for it."""
        for pair in self._pairs:
            for box in block_boxes(pair.a, pair.b, self._limit):
                yield self._block(pair, box, await self._in_flight.admit(_bytes_in_flight(pair, box)))

    async def _block(self, pair: LeafPair, box: Box, size: int) -> None:
        outcome = self.outcomes[pair.name]
        with self._in_flight.admitted(size):
            if outcome.failure is None:
                buffers: dict[Side, np.ndarray] = {}
                await wait_all(self._read(outcome, side, view, box, buffers) for side, view in pair.sides)
                if outcome.failure is None:
                    corner = tuple(start for start, _ in box)
                    values = buffers["a"], buffers["b"]
                    apart = await run_in_pool(reader_pool(), compare_values, *values, corner, self._tolerance)
                    outcome.apart = outcome.apart.joined(apart)
            self._in_flight.note_done(box_size(box) * (pair.a.dtype.itemsize + pair.b.dtype.itemsize), pair.name)

    async def _read(
        self, outcome: PairOutcome, side: Side, view: View, box: Box, buffers: dict[Side, np.ndarray]
    ) -> None:
        """Reads a box of one side; a failure is noted."""
        first = view.leaves()[0]
        try:
            with naming_memory_errors(first.path, first.name):
                out = empty_array(box_shape(box), view.dtype)
                lowered = view.lower(box, out)
            await read_all(group_reads(lowered.reads), self._stats)
            if lowered.finish:
                await run_in_pool(reader_pool(), partial(_run_steps, lowered.finish))
            buffers[side] = out
        except CheckpointError as error:
            outcome.failure = outcome.failure or (side, error)

    async def _verify_checksums(self) -> None:
        """Compares the checksums of all that was read whole."""
        readers: dict[Leaf, list[tuple[PairOutcome, Side]]] = {}
        for pair in self._pairs:
            for side, view in pair.sides:
                for leaf in view.leaves():
                    readers.setdefault(leaf, []).append((self.outcomes[pair.name], side))
        for leaf, uses in readers.items():
            if all(outcome.failure is not None for outcome, _ in uses):
                continue
            try:
                await leaf.verify_checksum(self._stats, self._stats.ranges(leaf))
            except CheckpointError as error:
                for outcome, side in uses:
                    outcome.failure = outcome.failure or (side, error)


def _run_steps(steps: Sequence[Any]) -> None:
    for step in steps:
        step()


def _bytes_in_flight(pair: LeafPair, box: Box) -> int:
    buffers = box_size(box) * (pair.a.dtype.itemsize + pair.b.dtype.itemsize)
    return buffers + pair.a.scratch_bytes(box) + pair.b.scratch_bytes(box) + scratch_bytes(box_size(box))


# -- which boxes


def block_boxes(a: View, b: View, limit: int) -> Iterator[Box]:
    """Yields the boxes, together the whole, in which two arrays of one shape are compared within `limit` bytes."""
    shape = a.shape
    itemsize = max(a.dtype.itemsize, b.dtype.itemsize)
    most = min(_BLOCK_BYTES, max(_LEAST_BLOCK_BYTES, limit // _BLOCK_FRACTION))
    is_text = a.dtype.hasobject  # an array of strings is read whole, whatever is wanted of it
    if is_text or 0 in shape or math.prod(shape) * itemsize <= most:
        yield full_box(shape)
        return
    candidates = dict.fromkeys(_block_shapes(a, b, itemsize, most))
    yield from grid_boxes(shape, min(candidates, key=lambda block: _decoded_share(a, b, block)))


def _block_shapes(a: View, b: View, itemsize: int, most: int) -> Iterator[tuple[int, ...]]:
    """Shapes of blocks, of which the first that decodes least is taken."""
    shape = a.shape
    axes = range(len(shape))
    units = [unit for unit in (_unit(a), _unit(b)) if unit is not None]
    if len(units) == 2:
        both = tuple(min(size, math.lcm(one, other)) for size, one, other in zip(shape, *units, strict=True))
        if math.prod(both) * itemsize <= most:
            units.insert(0, both)
    for unit, first in itertools.product([*units, None], [(), *((axis,) for axis in axes)]):
        yield choose_chunk(shape, itemsize, most, unit, cut_first=first)


def _unit(view: View) -> tuple[int, ...] | None:
    """Returns the chunk shape of a view's only leaf if the view has that leaf's shape, or else None."""
    leaves = view.leaves()
    return leaves[0].chunks if len(leaves) == 1 and leaves[0].shape == view.shape else None


def _decoded_share(a: View, b: View, block: tuple[int, ...]) -> float:
    """Returns the ratio of the bytes that reading one block decodes to those that it needs."""
    box: Box = tuple((0, min(step, size)) for step, size in zip(block, a.shape, strict=True))
    decoded = sum(_decoded_bytes(leaf, part) for view in (a, b) for leaf, part in view.requests(box))
    return decoded / (box_size(box) * (a.dtype.itemsize + b.dtype.itemsize))


def _decoded_bytes(leaf: Leaf, box: Box) -> int:
    """Returns the bytes of the chunks that a box touches."""
    if leaf.chunks is None:
        return box_size(box) * leaf.dtype.itemsize
    covered = (
        min(-(-stop // chunk) * chunk, size) - start // chunk * chunk
        for (start, stop), chunk, size in zip(box, leaf.chunks, leaf.shape, strict=True)
    )
    return math.prod(covered) * leaf.dtype.itemsize
