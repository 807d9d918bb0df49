"""Bytes in file order through a window: what is read, what is skipped, and where a file ends."""

from contextlib import closing

import pytest

from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.files.local import LocalFiles
from orbax_t5x.readers.ranges.window_reader import WindowReader


def test_taking_and_skipping(tmp_path):
    data = bytes(number % 251 for number in range(1 << 20))
    (tmp_path / "file").write_bytes(data)
    with closing(LocalFiles(tmp_path)) as files:
        reader = WindowReader(files.file("file"))
        for size, skipped in ((3, 0), (5000, 10), (0, 1 << 19), (8, 100_000), (1, 0)):
            at = reader.position
            assert reader.take(size) == data[at : at + size]
            reader.skip(skipped)
            assert (reader.position, reader.left) == (at + size + skipped, len(data) - at - size - skipped)
        assert reader.bytes_read < 40_000
        with pytest.raises(CorruptCheckpointError, match=f"at byte {reader.position}: .* are left"):
            reader.take(reader.left + 1)
