"""A leaf in a member of an archive: its checksum is the member's, whatever part of it the leaf is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.files.crc import CRC32
from orbax_t5x.files.local import LocalFiles
from orbax_t5x.lazy.box import box_shape, box_slices, full_box
from orbax_t5x.lazy.leaf import Request
from orbax_t5x.readers.zip_leaf import StridedRange, ZipLeaf, has_overlaps, last_element, row_major
from orbax_t5x.readers.zip_members import Archive
from orbax_t5x.testing.leaf_reads import random_box, random_buffer, read_boxes
from tests.support.zip_files import Entry, archive_of

VALUES = np.arange(24, dtype=np.int16)
INT16 = np.dtype(np.int16)


def leaf_of(directory, offset, shape, strides, head=b"", damaged=False):
    data = bytearray(archive_of([Entry(b"m", b"head" + VALUES.tobytes())]))
    if damaged:
        data[31 + 4 + 47] ^= 1  # the last byte of the member
    (directory / "file").write_bytes(data)
    archive = Archive(LocalFiles(directory).file("file"))
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


DATA = np.random.default_rng(5).integers(0, 1 << 16, 4096, np.uint16)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    directory = tmp_path_factory.mktemp("strided")
    (directory / "data").write_bytes(b"head" + DATA.tobytes())
    (directory / "swapped").write_bytes(b"head" + DATA.byteswap().tobytes())
    return LocalFiles(directory).file


@st.composite
def views(draw):
    """A view of the data by slices, transposition, repetition and diagonals, as torch's tensors are made."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    array = DATA[draw(st.integers(0, 200)) :][: int(np.prod(shape))].reshape(shape)
    for axis in range(array.ndim):
        start = draw(st.integers(0, array.shape[axis]))
        array = array[(slice(None),) * axis + (slice(start, None, draw(st.integers(1, 3))),)]
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    if array.ndim > 1 and draw(st.booleans()):
        array = array.diagonal(0, *draw(st.permutations(range(array.ndim)))[:2])
    if draw(st.booleans()):
        axis = draw(st.integers(0, array.ndim))
        array = np.expand_dims(array, axis)
        array = np.broadcast_to(array, [4 if i == axis else size for i, size in enumerate(array.shape)])
    return array


def range_of(file, view, swap=False):
    offset = view.__array_interface__["data"][0] - DATA.__array_interface__["data"][0]
    strides = tuple(stride // 2 for stride in view.strides)
    stored = file("swapped" if swap else "data")
    return StridedRange(stored, 4 + offset, view.shape, strides, view.dtype, swap=swap, kind=CRC32)


@pytest.mark.slow
@given(view=views(), seed=st.integers(0, 1 << 30), swap=st.booleans())
@settings(max_examples=settings.default.max_examples // 2)
def test_boxes_are_those_of_numpy(file, view, seed, swap):
    assert not has_overlaps(view.shape, [stride // 2 for stride in view.strides])
    rng = np.random.default_rng(seed)
    boxes = [random_box(rng, view.shape) for _ in range(3)] + [full_box(view.shape)]
    boxes = [boxes[at] for at in rng.integers(0, 4, rng.integers(1, 4))]
    requests = [Request(box, random_buffer(rng, box_shape(box), view.dtype)) for box in boxes]
    strided = range_of(file, view, swap)
    outcome = strided.read(requests, checksum=True, leaf="x")
    for box, out in requests:
        np.testing.assert_array_equal(out, view[box_slices(box)])
    positions = np.lib.stride_tricks.as_strided(np.arange(4096, dtype=np.uint16), view.shape, view.strides)
    touched = {position for box in boxes for position in positions[box_slices(box)].reshape(-1).tolist()}
    assert outcome.wanted == strided.bytes_of(tuple(boxes)) == 2 * len(touched), "each stored byte is read once"


def test_what_was_read_has_its_checksum(file):
    """A transposed array of the whole range covers it."""
    view = DATA[:1200].reshape(30, 40).T
    out = np.empty(view.shape, view.dtype)
    outcome = range_of(file, view).read([Request(full_box(view.shape), out)], checksum=True, leaf="x")
    (part,) = outcome.ranges
    assert (part.start, part.stop) == (4, 4 + view.nbytes)
    assert part.crc == CRC32.extend(0, DATA[:1200])
    assert outcome.gaps == 0


@pytest.mark.parametrize(
    ("shape", "strides", "overlaps"),
    [
        ((3, 3), (1, 1), True),
        ((3, 3), (2, 1), True),
        ((3, 3), (3, 1), False),
        ((3, 3), (1, 3), False),
        ((3, 3), (0, 1), False),
        ((1, 3), (1, 1), False),
        ((2, 3, 4), (11, 4, 1), True),
        ((), (), False),
    ],
)
def test_overlaps(shape, strides, overlaps):
    assert has_overlaps(shape, strides) is overlaps


def test_the_arithmetic_of_strides():
    assert row_major((2, 3, 4)) == (12, 4, 1)
    assert row_major(()) == ()
    assert last_element((2, 3, 4), (12, 4, 1)) == 23
    assert last_element((), ()) == 0


def test_a_buffer_that_does_not_fit(file):
    strided = range_of(file, DATA[:12].reshape(3, 4))
    for box, out in ((((0, 3), (0, 4)), np.empty((3, 3), np.uint16)), (((0, 1), (0, 4)), np.empty((1, 4), np.int16))):
        with pytest.raises(ValueError, match="x: a buffer of"):
            strided.read([Request(box, out)], checksum=False, leaf="x")
