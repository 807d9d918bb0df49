"""A row-major array in a file's byte range, read by box.

Two ways in. Boxes that are each one byte range are read straight into their buffers. Boxes that are not (column shards)
go through windows (`windowed`). Either way every stored byte is read at most once per call, in file order, the checksum
runs over what was read as stored, and every element of every buffer is counted. Memory: one staging buffer per thread.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from orbax_t5x import on_demand
from orbax_t5x.concurrency import run_jobs
from orbax_t5x.files.crc import CRC32C, Crc
from orbax_t5x.files.interface import StoredBytes
from orbax_t5x.files.windows import MAX_GAP_BYTES, WINDOW_BYTES
from orbax_t5x.lazy.box import Box, box_shape, box_size, union_size
from orbax_t5x.lazy.leaf import Request
from orbax_t5x.lazy.read_stats import ChecksummedRange
from orbax_t5x.readers.ranges.elements import as_stored

# Of boxes that are several byte ranges, or of elements that are stored in another way.
_read_windows: Callable[..., ReadOutcome] = on_demand.function("orbax_t5x.readers.ranges.windowed", "read_by_windows")

# What one thread takes at a time of a large array.
_JOB_BYTES = 16 << 20

_Item = TypeVar("_Item")

_thread = threading.local()


def staging_buffer() -> np.ndarray:
    """Returns this thread's staging buffer."""
    buffer = getattr(_thread, "buffer", None)
    if buffer is None or buffer.size < WINDOW_BYTES:
        buffer = _thread.buffer = np.zeros(WINDOW_BYTES, np.uint8)
    return buffer


class ReadOutcome(NamedTuple):
    """Checksums of a read's ranges, bytes wanted, bytes read over."""

    ranges: list[ChecksummedRange]
    wanted: int
    gaps: int


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


class _Span(NamedTuple):
    """A contiguous buffer that is a byte range of the array."""

    start: int
    stop: int
    out: np.ndarray


class ReadChecksums:
    """Checksums of consecutive reads.

    With `join`, they are a single range while each read follows the other.
    """

    def __init__(self, kind: Crc, wanted: bool, *, join: bool = True):
        self._kind = kind
        self._wanted = wanted
        self._join = join
        self._start = self._stop = 0
        self._crc = 0
        self.ranges: list[ChecksummedRange] = []

    def add(self, start: int, data: np.ndarray) -> None:
        """Adds the bytes of a read."""
        if not self._wanted:
            return
        if start != self._stop or not self._join:
            self.flush()
            self._start = start
        self._crc = self._kind.extend(self._crc, data)
        self._stop = start + data.nbytes

    def flush(self) -> list[ChecksummedRange]:
        """Ends the range at hand; returns all."""
        if self._stop > self._start:
            self.ranges.append(ChecksummedRange(self._start, self._stop, self._crc))
        self._start, self._crc = self._stop, 0
        return self.ranges


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class StoredRange(abc.ABC):
    """Array at `offset` of a file, in an encoding of its own.

    Readers have compared its size with the file's.
    """

    file: StoredBytes
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """The bytes of the whole array, as stored."""

    @abc.abstractmethod
    def bytes_of(self, boxes: tuple[Box, ...]) -> int:
        """Returns the bytes that reading these boxes together counts as wanted."""

    @abc.abstractmethod
    def read(self, requests: Sequence[Request], *, checksum: bool, leaf: str) -> ReadOutcome:
        """Fills all requests; blocks. Errors name the file and `leaf`."""

    @abc.abstractmethod
    def sum(self, ranges: Iterable[tuple[int, int]], *, leaf: str) -> ReadOutcome:
        """Reads byte ranges of it only for their checksums; blocks."""

    def as_in_memory(self, box: Box) -> tuple[int, int] | None:
        """Returns a box's byte range as in memory, or None."""
        return None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ByteRange(StoredRange):
    """A row-major array in a byte range.

    Attributes:
      swap: the bytes of each element are stored in the other order than this machine's.
      kind: of the checksums that reading computes.
    """

    swap: bool = False
    kind: Crc = CRC32C

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def bytes_of(self, boxes: tuple[Box, ...]) -> int:
        return union_size(boxes) * self.dtype.itemsize

    def read(self, requests: Sequence[Request], *, checksum: bool, leaf: str) -> ReadOutcome:
        itemsize = self.dtype.itemsize
        strides = byte_strides(self.shape, itemsize)
        direct = not self.swap and as_stored(self.dtype)
        spans: list[_Span] = []
        wanted: list[Request] = []
        for request in requests:
            box, out = request
            placed = locate_box(box, out.shape, self.shape, strides)
            if placed is None or out.dtype != self.dtype:
                raise ValueError(
                    f"{leaf}: a buffer of {out.dtype} {out.shape} for {box} of an array of {self.dtype} {self.shape}"
                )
            if not out.size:
                continue
            wanted.append(request)
            start, contiguous = placed
            if direct:
                direct = contiguous and out.flags.c_contiguous
                spans.append(_Span(start, start + out.nbytes, out))
        if not wanted:
            return ReadOutcome([], 0, 0)
        if direct and _disjoint(spans):
            return self._read_spans(spans, checksum, leaf)
        return _read_windows(self, wanted, checksum=checksum, leaf=leaf)

    def as_in_memory(self, box: Box) -> tuple[int, int] | None:
        strides = byte_strides(self.shape, self.dtype.itemsize)
        placed = locate_box(box, box_shape(box), self.shape, strides)
        if self.swap or not as_stored(self.dtype) or placed is None or not placed[1]:
            return None
        return placed[0], placed[0] + box_size(box) * self.dtype.itemsize

    def sum(
        self, ranges: Iterable[tuple[int, int]], *, leaf: str, sink: Callable[[int, np.ndarray], None] | None = None
    ) -> ReadOutcome:
        """Implements `StoredRange.sum`."""
        checksums = ReadChecksums(self.kind, True)
        size = 0
        buffer = staging_buffer()
        windows = [
            (low, min(WINDOW_BYTES, stop - low)) for start, stop in ranges for low in range(start, stop, WINDOW_BYTES)
        ]
        file = self.file.ahead((self.offset + low, length) for low, length in windows)
        for low, length in windows:
            data = buffer[:length]
            file.read_into(self.offset + low, [data], leaf=leaf)
            checksums.add(low, data)
            size += length
            if sink is not None:
                sink(low, data)
        return ReadOutcome(checksums.flush(), size, 0)

    # -- straight into the buffers

    def _read_spans(self, spans: list[_Span], checksum: bool, leaf: str) -> ReadOutcome:
        wanted = sum([span.stop - span.start for span in spans])
        batches = _batches(spans)
        if wanted <= _JOB_BYTES:
            ranges, read, _ = self._read_batches(list(batches), checksum, leaf)
            return ReadOutcome(ranges, wanted, read - wanted)
        jobs = grouped(batches, lambda batch: batch.size)
        done = run_jobs(partial(self._read_batches, group, checksum, leaf) for group in jobs)
        read = sum(outcome.wanted for outcome in done)
        return ReadOutcome([one for outcome in done for one in outcome.ranges], wanted, read - wanted)

    def _read_batches(self, batches: Sequence[_Batch], checksum: bool, leaf: str) -> ReadOutcome:
        checksums = ReadChecksums(self.kind, checksum)
        size = 0
        ranges = ((self.offset + batch.start, batch.size) for batch in batches)
        file = self.file.ahead(ranges)
        for batch in batches:
            file.read_into(self.offset + batch.start, batch.buffers, leaf=leaf)
            size += batch.size
            if checksum:
                for start, buffer in batch.wanted:
                    checksums.add(start, buffer)
        return ReadOutcome(checksums.flush(), size, 0)


class _Batch(NamedTuple):
    """A read from byte `start`: all buffers, and wanted buffers."""

    start: int
    size: int
    buffers: list[np.ndarray]
    wanted: list[tuple[int, np.ndarray]]


def _disjoint(spans: list[_Span]) -> bool:
    """Sorts spans into file order; tests if they share no byte."""
    stop = 0
    for span in spans:
        if span.start < stop:
            break
        stop = span.stop
    else:
        return True
    spans.sort(key=lambda span: span.start)
    return all(before.stop <= after.start for before, after in itertools.pairwise(spans))


def _batches(spans: Sequence[_Span]) -> Iterator[_Batch]:
    """Yields reads of a window each; gaps fill scrap buffers."""
    buffers: list[np.ndarray] = []
    wanted: list[tuple[int, np.ndarray]] = []
    first, at = 0, -MAX_GAP_BYTES  # of the batch: its first byte, the byte behind it
    for start, _, out in spans:
        if start - at >= MAX_GAP_BYTES:
            if buffers:
                yield _Batch(first, at - first, buffers, wanted)
                buffers, wanted = [], []
            first = at = start
        # Summed window by window, each while it is in the cache.
        gap = np.empty(start - at, np.uint8)
        for data in (gap, out.reshape(-1).view(np.uint8)):
            while data.size:
                taken, data = np.split(data, [first + WINDOW_BYTES - at])
                buffers.append(taken)
                if at >= start:
                    wanted.append((at, taken))
                at += taken.size
                if at - first == WINDOW_BYTES:
                    yield _Batch(first, at - first, buffers, wanted)
                    buffers, wanted, first = [], [], at
    if buffers:
        yield _Batch(first, at - first, buffers, wanted)


def grouped(items: Iterable[_Item], size_of: Callable[[_Item], int]) -> Iterator[list[_Item]]:
    """Groups consecutive items to about a job's bytes each."""
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
