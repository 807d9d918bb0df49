"""Read stats: counters and checksums of an execution."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Generator
from typing import Literal, NamedTuple, Protocol

from orbax_t5x.concurrency import Budget, run_jobs
from orbax_t5x.files.interface import StoredBytes

Verify = Literal["touched", "full", "off"]

# For decoded chunks where no limit is given. Lower: fewer chunks are decoded at a time.
_DECODING_BYTES = 256 << 20


class ChecksummedRange(NamedTuple):
    """Checksum of bytes [start, stop) as they were read.

    They are of a leaf's checksummed extent.
    """

    start: int
    stop: int
    crc: int


class WatchedFile(Protocol):
    """File of a remote store that is compared with the opening once, at the end of an execution."""

    @property
    def path(self) -> str:
        """The URL."""
        ...

    def check_unchanged(self, *, leaf: str | None = None) -> None:
        """Raises CheckpointGoneError if it changed."""
        ...


class ReadStats:
    """Counters, checksums and remote files of an execution.

    Attributes:
      verify: which checksums are wanted ("touched", "full", "off"); a leaf computes none under "off".
      bytes_read: bytes of the requested elements, decoded, each element once per call (`Leaf.bytes_of`);
        what can only be read whole, such as the strings of a TensorFlow bundle, counts whole and as stored. What
        `verify="full"` reads only for checksums comes on top.
      gap_bytes: bytes read over because they lay between two wanted runs less than 4 KiB apart.
      fill_chunks: chunks that were legitimately absent and stand for the fill value.
      decoding: memory for chunks, which are decoded as a whole beside the buffers that want a part of them; all leaves
        of the execution share it, on one event loop.
    """

    def __init__(self, verify: Verify = "touched", decoding_bytes: int = _DECODING_BYTES):
        self.verify: Verify = verify
        self.decoding: Budget = Budget(decoding_bytes)
        self.bytes_read: int = 0
        self.gap_bytes: int = 0
        self.fill_chunks: int = 0
        self._ranges: dict[object, list[ChecksummedRange]] = {}
        self._watched: dict[str, WatchedFile] = {}
        self._lock = threading.Lock()

    def count(self, bytes_read: int, gap_bytes: int = 0, fill_chunks: int = 0) -> None:
        """Adds to the counters."""
        with self._lock:
            self.bytes_read += bytes_read
            self.gap_bytes += gap_bytes
            self.fill_chunks += fill_chunks

    def prove_unchanged(self, file: StoredBytes, *, leaf: str | None = None) -> None:
        """Compares a file that was read with the opening: at once, or a remote one at the end of the execution."""
        if file.is_remote:
            self.watch(file)
        else:
            file.check_unchanged(leaf=leaf)

    def watch(self, file: WatchedFile) -> None:
        """Adds a file of a remote store to those that `check_watched` compares."""
        with self._lock:
            self._watched.setdefault(file.path, file)

    def check_watched(self) -> None:
        """Compares the watched files with the opening, each once; blocks.

        Raises:
          CheckpointGoneError: One of them changed.
        """
        with self._lock:
            watched, self._watched = self._watched, {}
        run_jobs(file.check_unchanged for file in watched.values())

    def add_range(self, leaf: object, part: ChecksummedRange) -> None:
        """Records the checksum of some bytes of a leaf."""
        with self._lock:
            self._ranges.setdefault(leaf, []).append(part)

    def ranges(self, leaf: object) -> list[ChecksummedRange]:
        """Returns the ranges that were recorded for a leaf so far."""
        with self._lock:
            return list(self._ranges.get(leaf, ()))


_counting: contextvars.ContextVar[ReadStats | None] = contextvars.ContextVar("_counting", default=None)


@contextlib.contextmanager
def counting_reads() -> Generator[ReadStats]:
    """Counts the reads of views in this context, until it ends."""
    stats = ReadStats()
    token = _counting.set(stats)
    try:
        yield stats
    finally:
        _counting.reset(token)


def note_read(stats: ReadStats) -> None:
    """Adds a read to the context's count, if there is a count."""
    if (counting := _counting.get()) is not None:
        counting.count(stats.bytes_read, stats.gap_bytes, stats.fill_chunks)
