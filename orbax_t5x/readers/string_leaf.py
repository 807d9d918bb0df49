"""Strings that Orbax keeps outside its arrays.

They are small, and read when the checkpoint is opened.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orbax_t5x.errors import CheckpointError, CorruptCheckpointError
from orbax_t5x.files.crc import CRC32C
from orbax_t5x.files.interface import Files, StoredFile
from orbax_t5x.lazy.box import Box
from orbax_t5x.lazy.leaf import Checksums, Leaf, Request, UnusableChecksums
from orbax_t5x.lazy.read_stats import ChecksummedRange, ReadStats
from orbax_t5x.readers.box_sums import BoxSums


class StringLeaf(Leaf):
    """String outside the arrays: rank 0, dtype object, element `bytes`."""

    __slots__ = ("_place", "_sums", "_value", "chunks", "dtype", "name", "path", "shape")

    def __init__(
        self,
        name: str,
        path: str,
        value: bytes,
        place: Files | StoredFile,
        sums: BoxSums | CheckpointError | None = None,
    ):
        self.name: str = name
        self.path: str = path
        self.shape: tuple[int, ...] = ()
        self.dtype: np.dtype = np.dtype(object)
        self.chunks: tuple[int, ...] | None = None
        self._sums = sums
        self._value = value
        self._place = place

    @property
    def checksums(self) -> Checksums | None:
        if isinstance(self._sums, CheckpointError):
            return UnusableChecksums(self.name, self._sums)
        return None if self._sums is None else _StringChecksum(self._value, self._sums, self.path, self.name)

    def bytes_of(self, boxes: tuple[Box, ...]) -> int:
        return 0

    async def read_into(self, requests: Sequence[Request], stats: ReadStats) -> None:
        self._place.require_open()
        for _, out in requests:
            out[...] = self._value


class _StringChecksum(Checksums):
    """Checksum of a whole string, compared for any part."""

    def __init__(self, value: bytes, sums: BoxSums, path: str, leaf: str):
        self._value, self._sums, self._path, self._leaf = value, sums, path, leaf

    async def verify(self, stats: ReadStats, ranges: Sequence[ChecksummedRange]) -> bool:
        found, stored = CRC32C.extend(0, self._value), self._sums.crcs[0]
        if found != stored or self._sums.shape:
            message = f"the string has the crc32c {found:#010x}, stored is {stored:#010x}; it is damaged"
            raise CorruptCheckpointError(message, path=self._path, leaf=self._leaf)
        return True
