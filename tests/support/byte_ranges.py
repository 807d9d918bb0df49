"""Byte ranges of files, boxes and buffers, for tests of ranged reads."""

from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from hypothesis import strategies as st

from orbax_t5x.files.local import LocalFiles
from orbax_t5x.lazy.box import Box, box_slices
from orbax_t5x.lazy.read_stats import ChecksummedRange
from orbax_t5x.readers.ranges import byte_range as _byte_range
from orbax_t5x.readers.ranges import windowed as _windowed
from orbax_t5x.readers.ranges.byte_range import ByteRange
from orbax_t5x.readers.ranges.leaf import ByteRangeLeaf

SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@st.composite
def boxes_in(draw, shape: tuple[int, ...]) -> Box:
    ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return tuple((low, high) for low, high in ends)


@st.composite
def shapes_and_boxes(draw) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(SHAPES)
    return shape, draw(st.lists(boxes_in(shape), min_size=1, max_size=5))


def bytes_of(shape: tuple[int, ...], itemsize: int, boxes: list[Box]) -> np.ndarray:
    """For each byte of the array, whether a box holds it."""
    held = np.zeros(shape, bool)
    for box in boxes:
        held[box_slices(box)] = True
    return np.repeat(held.reshape(-1), itemsize)


DATA = bytes(np.random.default_rng(0).integers(0, 256, 120, np.uint8))


def part(start: int, stop: int) -> ChecksummedRange:
    return ChecksummedRange(start, stop, google_crc32c.value(DATA[start:stop]))


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_byte_range, "_JOB_BYTES", 150)
    for module in (_byte_range, _windowed):
        monkeypatch.setattr(module, "WINDOW_BYTES", 64)
        monkeypatch.setattr(module, "MAX_GAP_BYTES", 16)


OFFSET = 5


def stored(
    directory: Path, array: np.ndarray, *, swap: bool = False, verify: bool = True, damage: bool = False
) -> ByteRangeLeaf:
    """A leaf over a file that holds an array between other bytes; damaged, one bit in its middle is another."""
    data = array.tobytes()
    if swap:
        width = array.dtype.itemsize // (2 if array.dtype.kind == "c" else 1)
        data = np.frombuffer(data, f"u{width}").byteswap().tobytes()
    crc = google_crc32c.value(data) if verify else None
    if damage:
        middle = len(data) // 2
        data = data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]
    (directory / "file").write_bytes(b"x" * OFFSET + data + b"y" * 9)
    file = LocalFiles(directory).file("file")
    return ByteRangeLeaf("leaf", ByteRange(file, OFFSET, array.shape, array.dtype, swap), crc)
