"""Windows of a file: near ranges that are read together.

Thousands of small arrays lie side by side in most files. A read, a request or a proof that the file is unchanged for
each of them costs more than their bytes. While a thread holds a window, its reads of the file inside are copied from
memory, and whoever holds it proves, after the last one, that the file has not changed.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from orbax_t5x.files.interface import StoredBytes

# Contract: byte-range formats may read over gaps below this.
MAX_GAP_BYTES = 4096
# One read and its checksum. Larger falls out of a core's cache between the two, smaller pays for more system calls.
WINDOW_BYTES = 1 << 20

_thread = threading.local()


class FileWindow(NamedTuple):
    """Bytes [start, stop) of a file, and the ranges inside."""

    start: int
    stop: int
    members: list[int]

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self.stop - self.start


def windows_of(ranges: Sequence[tuple[int, int]]) -> Iterator[FileWindow]:
    """Joins ranges (start, stop) with small gaps."""
    window: FileWindow | None = None
    for number in sorted(range(len(ranges)), key=ranges.__getitem__):
        start, stop = ranges[number]
        if window is not None and start - window.stop < MAX_GAP_BYTES and stop - window.start <= WINDOW_BYTES:
            window.members.append(number)
            window = window._replace(stop=max(stop, window.stop))
            continue
        if window is not None:
            yield window
        window = FileWindow(start, stop, [number])
    if window is not None:
        yield window


def read_windows(
    file: StoredBytes, windows: Iterable[FileWindow], *, leaf: str | None = None
) -> Iterator[tuple[FileWindow, np.ndarray]]:
    """Reads windows of a file in order."""
    windows = list(windows)
    buffer = np.empty(max([window.size for window in windows], default=0), np.uint8)
    ahead = file.ahead((window.start, window.size) for window in windows)
    for window in windows:
        data = buffer[: window.size]
        ahead.read_into(window.start, [data], leaf=leaf)
        yield window, data


@contextmanager
def holding(file: object, start: int, data: np.ndarray) -> Generator[None, None, None]:
    """Serves this thread's reads of a file from held bytes."""
    _thread.held = file, start, data
    try:
        yield
    finally:
        _thread.held = None


def is_held(file: object) -> bool:
    """Tests if this thread holds a window of a file."""
    held = getattr(_thread, "held", None)
    return held is not None and held[0] is file


def held_bytes(file: object, offset: int, size: int) -> np.ndarray | None:
    """Returns bytes of a file that this thread holds, or None."""
    held = getattr(_thread, "held", None)
    if held is None or held[0] is not file:
        return None
    start, data = offset - held[1], held[2]
    return data[start : start + size] if start >= 0 and start + size <= data.size else None


def fill_held(file: object, offset: int, buffers: Sequence[np.ndarray]) -> bool:
    """Fills buffers from a window that this thread holds."""
    data = held_bytes(file, offset, sum([buffer.nbytes for buffer in buffers]))
    if data is None:
        return False
    for buffer in buffers:
        buffer.reshape(-1).view(np.uint8)[:] = data[: buffer.nbytes]
        data = data[buffer.nbytes :]
    return True
