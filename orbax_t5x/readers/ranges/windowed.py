"""Boxes of a row-major array that are read through windows.

A window of the array is read once into a staging buffer, summed while it is in the cache, and scattered to all the
boxes that want some of it. The geometry is pure, on integers; nothing is listed per row where rows repeat. A `Run` is a
whole lattice of equal byte ranges, so the columns of a matrix of any height are one run. Runs closer than `max_gap`
become one, which is the only place where over-reading is decided. A window is a box of the array, small enough for a
staging buffer, that is an index box and one byte range at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from orbax_t5x.concurrency import run_jobs
from orbax_t5x.errors import CheckpointIOError
from orbax_t5x.files.memory import strided
from orbax_t5x.files.windows import MAX_GAP_BYTES, WINDOW_BYTES
from orbax_t5x.lazy.box import Box, box_size
from orbax_t5x.lazy.leaf import Request
from orbax_t5x.readers.ranges.byte_range import ByteRange, ReadChecksums, ReadOutcome, grouped, staging_buffer
from orbax_t5x.readers.ranges.elements import Elements


def read_by_windows(stored: ByteRange, requests: Sequence[Request], *, checksum: bool, leaf: str) -> ReadOutcome:
    """Fills requests through staging buffers; blocks."""
    itemsize = stored.dtype.itemsize
    runs, wanted, nbytes = _runs_of(stored.shape, itemsize, [request.box for request in requests], checksum)
    join = wanted == nbytes
    grid = WindowGrid(stored.shape, itemsize, WINDOW_BYTES)
    elements = Elements(stored.dtype, stored.swap, stored.file.path, leaf)
    scatter = Scatter(stored.shape, grid.depth, requests, elements)
    jobs = grouped(grid.windows(runs), lambda window: sum(stop - start for start, stop in window.ranges))
    done = run_jobs(
        partial(_read_some, stored, windows, scatter, ReadChecksums(stored.kind, checksum, join=join), leaf)
        for windows in jobs
    )
    read = sum(outcome.wanted for outcome, _ in done)
    filled = sum(elements for _, elements in done)
    if filled != sum(box_size(request.box) for request in requests):
        raise CheckpointIOError("the buffers were not filled completely", path=stored.file.path, leaf=leaf)
    return ReadOutcome([one for outcome, _ in done for one in outcome.ranges], wanted, read - wanted)


def _read_some(
    stored: ByteRange, windows: list[Window], scatter: Scatter, checksums: ReadChecksums, leaf: str
) -> tuple[ReadOutcome, int]:
    buffer = staging_buffer()
    size = filled = 0
    ranges = (one for window in windows for one in window.ranges)
    file = stored.file.ahead((stored.offset + start, stop - start) for start, stop in ranges)
    for window in windows:
        for start, stop in window.ranges:
            data = buffer[start - window.start : stop - window.start]
            file.read_into(stored.offset + start, [data], leaf=leaf)
            checksums.add(start, data)
            size += stop - start
        filled += scatter.window(window, buffer[: window.stop - window.start])
    return ReadOutcome(checksums.flush(), size, 0), filled


def _runs_of(
    shape: tuple[int, ...], itemsize: int, boxes: Sequence[Box], is_summed: bool
) -> tuple[Iterable[Run], int, int]:
    """Returns the runs of boxes, and the bytes wanted and read."""
    runs, wanted = union_runs(shape, itemsize, boxes, MAX_GAP_BYTES)
    nbytes = sum(run.length * run.times for run in runs)
    if is_summed and wanted != nbytes:
        return split_ends(runs, union_runs(shape, itemsize, boxes, 0)[0]), wanted, nbytes
    return runs, wanted, nbytes


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


class _ScatterTarget(NamedTuple):
    """A request: outer ranges, cut range and inner slices.

    Windows cut the middle range. Of several requests together, `out` has one dimension more: an inner one is split in
    their number and their width.
    """

    outer: tuple[tuple[int, int], ...]
    low: int
    high: int
    inner: tuple[slice, ...]
    out: np.ndarray


class Scatter:
    """Thread-safe copier from windows of an array to buffers."""

    def __init__(self, shape: tuple[int, ...], depth: int, requests: Sequence[Request], elements: Elements):
        self._elements = elements
        self._inner_shape = (shape or (1,))[depth + 1 :]
        targets: list[_ScatterTarget] = []
        for request in requests:
            box, out = request if request.box else (((0, 1),), request.out.reshape(1))
            inner = tuple(slice(low, high) for low, high in box[depth + 1 :])
            targets.append(_ScatterTarget(box[:depth], *box[depth], inner, out))
        self._targets = [
            joined for _, alike in itertools.groupby(targets, _layout) for joined in _join_neighbours(list(alike))
        ]
        self._outs = [request.out for request in requests]  # a joined target refers to the memory of the first only

    def window(self, window: Window, data: np.ndarray) -> int:
        """Copies a window's requested elements; returns their number."""
        stored = data.view(self._elements.dtype).reshape(window.high - window.low, *self._inner_shape)
        filled = 0
        for outer, low, high, inner, out in self._targets:
            first, last = max(low, window.low), min(high, window.high)
            if first >= last or not all(a <= at < b for at, (a, b) in zip(window.outer, outer, strict=True)):
                continue
            values = stored[(slice(first - window.low, last - window.low), *inner)]
            index = tuple(at - a for at, (a, _) in zip(window.outer, outer, strict=True))
            part = out[(*index, slice(first - low, last - low))]
            self._elements.copy(values.reshape(part.shape), part)
            filled += values.size
        return filled


def _layout(target: _ScatterTarget) -> tuple[object, ...]:
    return target.outer, target.low, target.high, target.out.shape, target.out.strides


def _join_neighbours(alike: list[_ScatterTarget]) -> list[_ScatterTarget]:
    """Joins neighbouring targets with equally distant buffers."""
    first = alike[0]
    rank = len(first.inner)
    axes = [axis for axis in range(rank) if any(target.inner[axis] != first.inner[axis] for target in alike)]
    if len(axes) != 1:
        return alike
    (axis,) = axes
    slices = [target.inner[axis] for target in alike]
    addresses = [target.out.__array_interface__["data"][0] for target in alike]
    distance = addresses[1] - addresses[0]
    if any(before.stop != after.start for before, after in itertools.pairwise(slices)):
        return alike
    if any(after - before != distance for before, after in itertools.pairwise(addresses)):
        return alike
    at = first.out.ndim - rank + axis
    shape, strides = list(first.out.shape), list(first.out.strides)
    shape.insert(at, len(alike))
    strides.insert(at, distance)
    inner = (*first.inner[:axis], slice(slices[0].start, slices[-1].stop), *first.inner[axis + 1 :])
    return [first._replace(inner=inner, out=strided(first.out, shape, strides))]
