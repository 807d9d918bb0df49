"""One row-major array in a byte range of a file, read by index box.

Two ways in. Boxes that are each one byte range are read straight into their buffers. Boxes that are not (column shards)
go through a small staging buffer per thread: a window of the array is read once, summed while it is in the cache, and
scattered to all the boxes that want a part of it. Either way every stored byte is read at most once per call, in file
order, the checksum runs over what was read as stored, and every element of every buffer is counted. Memory: one staging
buffer per thread.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import ml_dtypes
import numpy as np

from orbax_t5x.errors import CheckpointIOError, CorruptCheckpointError
from orbax_t5x.lazy._leaf import Part, Request, box_shape, box_size
from orbax_t5x.readers import _crc
from orbax_t5x.readers._bytes import File
from orbax_t5x.readers._jobs import run_jobs
from orbax_t5x.readers._runs import Window, WindowGrid, byte_span, split_ends, union_runs

# Contract: byte-range formats may read over gaps below this.
MAX_GAP_BYTES = 4096
# One read and its checksum. Larger falls out of a core's cache between the two, smaller pays for more system calls.
_WINDOW_BYTES = 1 << 20
# What one thread takes at a time of a large array.
_JOB_BYTES = 16 << 20

# Values are stored one to a byte; what lies above their bits is no part of them.
_LOW_BITS = {
    np.dtype(ml_dtypes.int4): 0x0F,
    np.dtype(ml_dtypes.uint4): 0x0F,
    np.dtype(ml_dtypes.float4_e2m1fn): 0x0F,
    np.dtype(ml_dtypes.int2): 0x03,
    np.dtype(ml_dtypes.uint2): 0x03,
}
_BOOL = np.dtype(np.bool_)

_Item = TypeVar("_Item")

_thread = threading.local()


def _staging() -> np.ndarray:
    """This thread's staging buffer. It is kept: a fresh one would cost a page fault per 4 KiB of every window."""
    buffer = getattr(_thread, "buffer", None)
    if buffer is None:
        buffer = _thread.buffer = np.zeros(_WINDOW_BYTES, np.uint8)
    return buffer


class Outcome(NamedTuple):
    """What a read did: checksums of the byte ranges read (relative to the array), and bytes wanted and read over."""

    parts: list[Part]
    wanted: int
    gaps: int


class _Span(NamedTuple):
    """A buffer that is a byte range of the array."""

    start: int
    stop: int
    out: np.ndarray


class _Checksums:
    """Parts of consecutive reads; with `join`, one part while one read follows the other."""

    def __init__(self, wanted: bool, *, join: bool = True):
        self._wanted = wanted
        self._join = join
        self._start = self._stop = 0
        self._crc = 0
        self.parts: list[Part] = []

    def add(self, start: int, data: np.ndarray) -> None:
        if not self._wanted:
            return
        if start != self._stop or not self._join:
            self.flush()
            self._start = start
        self._crc = _crc.extend(self._crc, data)
        self._stop = start + data.nbytes

    def flush(self) -> list[Part]:
        if self._stop > self._start:
            self.parts.append(Part(self._start, self._stop, self._crc))
        self._start, self._crc = self._stop, 0
        return self.parts


@dataclasses.dataclass(frozen=True, slots=True)
class ByteRange:
    """A row-major array at `offset` of a file; made by readers that have compared its size with the file's.

    Attributes:
      swap: the bytes of each element are stored in the other order than this machine's.
    """

    file: File
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype
    swap: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, as stored."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, requests: Sequence[Request], *, checksum: bool, leaf: str) -> Outcome:
        """Fills all requests; blocks.

        Raises:
          CorruptCheckpointError, CheckpointIOError, CheckpointGoneError: naming the file and `leaf`.
          ValueError: the checkpoint was closed, or a buffer does not fit its box.
        """
        for box, out in requests:
            if out.shape != box_shape(box) or out.dtype != self.dtype:
                raise ValueError(
                    f"{leaf}: a buffer of {out.dtype} {out.shape} for the box {box} of a {self.dtype} array"
                )
        requests = [request for request in requests if request.out.size]
        spans = self._spans(requests)
        if spans is not None:
            return self._read_spans(spans, checksum, leaf)
        return self._read_windows(requests, checksum, leaf)

    def sum(self, ranges: Iterable[tuple[int, int]], *, leaf: str) -> Outcome:
        """Reads byte ranges of the array for their checksums alone; blocks."""
        checksums = _Checksums(True)
        size = 0
        buffer = _staging()
        for start, stop in ranges:
            for low in range(start, stop, _WINDOW_BYTES):
                data = buffer[: min(_WINDOW_BYTES, stop - low)]
                self.file.read_into(self.offset + low, [data], leaf=leaf)
                checksums.add(low, data)
            size += stop - start
        return Outcome(checksums.flush(), size, 0)

    # -- straight into the buffers

    def _spans(self, requests: Sequence[Request]) -> list[_Span] | None:
        """The requests as disjoint byte ranges in file order; None where they are not, or their bytes need work."""
        if self.swap or self.dtype == _BOOL or self.dtype in _LOW_BITS:
            return None
        spans: list[_Span] = []
        for box, out in requests:
            found = byte_span(self.shape, self.dtype.itemsize, box) if out.flags.c_contiguous else None
            if found is None:
                return None
            spans.append(_Span(*found, out.reshape(-1).view(np.uint8)))
        spans.sort(key=lambda span: span.start)
        if any(after.start < before.stop for before, after in itertools.pairwise(spans)):
            return None
        return spans

    def _read_spans(self, spans: list[_Span], checksum: bool, leaf: str) -> Outcome:
        jobs = _grouped(_batches(spans), lambda batch: sum(buffer.nbytes for buffer in batch.buffers))
        done = run_jobs(partial(self._read_batches, batches, checksum, leaf) for batches in jobs)
        wanted = sum(span.stop - span.start for span in spans)
        read = sum(outcome.wanted for outcome in done)
        return Outcome([part for outcome in done for part in outcome.parts], wanted, read - wanted)

    def _read_batches(self, batches: list[_Batch], checksum: bool, leaf: str) -> Outcome:
        checksums = _Checksums(checksum)
        size = 0
        for batch in batches:
            self.file.read_into(self.offset + batch.start, batch.buffers, leaf=leaf)
            size += sum(buffer.nbytes for buffer in batch.buffers)
            for start, buffer in batch.wanted:
                checksums.add(start, buffer)
        return Outcome(checksums.flush(), size, 0)

    # -- through a staging buffer

    def _read_windows(self, requests: Sequence[Request], checksum: bool, leaf: str) -> Outcome:
        itemsize = self.dtype.itemsize
        boxes = [request.box for request in requests]
        runs, wanted = union_runs(self.shape, itemsize, boxes, MAX_GAP_BYTES)
        join = wanted == sum(run.length * run.times for run in runs)
        if checksum and not join:
            runs = split_ends(runs, union_runs(self.shape, itemsize, boxes, 0)[0])
        scatter = _Scatter(self, requests, WindowGrid(self.shape, itemsize, _WINDOW_BYTES), leaf)
        jobs = _grouped(scatter.grid.windows(runs), lambda window: sum(stop - start for start, stop in window.pieces))
        done = run_jobs(
            partial(self._read_some, windows, scatter, _Checksums(checksum, join=join), leaf) for windows in jobs
        )
        read = sum(outcome.wanted for outcome, _ in done)
        filled = sum(elements for _, elements in done)
        if filled != sum(box_size(request.box) for request in requests):
            raise CheckpointIOError("the buffers were not filled completely", path=self.file.path, leaf=leaf)
        return Outcome([part for outcome, _ in done for part in outcome.parts], wanted, read - wanted)

    def _read_some(
        self, windows: list[Window], scatter: _Scatter, checksums: _Checksums, leaf: str
    ) -> tuple[Outcome, int]:
        buffer = _staging()
        size = filled = 0
        for window in windows:
            for start, stop in window.pieces:
                data = buffer[start - window.start : stop - window.start]
                self.file.read_into(self.offset + start, [data], leaf=leaf)
                checksums.add(start, data)
                size += stop - start
            filled += scatter.window(window, buffer[: window.stop - window.start])
        return Outcome(checksums.flush(), size, 0), filled


class _Batch(NamedTuple):
    """One read: buffers to fill from byte `start` on, and those of them that are wanted, with their first bytes."""

    start: int
    buffers: list[np.ndarray]
    wanted: list[tuple[int, np.ndarray]]


def _batches(spans: Sequence[_Span]) -> Iterator[_Batch]:
    """Reads of about a window each; gaps that are read over fill a scrap buffer."""
    batch = _Batch(0, [], [])
    size = stop = 0
    for span in spans:
        gap = span.start - stop
        if batch.buffers and gap < MAX_GAP_BYTES:
            if gap:
                batch.buffers.append(np.empty(gap, np.uint8))
        else:
            if batch.buffers:
                yield batch
            batch, size = _Batch(span.start, [], []), 0
        at = 0
        while at < span.out.nbytes:
            if size >= _WINDOW_BYTES:
                yield batch
                batch, size = _Batch(span.start + at, [], []), 0
            piece = span.out[at : at + _WINDOW_BYTES - size]
            batch.buffers.append(piece)
            batch.wanted.append((span.start + at, piece))
            at += piece.nbytes
            size += piece.nbytes
        stop = span.stop
    if batch.buffers:
        yield batch


def _grouped(items: Iterable[_Item], size_of: Callable[[_Item], int]) -> Iterator[list[_Item]]:
    """Consecutive items in groups of about a job's bytes."""
    group: list[_Item] = []
    size = 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if size >= _JOB_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


class _Scatter:
    """Copies from windows to the buffers that want a part of them."""

    def __init__(self, array: ByteRange, requests: Sequence[Request], grid: WindowGrid, leaf: str):
        self._array = array
        self._leaf = leaf
        self.grid = grid
        self._inner_shape = (array.shape or (1,))[grid.depth + 1 :]
        self._low_bits = _LOW_BITS.get(array.dtype)
        self._targets = [_target(request, grid.depth) for request in requests]

    def window(self, window: Window, data: np.ndarray) -> int:
        """Copies what the requests want of one window; returns the number of elements."""
        array = self._array
        stored = data.view(array.dtype).reshape(window.high - window.low, *self._inner_shape)
        filled = 0
        for outer, (low, high), inner, out in self._targets:
            first, last = max(low, window.low), min(high, window.high)
            if first >= last or not all(a <= at < b for at, (a, b) in zip(window.outer, outer, strict=True)):
                continue
            values = stored[(slice(first - window.low, last - window.low), *inner)]
            index = tuple(at - a for at, (a, _) in zip(window.outer, outer, strict=True))
            self._copy(values, out[(*index, slice(first - low, last - low))])
            filled += values.size
        return filled

    def _copy(self, values: np.ndarray, out: np.ndarray) -> None:
        dtype = self._array.dtype
        if self._array.swap:
            out[...] = _swapped(values)
        elif dtype == _BOOL:
            bits = values.view(np.uint8)
            if int(bits.max()) > 1:
                message = f"a bool is stored as {int(bits.max())}"
                raise CorruptCheckpointError(message, path=self._array.file.path, leaf=self._leaf)
            out[...] = values
        elif self._low_bits is not None:
            out[...] = (values.view(np.uint8) & np.uint8(self._low_bits)).view(dtype)
        else:
            out[...] = values


def _target(request: Request, depth: int) -> tuple[tuple, tuple[int, int], tuple[slice, ...], np.ndarray]:
    """A request as (outer ranges, range of the cut dimension, slices of the inner ones, buffer)."""
    box = request.box or ((0, 1),)
    out = request.out if request.box else request.out.reshape(1)
    return box[:depth], box[depth], tuple(slice(low, high) for low, high in box[depth + 1 :]), out


def _swapped(values: np.ndarray) -> np.ndarray:
    """The values with the bytes of each number (each half of a complex one) in the other order."""
    dtype = values.dtype
    width = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    contiguous = np.ascontiguousarray(values)
    return contiguous.view(np.dtype(f"u{width}")).byteswap().view(dtype).reshape(values.shape)
