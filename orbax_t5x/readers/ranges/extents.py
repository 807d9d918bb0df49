"""Byte ranges of a file that follow each other in an array.

They are read as a single range.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from orbax_t5x.files.interface import ReadAhead, StoredFile
from orbax_t5x.files.windows import MAX_GAP_BYTES
from orbax_t5x.lazy.leaf import FileExtent


class ByteExtent(NamedTuple):
    """`size` bytes of a file from `start` on."""

    start: int
    size: int


class JoinedExtents:
    """Byte ranges of a file, joined to the file of a `ByteRange`."""

    def __init__(self, file: StoredFile, extents: Sequence[ByteExtent]):
        self._file = file
        self._extents = [extent for extent in extents if extent.size]
        self._begins = list(itertools.accumulate((extent.size for extent in self._extents), initial=0))
        self.path: str = file.path
        self.is_remote: bool = file.is_remote
        self.size: int = self._begins.pop() if self._extents else 0

    def extent(self, offset: int, size: int) -> FileExtent | None:
        """Returns the file's bytes that hold a range, or None."""
        runs = list(self._in_file(offset, size))
        if not runs:
            return None
        start, stop = min(runs)[0], max(first + count for first, count in runs)
        return FileExtent(self._file, start, stop) if stop - start - size < MAX_GAP_BYTES else None

    def read_into(self, offset: int, buffers: Sequence[np.ndarray], *, leaf: str | None = None) -> None:
        """Implements `StoredFile.read_into`; `offset` counts from the first byte of the first range."""
        self._read(self._file, offset, buffers, leaf)

    def ahead(self, ranges: Iterable[tuple[int, int]], into: Iterable[Sequence[np.ndarray]] = ()) -> ReadAhead:
        """Implements `StoredFile.ahead`."""
        in_file = (run for offset, size in ranges for run in self._in_file(offset, size))
        return _JoinedReadAhead(self, self._file.ahead(in_file))

    def _in_file(self, offset: int, size: int) -> Iterator[tuple[int, int]]:
        """Yields (offset, size) in the file for a joined range."""
        number = bisect.bisect_right(self._begins, offset) - 1
        while size:
            start, length = self._extents[number]
            inside = offset - self._begins[number]
            count = min(size, length - inside)
            yield start + inside, count
            offset, size, number = offset + count, size - count, number + 1

    def _read(self, file: ReadAhead, offset: int, buffers: Sequence[np.ndarray], leaf: str | None) -> None:
        views = [buffer.reshape(-1).view(np.uint8) for buffer in buffers]
        for start, size in self._in_file(offset, sum(view.size for view in views)):
            into: list[np.ndarray] = []
            while size:
                run = views[0][:size]
                views[0] = views[0][run.size :]
                size -= run.size
                if run.size:
                    into.append(run)
                if not views[0].size:
                    views.pop(0)
            file.read_into(start, into, leaf=leaf)

    def check_unchanged(self, *, leaf: str | None = None) -> None:
        """Implements `StoredFile.check_unchanged`."""
        self._file.check_unchanged(leaf=leaf)


class _JoinedReadAhead:
    """Announced reads of joined ranges."""

    def __init__(self, joined: JoinedExtents, file: ReadAhead):
        self._joined = joined
        self._file = file

    def read_into(self, offset: int, buffers: Sequence[np.ndarray], *, leaf: str | None = None) -> None:
        self._joined._read(self._file, offset, buffers, leaf)


class DeferredExtents:
    """Ranges of a file that are found when they are first read.

    Attributes:
      path: of the file.
      is_remote: see `FilePlace`.
    """

    def __init__(self, file: StoredFile, find: Callable[[], JoinedExtents]):
        self.path: str = file.path
        self.is_remote: bool = file.is_remote
        self._find = find

    @functools.cached_property
    def _found(self) -> JoinedExtents:
        return self._find()

    def read_into(self, offset: int, buffers: Sequence[np.ndarray], *, leaf: str | None = None) -> None:
        """Implements `StoredFile.read_into`; `offset` counts from the first byte of the first range."""
        self._found.read_into(offset, buffers, leaf=leaf)

    def ahead(self, ranges: Iterable[tuple[int, int]], into: Iterable[Sequence[np.ndarray]] = ()) -> ReadAhead:
        """Implements `StoredFile.ahead`."""
        return self._found.ahead(ranges, into)

    def check_unchanged(self, *, leaf: str | None = None) -> None:
        """Implements `StoredFile.check_unchanged`."""
        self._found.check_unchanged(leaf=leaf)


StoredBytes = StoredFile | JoinedExtents | DeferredExtents
"""Bytes that a `ByteRange` reads: of a file, or of ranges of one."""
