"""Index boxes of a row-major array as byte runs and windows.

Pure geometry on integers, no bytes. The bound: nothing is listed per row where rows repeat. A `Run` is a whole lattice
of equal byte ranges, so the columns of a matrix of any height are one run. Runs closer than `max_gap` become one, which
is the only place where over-reading is decided. A window is a box of the array, small enough for a staging buffer, that
is an index box and one byte range at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from orbax_t5x.lazy.box import Box, box_size


class Run(NamedTuple):
    """Byte ranges of equal length at equal distances.

    `times` ranges of `length` bytes, the first at `start`, the next each `stride` bytes further.
    """

    start: int
    length: int
    stride: int = 0
    times: int = 1

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yields (start, stop) of each, in order."""
        for k in range(self.times):
            start = self.start + k * self.stride
            yield start, start + self.length


def byte_strides(shape: Sequence[int], itemsize: int) -> list[int]:
    """Returns a row-major array's strides in bytes."""
    strides: list[int] = []
    stride = itemsize
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    strides.reverse()
    return strides


def locate_box(
    box: Box, extents: Sequence[int], shape: Sequence[int], strides: Sequence[int]
) -> tuple[int, bool] | None:
    """Returns a box's first byte, and if it is one byte range."""
    if not len(box) == len(extents) == len(shape):
        return None
    start = 0
    one_range = True
    narrowed = False  # a dimension with several indices: those after it must be whole
    for (low, high), extent, size, stride in zip(box, extents, shape, strides, strict=True):
        if high - low != extent or not 0 <= low <= high <= size:
            return None
        start += low * stride
        if narrowed and extent != size:
            one_range = False
        if extent != 1:
            narrowed = True
    return start, one_range


def union_runs(shape: Sequence[int], itemsize: int, boxes: Sequence[Box], max_gap: int) -> tuple[list[Run], int]:
    """Returns the byte ranges that hold all the boxes, in file order."""
    wanted_boxes = tuple({box for box in boxes if box_size(box)})
    if not wanted_boxes:
        return [], 0
    return _union(tuple(shape), itemsize, wanted_boxes, max_gap)


def _union(shape: tuple[int, ...], itemsize: int, boxes: tuple[Box, ...], max_gap: int) -> tuple[list[Run], int]:
    nbytes = math.prod(shape) * itemsize
    if not shape or any(
        all(low == 0 and high == size for size, (low, high) in zip(shape, box, strict=True)) for box in boxes
    ):
        return [Run(0, nbytes)], nbytes
    row = nbytes // shape[0]
    edges = sorted({edge for box in boxes for edge in box[0]})
    runs: list[Run] = []
    wanted = 0
    rows_of: dict[frozenset[Box], tuple[list[Run], int]] = {}
    for low, high in itertools.pairwise(edges):
        inside = frozenset(box[1:] for box in boxes if box[0][0] <= low and high <= box[0][1])
        if not inside:
            continue
        if inside not in rows_of:
            rows_of[inside] = _union(shape[1:], itemsize, tuple(inside), max_gap)
        row_runs, row_wanted = rows_of[inside]
        wanted += row_wanted * (high - low)
        for run in _repeat(row_runs, row, low, high, max_gap):
            _append(runs, run, max_gap)
    return runs, wanted


def _repeat(row_runs: list[Run], row: int, low: int, high: int, max_gap: int) -> Iterator[Run]:
    """Repeats the runs of a row for the rows [low, high)."""
    count = high - low
    if len(row_runs) == 1:
        start, length, stride, inner_count = row_runs[0]
        if inner_count == 1:
            if count == 1:
                yield Run(low * row + start, length)
            elif row == length or row - length < max_gap:
                yield Run(low * row + start, (count - 1) * row + length)
            else:
                yield Run(low * row + start, length, row, count)
            return
        if stride * inner_count == row:  # the lattice goes on across the rows
            yield Run(low * row + start, length, stride, count * inner_count)
            return
    for k in range(low, high):
        for start, length, stride, inner_count in row_runs:
            yield Run(k * row + start, length, stride, inner_count)


def _append(runs: list[Run], run: Run, max_gap: int) -> None:
    """Appends a run, joined to the last run if possible."""
    if runs and runs[-1].times == 1 and run.times == 1:
        last = runs[-1]
        gap = run.start - (last.start + last.length)
        if gap == 0 or gap < max_gap:
            runs[-1] = Run(last.start, run.start + run.length - last.start)
            return
    runs.append(run)


def split_ends(runs: Sequence[Run], wanted: Sequence[Run]) -> Iterator[Run]:
    """Splits the ends off runs that were joined over gaps."""
    rest = iter(wanted)
    item = next(rest, None)
    for run in runs:
        if run == item:
            yield run
            item = next(rest, None)
            continue
        for start, stop in run.ranges():
            first = last = None
            while item is not None and item.start < stop:
                take = 1 + (stop - item.start - item.length) // item.stride if item.times > 1 else 1
                take = min(take, item.times)
                tail = item.start + (take - 1) * item.stride
                first = first or (item.start, item.start + item.length)
                last = (tail, tail + item.length)
                left = item.times - take
                item = Run(tail + item.stride, item.length, item.stride, left) if left else next(rest, None)
            assert first is not None and last is not None
            cuts = sorted({start, first[1], last[0], stop})
            yield from (Run(a, b - a) for a, b in itertools.pairwise(cuts))


class Window(NamedTuple):
    """A box of an array in a single byte range.

    `outer` indexes the first dimensions, [low, high) is a range of the next one, the rest is whole; `start` is its
    first byte and `ranges` are the byte ranges of it to read.
    """

    outer: tuple[int, ...]
    low: int
    high: int
    start: int
    stop: int
    ranges: list[tuple[int, int]]


class WindowGrid:
    """Grid of windows over a row-major array with elements.

    A window has at most `max_bytes`, but at least one element.

    Attributes:
      depth: how many leading dimensions a window fixes to one index; the one at `depth` is cut, those after are whole.
      block: bytes of one index of the cut dimension.
    """

    def __init__(self, shape: Sequence[int], itemsize: int, max_bytes: int):
        self._shape = tuple(shape) or (1,)
        block = math.prod(self._shape) * itemsize
        for depth, size in enumerate(self._shape):
            self.depth = depth
            block //= size
            if block <= max_bytes:
                break
        self.block = block
        self._size = self._shape[self.depth]
        per_window = max(1, min(self._size, max_bytes // block))
        # Even windows: no short last one for each outer index.
        self._step = -(-self._size // -(-self._size // per_window))

    def _window_at(self, byte: int) -> Window:
        outer_bytes = self._size * self.block
        flat, inside = divmod(byte, outer_bytes)
        low = inside // (self._step * self.block) * self._step
        high = min(low + self._step, self._size)
        start = flat * outer_bytes
        outer: list[int] = []
        for size in reversed(self._shape[: self.depth]):
            flat, index = divmod(flat, size)
            outer.append(index)
        return Window(tuple(reversed(outer)), low, high, start + low * self.block, start + high * self.block, [])

    def count(self, runs: Iterable[Run]) -> int:
        """Counts the byte ranges in all the windows that hold the runs."""
        window_bytes, outer_bytes = self._step * self.block, self._size * self.block
        windows = -(-self._size // self._step)

        def number_of(byte: np.ndarray) -> np.ndarray:
            return byte // outer_bytes * windows + byte % outer_bytes // window_bytes

        total = 0
        for start, length, stride, times in runs:
            first = start + stride * np.arange(times, dtype=np.int64)
            total += times + int((number_of(first + length - 1) - number_of(first)).sum())
        return total

    def windows(self, runs: Iterable[Run]) -> Iterator[Window]:
        """Yields the windows that hold the runs, in file order."""
        window: Window | None = None
        for run in runs:
            for start, stop in run.ranges():
                while start < stop:
                    if window is None or start >= window.stop:
                        if window is not None:
                            yield window
                        window = self._window_at(start)
                    end = min(stop, window.stop)
                    window.ranges.append((start, end))
                    start = end
        if window is not None:
            yield window
