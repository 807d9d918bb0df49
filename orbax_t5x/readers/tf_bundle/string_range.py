"""The string tensors of a TensorFlow bundle.

Varint lengths, a checksum over them, then the strings end to end. The offset of a string follows only from all lengths,
so an entry is read whole for any box. Nothing is sized by the number of elements that an entry claims before that
number of lengths has been found in its bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.files.crc import CRC32C
from orbax_t5x.files.interface import StoredFile
from orbax_t5x.lazy.box import Box, box_shape, box_slices
from orbax_t5x.lazy.leaf import Request
from orbax_t5x.lazy.read_stats import ChecksummedRange
from orbax_t5x.readers.ranges.byte_range import ReadOutcome, StoredRange
from orbax_t5x.readers.tf_bundle.sstable import unmask

_CRC_BYTES = 4
# Nine groups of seven bits: more than any file holds.
_MAX_LENGTH_BYTES = 9


class _Strings(NamedTuple):
    """Decoded entry.

    String i is data[ends[i] - lengths[i] : ends[i]].
    """

    data: bytearray
    ends: np.ndarray
    lengths: np.ndarray
    crc: int


@dataclasses.dataclass(frozen=True, slots=True)
class StringRange(StoredRange):
    """A string tensor in `size` bytes; its elements are `bytes`."""

    file: StoredFile
    size: int

    @property
    def nbytes(self) -> int:
        return self.size

    def bytes_of(self, boxes: tuple[Box, ...]) -> int:
        return self.nbytes if boxes else 0

    def read(self, requests: Sequence[Request], *, checksum: bool, leaf: str) -> ReadOutcome:
        if not requests:
            return ReadOutcome([], 0, 0)
        strings = self._load(leaf)
        numbers = np.arange(len(strings.ends)).reshape(self.shape)
        for box, out in requests:
            values = np.empty(box_shape(box), object)
            flat = values.reshape(-1)
            for place, number in enumerate(numbers[box_slices(box)].reshape(-1).tolist()):
                end = int(strings.ends[number])
                flat[place] = bytes(strings.data[end - int(strings.lengths[number]) : end])
            out[...] = values
        return self._outcome(strings, checksum)

    def sum(self, ranges: Iterable[tuple[int, int]], *, leaf: str) -> ReadOutcome:
        return self._outcome(self._load(leaf), True) if list(ranges) else ReadOutcome([], 0, 0)

    def _outcome(self, strings: _Strings, checksum: bool) -> ReadOutcome:
        return ReadOutcome([ChecksummedRange(0, self.nbytes, strings.crc)] if checksum else [], self.nbytes, 0)

    def _load(self, leaf: str) -> _Strings:
        def corrupt(message: str) -> CorruptCheckpointError:
            return CorruptCheckpointError(message, path=self.file.path, leaf=leaf)

        count = math.prod(self.shape)
        data = self.file.read(self.offset, self.nbytes, leaf=leaf)
        lengths, at = _lengths(np.frombuffer(data, np.uint8), count)
        if lengths is None:
            raise corrupt(f"the {len(data)} bytes do not hold the lengths of {count} strings")
        end = at + _CRC_BYTES + sum(lengths.tolist())
        if end != len(data):
            raise corrupt(f"its strings end at byte {end} by their lengths, the entry has {len(data)} bytes")
        crc = CRC32C.extend(0, _as_summed(lengths))
        stored = bytes(data[at : at + _CRC_BYTES])
        if unmask(int.from_bytes(stored, "little")) != crc:
            raise corrupt(
                f"the lengths of its strings have the crc32c {crc:#010x}, another is stored: the data are damaged"
            )
        text = at + _CRC_BYTES
        crc = CRC32C.extend(CRC32C.extend(crc, stored), np.frombuffer(data, np.uint8)[text:])
        return _Strings(data, text + lengths.cumsum(), lengths, crc)


def _lengths(data: np.ndarray, count: int) -> tuple[np.ndarray | None, int]:
    """Reads `count` varints and the next position, or None."""
    if not count:
        return np.zeros(0, np.int64), 0
    if count > data.size:
        return None, 0
    head = data[: min(data.size, count * _MAX_LENGTH_BYTES)]
    last = np.flatnonzero(head < 0x80)[:count]
    if last.size < count:
        return None, 0
    first = np.concatenate([[0], last[:-1] + 1])
    width = last - first + 1
    if int(width.max()) > _MAX_LENGTH_BYTES:
        return None, 0
    lengths = np.zeros(count, np.int64)
    for group in range(int(width.max())):
        longer = np.flatnonzero(width > group)
        lengths[longer] |= (head[first[longer] + group] & 0x7F).astype(np.int64) << (7 * group)
    return lengths, int(last[-1]) + 1


def _as_summed(lengths: np.ndarray) -> bytes:
    """Encodes the lengths as TensorFlow sums them."""
    if not lengths.size or int(lengths.max()) < 1 << 32:
        return lengths.astype("<u4").tobytes()
    return b"".join(length.to_bytes(4 if length < 1 << 32 else 8, "little") for length in lengths.tolist())
