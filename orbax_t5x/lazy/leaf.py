"""Interface of leaves between readers and all above them.

A leaf has a name, a shape and a dtype, and fills buffers from boxes. Readers subclass `Leaf`; views compose leaves; the
executor calls `read_into`. Nothing else reads array bytes. A leaf never allocates more than was requested beyond a
bounded staging buffer, never follows what a file merely claims, and may be read from several threads and event loops at
once.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from orbax_t5x.errors import CheckpointError, error_at
from orbax_t5x.files.crc import CRC32C, Crc
from orbax_t5x.files.interface import StoredBytes
from orbax_t5x.lazy.box import Box, union_size
from orbax_t5x.lazy.read_stats import ChecksummedRange, ReadStats


class Request(NamedTuple):
    """A box to read, and the buffer `out` for its elements.

    `out` has the leaf's dtype and the shape of the box; it is writable, and may have any strides, negative ones
    included.
    """

    box: Box
    out: np.ndarray


class FileExtent(NamedTuple):
    """Bytes [start, stop) of a file."""

    file: StoredBytes
    start: int
    stop: int


class Checksums(abc.ABC):
    """Checksums that a checkpoint keeps of a leaf's data.

    Attributes:
      error: why they cannot be used, or None. Verifying raises it.
      kind: of the checksums.
    """

    error: CheckpointError | None = None
    kind: Crc = CRC32C

    @abc.abstractmethod
    async def verify(self, stats: ReadStats, ranges: Sequence[ChecksummedRange]) -> bool:
        """Compares the checksums of the ranges that were read; see `Leaf.verify_checksum`."""


class UnusableChecksums(Checksums):
    """Checksums that cannot be compared, because of `error`."""

    def __init__(self, leaf: str, error: CheckpointError):
        self.error: CheckpointError | None = error_at(error, path=error.path, leaf=leaf)

    async def verify(self, stats: ReadStats, ranges: Sequence[ChecksummedRange]) -> bool:
        assert self.error is not None
        raise self.error


class Leaf(abc.ABC):
    """A stored array.

    Leaves are compared and hashed by identity.

    Attributes:
      name: '/'-joined name as the checkpoint has it; errors name it.
      path: the file or directory that holds it, for errors; empty where there is none.
      shape, dtype: of the whole array; dtype is a NumPy dtype (ml_dtypes' included), object for strings (elements are
        `bytes`).
      chunks: the shape of the unit in which the format can be read, or None where any byte range can be.
      error: what makes the leaf unreadable, found when the checkpoint was opened, or None. Reading raises it.
      is_remote: whether reading it waits for another machine.
      is_value: whether it is a constant in memory, so that reading it reads nothing of a checkpoint.
      storage: equal for leaves of the same stored elements; None if the format does not tell.
      prng_impl: the implementation of typed PRNG keys whose uint32 data this is, where the format records it.
    """

    __slots__ = ("__weakref__",)

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    path: str = ""
    chunks: tuple[int, ...] | None = None
    error: CheckpointError | None = None
    is_remote: bool = False
    is_value: bool = False
    storage: Hashable = None
    prng_impl: str | None = None

    @property
    def checksums(self) -> Checksums | None:
        """The checkpoint's checksums of the data, or None."""
        return None

    @property
    def working_bytes(self) -> int:
        """Decoded bytes that a read holds at least, beside its buffers."""
        return 0 if self.chunks is None else math.prod(self.chunks) * self.dtype.itemsize

    @property
    def repeated(self) -> tuple[int, ...]:
        """The dimensions along which equal elements are stored once."""
        return ()

    @property
    def chunk_checksum(self) -> str | None:
        """The codec that checks each chunk at reading ("gzip", …), or None."""
        return None

    @abc.abstractmethod
    async def read_into(self, requests: Sequence[Request], stats: ReadStats) -> None:
        """Fills every request's buffer, completely.

        Each stored byte is read at most once for all of them. All requests that one execution has for this leaf at a
        time come in one call; boxes may overlap. A reader of byte ranges reads runs in file order, over gaps below 4
        KiB, straight into `out` where the run is contiguous there. Blocking work is done in a thread, never on the
        event loop. A cancelled or failed call leaves buffers undefined.

        Raises:
          CorruptCheckpointError, CheckpointIOError, CheckpointGoneError: naming `path` and `name`.
          ValueError: the checkpoint was closed.
        """

    def bytes_of(self, boxes: tuple[Box, ...]) -> int:
        """Returns the bytes of reading boxes together, for plans.

        They are as a read adds them to `ReadStats.bytes_read`. Here the bytes of their elements, decoded, an element of
        several boxes once. A leaf that reads more than the requested elements, or nothing, counts that instead.
        """
        return union_size(boxes) * self.dtype.itemsize

    async def verify_checksum(self, stats: ReadStats, ranges: Sequence[ChecksummedRange]) -> bool | None:
        """Compares checksums after the last read of this leaf.

        Under "full" the bytes that no range covers are read first.

        Returns:
          True: every byte was covered and the checksum holds. False: read only in part, so unverified. None: nothing
            was verified, because the leaf has no `checksums` or verification is off.

        Raises:
          CorruptCheckpointError: the checksum does not hold; the text gives the stored and the computed one.
        """
        checksums = None if stats.verify == "off" else self.checksums
        return None if checksums is None else await checksums.verify(stats, ranges)

    def raise_error(self) -> None:
        """Raises `error` if it is set.

        It is a new exception each time: a traceback belongs to a single raise.
        """
        if self.error is not None:
            raise error_at(self.error, path=self.error.path, leaf=self.error.leaf)


class HeldRead(NamedTuple):
    """Requests of a leaf, with the bytes of its extent."""

    leaf: BlockingLeaf
    requests: Sequence[Request]
    data: np.ndarray


class BlockingLeaf(Leaf):
    """Leaf with blocking reads, for callers with their own thread."""

    __slots__ = ()

    @property
    def extent(self) -> FileExtent | None:
        """The file's bytes that a read of the whole needs, or None.

        None: several files or unknown bytes. Small leaves whose extents are near are read together, from one window of
        the file.
        """
        return None

    @abc.abstractmethod
    def read_blocking(self, requests: Sequence[Request], stats: ReadStats) -> None:
        """Does `read_into` in the calling thread."""

    @classmethod
    def read_held(cls, reads: Sequence[HeldRead], stats: ReadStats) -> int:
        """Does `read_blocking` for leaves from bytes that are held.

        Returns the wanted bytes that it has not counted itself. The caller proves that the file has not changed.
        """
        for leaf, requests, _ in reads:
            leaf.read_blocking(requests, stats)
        return 0
