"""A leaf in a member of an archive: its checksum is the member's, whatever part of it the leaf is."""

import numpy as np
import pytest

from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.local import LocalFiles
from orbax_t5x.readers.zip_leaf import ZipLeaf
from orbax_t5x.readers.zip_members import Archive
from orbax_t5x.testing.leaf_reads import read_boxes
from tests.support.zip_files import Entry, archive_of

VALUES = np.arange(24, dtype=np.int16)
INT16 = np.dtype(np.int16)


def leaf_of(directory, offset, shape, strides, head=b"", damaged=False):
    data = bytearray(archive_of([Entry(b"m", b"head" + VALUES.tobytes())]))
    if damaged:
        data[31 + 4 + 47] ^= 1  # the last byte of the member
    (directory / "file").write_bytes(data)
    archive = Archive(LocalFiles(directory).file("file"), Limits())
    return ZipLeaf("x", archive, "m", offset, shape, strides, INT16, head=head)


def test_a_leaf_that_is_the_whole_member(tmp_path):
    """With the bytes before it that opening read, also transposed, also by two reads."""
    for shape, strides in (((24,), (1,)), ((4, 6), (6, 1)), ((6, 4), (1, 6))):
        leaf = leaf_of(tmp_path, 4, shape, strides, b"head")
        assert read_boxes(leaf).verified is True
        rows = [((low, high), *((0, size) for size in shape[1:])) for low, high in ((0, 2), (2, shape[0]))]
        assert read_boxes(leaf, rows).verified is True
        assert read_boxes(leaf, rows[:1]).verified is False
        assert read_boxes(leaf, rows[:1], "full").verified is True
        assert read_boxes(leaf, rows[:1], "off").verified is None


def test_a_leaf_that_is_a_part_of_the_member(tmp_path):
    for offset, shape, strides in ((8, (4, 2), (6, 1)), (4, (3,), (0,)), (4, (2, 3), (12, 5)), (4, (0, 5), (5, 1))):
        leaf = leaf_of(tmp_path, offset, shape, strides, b"head")
        expected = np.lib.stride_tricks.as_strided(VALUES[offset // 2 - 2 :], shape, [2 * stride for stride in strides])
        reading = read_boxes(leaf)
        np.testing.assert_array_equal(reading.arrays[0], expected)
        assert not reading.verified
        assert read_boxes(leaf, None, "full").verified is True


def test_damage_anywhere_in_the_member(tmp_path):
    leaf = leaf_of(tmp_path, 4, (24,), (1,), b"head", damaged=True)
    with pytest.raises(CorruptCheckpointError, match="crc32 0x") as caught:
        read_boxes(leaf)
    assert caught.value.leaf == "x"
    leaf = leaf_of(tmp_path, 4, (2,), (1,), b"head", damaged=True)
    assert read_boxes(leaf).verified is False
    with pytest.raises(CorruptCheckpointError, match="crc32 0x"):
        read_boxes(leaf, None, "full")
