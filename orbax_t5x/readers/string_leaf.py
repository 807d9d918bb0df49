"""Strings that Orbax keeps outside its arrays: small, and read when the checkpoint is opened."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orbax_t5x.errors import CheckpointError, CorruptCheckpointError, error_at
from orbax_t5x.lazy.box import Box
from orbax_t5x.lazy.leaf import Leaf, Request
from orbax_t5x.lazy.read_stats import ChecksummedRange, ReadStats
from orbax_t5x.readers.box_sums import BoxSums
from orbax_t5x.readers.open_flag import OpenFlag
from orbax_t5x.storage import crc32c


class StringLeaf(Leaf):
    """A string that the format keeps outside its arrays; a rank-0 array of dtype object whose element is `bytes`."""

    __slots__ = ("_open", "_value", "chunks", "dtype", "name", "path", "shape", "sums")

    def __init__(
        self,
        name: str,
        path: str,
        value: bytes,
        flag: OpenFlag,
        sums: BoxSums | CheckpointError | None = None,
    ):
        self.name: str = name
        self.path: str = path
        self.shape: tuple[int, ...] = ()
        self.dtype: np.dtype = np.dtype(object)
        self.chunks: tuple[int, ...] | None = None
        self.sums = sums
        self._value = value
        self._open = flag

    @property
    def has_checksum(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the checkpoint keeps a checksum of the string."""
        return self.sums is not None

    @property
    def checksum_error(self) -> CheckpointError | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Why the checksums cannot be used, or None."""
        return self.sums if isinstance(self.sums, CheckpointError) else None

    async def verify_checksum(self, stats: ReadStats, parts: Sequence[ChecksummedRange]) -> bool | None:
        """Compares the whole string, whatever was read."""
        if self.sums is None or stats.verify == "off":
            return None
        if not isinstance(self.sums, BoxSums):
            raise error_at(self.sums, path=self.sums.path, leaf=self.name)
        found, stored = crc32c.extend(0, self._value), self.sums.crcs[0]
        if found != stored or self.sums.shape:
            message = f"the string has the crc32c {found:#010x}, stored is {stored:#010x}; it is damaged"
            raise CorruptCheckpointError(message, path=self.path, leaf=self.name)
        return True

    def bytes_of(self, boxes: tuple[Box, ...]) -> int:
        """None: the string was read when the checkpoint was opened."""
        return 0

    async def read_into(self, requests: Sequence[Request], stats: ReadStats) -> None:
        """Puts the string into each buffer; it was read when the checkpoint was opened."""
        self._open.check(self.path, self.name)
        for _, out in requests:
            out[...] = self._value
