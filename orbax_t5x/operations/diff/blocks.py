"""Compares pairs of arrays block by block, in bounded memory.

Several blocks are read at a time. A block is the same box of both sides. Which boxes those are is decided once for each
pair, from what reading one of them would decode: a chunk of either side is not cut where that can be had, so that it is
decoded once. What cannot be read of one array is an outcome of that pair, and the others go on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from orbax_t5x.concurrency import Block, LoopThread, for_each_block, reader_pool, run_in_pool, wait_all
from orbax_t5x.errors import CheckpointError
from orbax_t5x.lazy import Box, Leaf, ReadStats, View, full_box
from orbax_t5x.lazy.box import box_size
from orbax_t5x.lazy.chunks import block_bytes, choose_chunk, grid_boxes, stored_chunk
from orbax_t5x.lazy.read import read_block
from orbax_t5x.operations.diff.values import Tolerance, ValueDifference, compare_values, scratch_bytes
from orbax_t5x.text.progress_bar import OnProgress

Side = Literal["a", "b"]

# Buffers of a block: so that several blocks are in flight, two take an eighth of the limit.
_COPIES = 8


class LeafPair(NamedTuple):
    """Two arrays of the same name and shape to compare."""

    name: str
    a: View
    b: View

    @property
    def sides(self) -> tuple[tuple[Side, View], tuple[Side, View]]:
        """Both, by name."""
        return ("a", self.a), ("b", self.b)

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The leaves of both sides."""
        return (*self.a.leaves(), *self.b.leaves())

    @property
    def reads(self) -> tuple[tuple[Leaf, tuple[Box, ...]], ...]:
        """The leaves, without boxes."""
        return tuple((leaf, ()) for leaf in self.leaves)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the compared part, without common repeats."""
        repeated = set(_repeated(self.a)).intersection(_repeated(self.b))
        return tuple(1 if axis in repeated else size for axis, size in enumerate(self.a.shape))

    @property
    def repeats(self) -> int:
        """Number of times that an element of the part occurs."""
        return math.prod(self.a.shape) // max(1, math.prod(self.shape))

    def bytes_of(self, box: Box) -> int:
        """Returns the bytes of a box of both sides, decoded."""
        return box_size(box) * (self.a.dtype.itemsize + self.b.dtype.itemsize)


class PairOutcome:
    """Outcome of a pair so far."""

    def __init__(self) -> None:
        self.apart = ValueDifference()
        self.failure: tuple[Side, CheckpointError] | None = None


def compare_pairs(
    pairs: Sequence[LeafPair], tolerance: Tolerance, limit: int, on_progress: OnProgress | None, stats: ReadStats
) -> dict[str, PairOutcome]:
    """Compares pairs of arrays in `limit` bytes of memory."""
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
        self._on_progress = on_progress

    async def compare_all(self) -> None:
        total = sum(pair.bytes_of(full_box(pair.shape)) for pair in self._pairs)
        await for_each_block(self._blocks(), self._limit, total, self._on_progress)
        await self._verify_checksums()

    def _blocks(self) -> Iterator[Block]:
        """Yields the comparison of each block of each pair."""
        for pair in self._pairs:
            for box in block_boxes(pair, self._limit):
                memory = pair.bytes_of(box) + scratch_bytes(box_size(box))
                memory += sum(view.scratch_bytes(box) for _, view in pair.sides)
                yield Block(partial(self._compare, pair, box), memory, pair.bytes_of(box), pair.name)

    async def _compare(self, pair: LeafPair, box: Box) -> None:
        outcome = self.outcomes[pair.name]
        if outcome.failure is None:
            buffers: dict[Side, np.ndarray] = {}
            await wait_all(self._read(outcome, side, view, box, buffers) for side, view in pair.sides)
            if outcome.failure is None:
                corner = tuple(start for start, _ in box)
                values = buffers["a"], buffers["b"]
                apart = await run_in_pool(reader_pool(), compare_values, *values, corner, self._tolerance)
                outcome.apart = outcome.apart.joined(apart.repeated(pair.repeats))

    async def _read(
        self, outcome: PairOutcome, side: Side, view: View, box: Box, buffers: dict[Side, np.ndarray]
    ) -> None:
        """Reads a box of a side; a failure is noted."""
        try:
            buffers[side] = await read_block(view.node, box, self._stats)
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


# -- which boxes


def block_boxes(pair: LeafPair, limit: int) -> Iterator[Box]:
    """Yields boxes to compare within `limit` bytes."""
    a, b, shape = pair.a, pair.b, pair.shape
    itemsize = max(a.dtype.itemsize, b.dtype.itemsize)
    most = block_bytes(limit, _COPIES)
    is_text = a.dtype.hasobject  # an array of strings is read whole, whatever is wanted of it
    if is_text or 0 in shape or math.prod(shape) * itemsize <= most:
        yield full_box(shape)
        return
    candidates = dict.fromkeys(_block_shapes(pair, itemsize, most))
    yield from grid_boxes(shape, min(candidates, key=lambda block: _decoded_share(a, b, block)))


def _repeated(view: View) -> tuple[int, ...]:
    """Returns the dimensions that a view's only leaf repeats."""
    return () if view.leaf is None else view.leaf.repeated


def _block_shapes(pair: LeafPair, itemsize: int, most: int) -> Iterator[tuple[int, ...]]:
    shape = pair.shape
    axes = range(len(shape))
    units = [unit for unit in (stored_chunk(pair.a), stored_chunk(pair.b)) if unit is not None]
    if len(units) == 2:
        both = tuple(min(size, math.lcm(one, other)) for size, one, other in zip(shape, *units, strict=True))
        if math.prod(both) * itemsize <= most:
            units.insert(0, both)
    for unit, first in itertools.product([*units, None], [(), *((axis,) for axis in axes)]):
        yield choose_chunk(shape, itemsize, most, unit, cut_first=first)


def _decoded_share(a: View, b: View, block: tuple[int, ...]) -> float:
    """Returns the ratio of decoded to needed bytes of a block."""
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
