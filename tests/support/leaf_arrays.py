"""Arrays that the suites of leaves read."""

import numpy as np

from orbax_t5x.files.local import LocalFiles
from orbax_t5x.readers.ranges.byte_range import ByteRange
from orbax_t5x.readers.ranges.leaf import ByteRangeLeaf

ARRAY = np.arange(60, dtype=np.int16).reshape(3, 4, 5)
# A staging window holds a fraction of it, and its columns are runs of many rows.
LARGE = np.random.default_rng(3).random((700, 800), np.float32)


def byte_range(directory, array, crc=None):
    (directory / "file").write_bytes(b"head" + array.tobytes())
    file = LocalFiles(directory).file("file")
    return ByteRangeLeaf("range", ByteRange(file, 4, array.shape, array.dtype), crc)
