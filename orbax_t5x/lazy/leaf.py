"""What a reader promises: a leaf is a name, a shape, a dtype, and a way to fill buffers from index boxes.

Readers implement `Leaf`; views compose leaves; the executor calls `read_into`. Nothing else reads array bytes. A leaf
never allocates what it was not asked for beyond a bounded staging buffer, never follows what a file merely claims, and
may be read from several threads and event loops at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

Box = tuple[tuple[int, int], ...]
"""An index box: (start, stop) per dimension, 0 <= start <= stop <= size. () is the box of a rank-0 array."""

Verify = Literal["touched", "full", "off"]


def full_box(shape: Sequence[int]) -> Box:
    """The box of a whole array."""
    return tuple((0, size) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """The shape of the array that a box cuts out."""
    return tuple([stop - start for start, stop in box])


def box_size(box: Box) -> int:
    """The number of elements in a box."""
    return math.prod([stop - start for start, stop in box])


def box_slices(box: Box) -> tuple[slice, ...]:
    """The box as a NumPy index."""
    return tuple(slice(start, stop) for start, stop in box)


class Request(NamedTuple):
    """Fill `out` with the elements of `box`.

    `out` has the leaf's dtype and the shape of the box; it is writable, and may have any strides, negative ones
    included.
    """

    box: Box
    out: np.ndarray


class Part(NamedTuple):
    """The crc32c of the bytes [start, stop) of a leaf's checksummed extent, as they were read."""

    start: int
    stop: int
    crc: int


class Ledger:
    """What one execution read and what was checked; filled by leaves, from any thread, reported by the executor.

    Attributes:
      verify: which checksums are wanted ("touched", "full", "off"); a leaf computes none under "off".
      bytes_read: bytes asked for and read (for compressed formats: as stored where the reader can tell, else decoded).
      gap_bytes: bytes read over because they lay between two wanted runs less than 4 KiB apart.
      fill_chunks: chunks that were legitimately absent and stand for the fill value.
    """

    def __init__(self, verify: Verify = "touched"):
        self.verify: Verify = verify
        self.bytes_read = 0
        self.gap_bytes = 0
        self.fill_chunks = 0
        self._parts: dict[int, list[Part]] = {}
        self._lock = threading.Lock()

    def count(self, bytes_read: int, gap_bytes: int = 0, fill_chunks: int = 0) -> None:
        """Adds to the counters."""
        with self._lock:
            self.bytes_read += bytes_read
            self.gap_bytes += gap_bytes
            self.fill_chunks += fill_chunks

    def add_part(self, leaf: Leaf, part: Part) -> None:
        """Notes a checksum of some bytes of a leaf; parts of one leaf may come in any order and may overlap."""
        with self._lock:
            self._parts.setdefault(id(leaf), []).append(part)

    def parts(self, leaf: Leaf) -> list[Part]:
        """The parts noted for a leaf so far."""
        with self._lock:
            return list(self._parts.get(id(leaf), ()))


@runtime_checkable
class Leaf(Protocol):
    """One stored array.

    Attributes:
      name: '/'-joined name as the checkpoint has it; errors name it.
      path: the file or directory that holds it, for errors.
      shape, dtype: of the whole array; dtype is a NumPy dtype (ml_dtypes' included), object for strings (elements are
        `bytes`).
      chunks: the shape of the unit in which the format can be read, or None where any byte range can be.

    A leaf may have `read_blocking(requests, ledger)`, too: `read_into` for a caller that has a thread of its own.
    """

    name: str
    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...] | None

    async def read_into(self, requests: Sequence[Request], ledger: Ledger) -> None:
        """Fills every request's buffer, completely, reading each stored byte at most once for all of them.

        All requests that one execution has for this leaf at a time come in one call; boxes may overlap. A reader of
        byte ranges reads runs in file order, over gaps below 4 KiB, straight into `out` where the run is contiguous
        there. Blocking work is done in a thread, never on the event loop. A cancelled or failed call leaves buffers
        undefined.

        Raises:
          CorruptCheckpointError, CheckpointIOError, CheckpointGoneError: naming `path` and `name`.
          ValueError: the checkpoint was closed.
        """
        ...

    async def settle(self, ledger: Ledger, parts: Sequence[Part]) -> bool | None:
        """Compares checksums after the last read of this leaf.

        `parts` come from all processes together. Under "full" what no part covers is read first.

        Returns:
          True: every byte was covered and the checksum holds. False: read only in part, so unverified. None: the format
            keeps no checksum for this leaf (or verification is off).

        Raises:
          CorruptCheckpointError: the checksum does not hold; the text gives the stored and the computed one.
        """
        ...


# How late an interrupt may be noticed.
_POLL_SECS = 0.5


class ReadThread:
    """An event loop in a thread of its own, on which leaves are read.

    Never the caller's loop or thread: it works where a loop is already running, and no coroutine that holds arrays is
    ever handed to `asyncio.run` (whose runner formats the finished task, and so the arrays, on exit).
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="orbax_t5x-read", daemon=True)
        self._thread.start()

    def is_current(self) -> bool:
        """Whether the caller runs on this thread, where waiting for it would never end."""
        return threading.current_thread() is self._thread

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine that returns None to its end; a KeyboardInterrupt cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            # A wait without end would not notice a signal that came just before it began.
            while not future.done():
                with contextlib.suppress(TimeoutError):
                    future.exception(_POLL_SECS)
            future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Stops the loop; the thread ends."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
