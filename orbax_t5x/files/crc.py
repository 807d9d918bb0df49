"""Checksums of a whole from the checksums of its parts.

For the two polynomials that checkpoints use. A checkpoint keeps one checksum per tensor, but a sharded read sees pieces
of it. A crc is linear: appending n bytes maps the checksum by a fixed 32 x 32 bit matrix, so the checksum of a whole is
the xor of its parts' checksums, each moved by as many bytes as follow it. The matrices for powers of two bytes are kept
as byte-indexed tables: moving one checksum costs a few look-ups, moving a hundred thousand a few NumPy operations.
Nothing here reads files.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import fastcrc
import numpy as np

# Distances up to 2**48 bytes; a file that large does not exist, and the tables stay at 200 KB.
_DISTANCE_BITS = 48
# Below this many parts, plain integers beat NumPy's cost per call.
_FEW_PARTS = 24


def _apply(table: np.ndarray, crcs: np.ndarray) -> np.ndarray:
    """Multiplies a matrix, as four tables of 256, by each crc."""
    return (
        table[0][crcs & 0xFF]
        ^ table[1][(crcs >> np.uint32(8)) & 0xFF]
        ^ table[2][(crcs >> np.uint32(16)) & 0xFF]
        ^ table[3][crcs >> np.uint32(24)]
    )


class Crc:
    """A checksum of 32 bits over bytes, and its arithmetic.

    Attributes:
      name: for messages.
      extend: called with a crc and contiguous bytes or numbers that follow what it covers, returns the crc of both.
    """

    def __init__(self, name: str, polynomial: int, extend: Callable[[int, Any], int]):
        self.name: str = name
        self._polynomial = polynomial
        self.extend: Callable[[int, Any], int] = extend

    def move(self, crc: int, distance: int) -> int:
        """Moves a part's checksum over the `distance` bytes after it."""
        tables = self._table_lists
        k = 0
        while distance:
            if distance & 1:
                a, b, c, d = tables[k]
                crc = a[crc & 0xFF] ^ b[(crc >> 8) & 0xFF] ^ c[(crc >> 16) & 0xFF] ^ d[crc >> 24]
            distance >>= 1
            k += 1
        return crc

    def combine(self, crcs: Sequence[int] | np.ndarray, lengths: Sequence[int] | np.ndarray) -> int:
        """Returns the checksum of a concatenation of ranges."""
        if len(crcs) != len(lengths):
            raise ValueError(f"{len(crcs)} checksums for {len(lengths)} lengths")
        if len(crcs) <= _FEW_PARTS:
            whole = 0
            for crc, length in zip(crcs, lengths, strict=True):
                whole = self.move(whole, int(length)) ^ int(crc)
            return whole
        sizes = np.asarray(lengths, np.int64)
        after = sizes[::-1].cumsum()[::-1] - sizes
        return int(np.bitwise_xor.reduce(self._move_many(np.asarray(crcs, np.uint32), after)))

    @functools.cached_property
    def _tables(self) -> np.ndarray:
        """The moved checksums of single bytes as tables.

        [k, j, b] is that of byte b at position j and zeros elsewhere, moved by 2**k bytes.
        """
        one_byte = np.arange(256, dtype=np.uint32)
        for _ in range(8):
            shifted = one_byte >> np.uint32(1)
            one_byte = np.where(one_byte & 1, shifted ^ np.uint32(self._polynomial), shifted)
        places = np.arange(256, dtype=np.uint32)[None, :] << np.array([[0], [8], [16], [24]], np.uint32)
        tables = np.empty((_DISTANCE_BITS, 4, 256), np.uint32)
        tables[0] = one_byte[places & 0xFF] ^ (places >> np.uint32(8))
        for k in range(1, _DISTANCE_BITS):
            tables[k] = _apply(tables[k - 1], tables[k - 1])
        return tables

    @functools.cached_property
    def _table_lists(self) -> list[list[list[int]]]:
        return self._tables.tolist()

    def _move_many(self, crcs: np.ndarray, distances: np.ndarray) -> np.ndarray:
        moved = crcs.astype(np.uint32)
        for k in range(int(distances.max()).bit_length()):
            odd = np.flatnonzero((distances >> k) & 1)
            moved[odd] = _apply(self._tables[k], moved[odd])
        return moved


CRC32C = Crc("crc32c", 0x82F63B78, lambda crc, data: fastcrc.crc32.iscsi(data, crc))
"""Castagnoli's checksum, of TensorFlow bundles and of `_CHECKSUMS.json`."""
CRC32 = Crc("crc32", 0xEDB88320, lambda crc, data: zlib.crc32(data, crc))
"""Checksum of zip archives."""
