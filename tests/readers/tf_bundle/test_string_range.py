"""String tensors of a bundle, sound and damaged."""

import os
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.errors import CorruptCheckpointError, LimitExceededError, UnsupportedCheckpointError
from orbax_t5x.lazy.box import box_slices
from orbax_t5x.readers.ranges.leaf import ByteRangeLeaf
from orbax_t5x.readers.tf_bundle.open import open_tf_bundle
from orbax_t5x.readers.tf_bundle.string_range import StringRange
from orbax_t5x.testing.leaf_reads import leaf_of, read_boxes, read_whole, same_bits
from orbax_t5x.testing.leaf_suite import LeafSuite
from tests.support.bundle_damage import GOOD, costs_one_leaf
from tests.support.bundle_writer import Bundle, bundle_of, entry, shard_path, string_bytes, varint


def with_strings(directory: Path, data: bytes, shape: list[int], **change) -> Path:
    bundle = bundle_of({"good": GOOD})
    stored = {"offset": GOOD.nbytes, "size": len(data), "crc": google_crc32c.value(data), **change}
    bundle.shards[0] += data
    bundle.entries[b"bad"] = entry("string", shape, **stored)
    return bundle.write(directory)


TEXT, TEXT_CRC = string_bytes([b"abc", b"d"])


@pytest.mark.parametrize(
    ("data", "shape", "text"),
    [
        (TEXT, [1 << 40], "8 bytes for|10 bytes for|bytes for 1099511627776 strings"),
        (TEXT, [1 << 20, 1 << 20], "bytes for 1099511627776 strings"),
        (TEXT, [0], "end at byte 4"),
        (b"", [0], "0 bytes for 0 strings"),
        (b"", [2], "0 bytes for 2 strings"),
        (TEXT[:-1], [2], "end at byte"),
        (TEXT + b"x", [2], "end at byte"),
        (varint(1 << 40) + TEXT[1:], [2], "end at byte"),
        (b"\xff" * 12, [2], "do not hold the lengths"),
        (b"\xff" * 8 + b"\x7f" + TEXT[1:], [2], "end at byte"),
        (b"\x80" * 9 + b"\x01" + TEXT, [1], "do not hold the lengths"),
        (TEXT[:2] + b"\0\0\0\0" + TEXT[6:], [2], "the lengths of its strings"),
        (b"\x01\x03" + TEXT[2:], [2], "the lengths of its strings"),
    ],
)
def test_damaged_strings(tmp_path: Path, data: bytes, shape: list[int], text: str) -> None:
    costs_one_leaf(with_strings(tmp_path, data, shape), CorruptCheckpointError, text)


def test_strings_of_many_gigabytes_are_not_read_whole(tmp_path: Path) -> None:
    prefix = with_strings(tmp_path, b"", [1], size=1 << 40)
    os.truncate(shard_path(prefix), 2 << 40)
    costs_one_leaf(prefix, LimitExceededError, "Limits.index_bytes")


def test_a_flipped_string_fails_its_checksum(tmp_path: Path) -> None:
    prefix = with_strings(tmp_path, TEXT[:-1] + b"e", [2], crc=TEXT_CRC)
    costs_one_leaf(prefix, CorruptCheckpointError, "crc32c")


def test_strings_of_the_other_byte_order_are_unsupported(tmp_path: Path) -> None:
    arrays = {"text": np.array([b"a", b"bc"], object), "x": np.arange(3)}
    checkpoint = open_tf_bundle(bundle_of(arrays, big_endian=True).write(tmp_path))
    with pytest.raises(UnsupportedCheckpointError, match="byte order") as caught:
        read_whole(leaf_of(checkpoint, "text"))
    assert caught.value.leaf == "text"
    assert read_whole(leaf_of(checkpoint, "x")).tolist() == [0, 1, 2]


@pytest.mark.slow
@given(st.lists(st.binary(max_size=300), max_size=30), st.booleans())
@settings(max_examples=settings.default.max_examples // 2)
def test_strings(tmp_path_factory, values: list[bytes], matrix: bool) -> None:
    array = np.empty(len(values), object)
    array[:] = values
    if matrix:
        array = array.reshape(-1, 1)
    checkpoint = open_tf_bundle(bundle_of({"text": array}).write(tmp_path_factory.mktemp("bundle")))
    leaf = leaf_of(checkpoint, "text")
    assert same_bits(read_whole(leaf), array)
    some = tuple((size // 3, size) for size in array.shape)
    assert same_bits(read_boxes(leaf, [some]).arrays[0], array[box_slices(some)].copy())


def test_a_string_read_in_part_is_verified_whole(tmp_path: Path) -> None:
    array = np.array([b"a" * 200, b"", b"c"], object)
    leaf = leaf_of(open_tf_bundle(bundle_of({"text": array}).write(tmp_path)), "text")
    assert read_boxes(leaf, [((2, 3),)]).verified is True
    assert read_boxes(leaf, [((0, 0),)]).verified is True
    assert read_boxes(leaf, verify="off").verified is None


class TestStrings(LeafSuite):
    """A string tensor of a TensorFlow bundle."""

    @pytest.fixture
    def expected(self):
        return np.array([[b"a", b"", b"long " * 100], [b"\0", b"\xff", b"z"]], object)

    @pytest.fixture
    def leaf(self, tmp_path, expected):
        bundle = Bundle()
        bundle.add("x", expected)
        with ot.open_checkpoint(bundle.write(tmp_path)) as checkpoint:
            leaf = leaf_of(checkpoint, "x")
            assert type(leaf) is ByteRangeLeaf and type(leaf.range) is StringRange
            yield leaf
