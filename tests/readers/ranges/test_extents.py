"""Byte ranges of one file, joined: what is read is the concatenation of the ranges."""

import numpy as np
import pytest

from orbax_t5x.files.local import LocalFiles
from orbax_t5x.readers.ranges.extents import ByteExtent, JoinedExtents

DATA = bytes(range(100))
EXTENTS = [(10, 5), (40, 0), (3, 4), (90, 10), (10, 2)]
JOINED = b"".join(DATA[start : start + size] for start, size in EXTENTS)


@pytest.mark.parametrize("announced", [False, True])
def test_any_range_cut_into_any_buffers_is_that_of_the_joined_bytes(tmp_path, announced):
    (tmp_path / "data").write_bytes(DATA)
    joined = JoinedExtents(LocalFiles(tmp_path).file("data"), [ByteExtent(*extent) for extent in EXTENTS])
    assert joined.size == len(JOINED) == 21
    for offset in range(joined.size):
        for size in range(1, joined.size - offset + 1):
            buffers = [np.full(size // 2, 255, np.uint8), np.full(size - size // 2, 255, np.uint8)]
            source = joined.ahead([(offset, size)]) if announced else joined
            source.read_into(offset, buffers)
            assert np.concatenate(buffers).tobytes() == JOINED[offset : offset + size]
