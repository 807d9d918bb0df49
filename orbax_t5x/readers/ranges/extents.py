"""Several byte ranges of one file that follow each other in an array: read as if they were one."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from orbax_t5x.storage.files import File


class StoredBytes(Protocol):
    """Bytes that a `ByteRange` reads: a `File`, or parts of one.

    Attributes:
      path: for messages.
    """

    path: str

    def read_into(self, offset: int, buffers: Sequence[np.ndarray], *, leaf: str | None = None) -> None:
        """See `File.read_into`."""
        ...

    def check_unchanged(self, *, leaf: str | None = None) -> None:
        """See `File.check_unchanged`."""
        ...


class ByteExtent(NamedTuple):
    """`size` bytes of a file from `start` on."""

    start: int
    size: int


class JoinedExtents:
    """Byte ranges of a file, one after the other, as the file that a `ByteRange` reads.

    Attributes:
      path: of the file.
      size: of all ranges.
    """

    def __init__(self, file: File, extents: Sequence[ByteExtent]):
        self._file = file
        self._extents = [extent for extent in extents if extent.size]
        self._begins = list(itertools.accumulate((extent.size for extent in self._extents), initial=0))
        self.path: str = file.path
        self.size: int = self._begins.pop() if self._extents else 0

    def read_into(self, offset: int, buffers: Sequence[np.ndarray], *, leaf: str | None = None) -> None:
        """See `File.read_into`; `offset` counts from the first byte of the first range."""
        number = bisect.bisect_right(self._begins, offset) - 1
        inside = offset - self._begins[number]
        part: list[np.ndarray] = []
        start = self._extents[number].start + inside
        for buffer in buffers:
            data = buffer.reshape(-1).view(np.uint8)
            while data.size:
                room = self._extents[number].size - inside
                piece, data = data[:room], data[room:]
                part.append(piece)
                inside += piece.size
                if inside == self._extents[number].size and number + 1 < len(self._extents):
                    self._file.read_into(start, part, leaf=leaf)
                    number, inside, part = number + 1, 0, []
                    start = self._extents[number].start
        if part:
            self._file.read_into(start, part, leaf=leaf)

    def check_unchanged(self, *, leaf: str | None = None) -> None:
        """See `File.check_unchanged`."""
        self._file.check_unchanged(leaf=leaf)
