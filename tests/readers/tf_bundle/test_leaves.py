"""Leaves of a bundle's entries: slices, sound and damaged."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from orbax_t5x.errors import CorruptCheckpointError, UnsupportedCheckpointError
from orbax_t5x.files.limits import Limits
from orbax_t5x.lazy.box import box_slices, full_box
from orbax_t5x.readers.tf_bundle.open import open_tf_bundle
from orbax_t5x.readers.tf_bundle.proto import Extent, slice_key
from orbax_t5x.testing.leaf_reads import leaf_of, read_boxes, read_whole, same_bits
from tests.support.bundle_damage import GOOD, VALUE, costs_one_leaf, place, with_entry
from tests.support.bundle_writer import Bundle, bundle_of, entry, np_dtype, partitions, shard_path

W = np.arange(40, dtype=np.float32).reshape(8, 5)


ROWS = [[Extent(0, 3), Extent(0, -1)], [Extent(3, 5), Extent(0, -1)]]


def sliced(directory: Path, edit: Callable[[Bundle, dict[str, int]], None]) -> Path:
    """`good`, and `bad` in two slices, edited; the place is that of a 3 x 5 array."""
    bundle = bundle_of({"good": GOOD})
    bundle.add_sliced("bad", W, ROWS)
    edit(bundle, bundle.store(W[:3]))
    return bundle.write(directory)


def say(*slices: list[Extent], shape: tuple[int, ...] = W.shape) -> Callable[[Bundle, dict[str, int]], None]:
    def edit(bundle: Bundle, where: dict[str, int]) -> None:
        bundle.entries[b"bad"] = entry("float32", shape, slices=slices)

    return edit


def lose(bundle: Bundle, where: dict[str, int]) -> None:
    del bundle.entries[slice_key(b"bad", tuple(ROWS[0]))]


def first_slice(dtype: str, shape: list[int], **options) -> Callable[[Bundle, dict[str, int]], None]:
    def edit(bundle: Bundle, where: dict[str, int]) -> None:
        bundle.entries[slice_key(b"bad", tuple(ROWS[0]))] = entry(dtype, shape, **{**where, **options})

    return edit


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lose, r"the slice \[0:3, 0:5\] has no entry"),
        (say(ROWS[1]), "its slices have 25 elements, and the shape"),
        (say(ROWS[0], [Extent(4, 4), Extent(0, -1)]), "its slices have 35 elements"),
        (say(ROWS[0], [Extent(2, 6), Extent(0, -1)]), "its slices have 45 elements"),
        (say(ROWS[0], *ROWS), "its slices have 55 elements"),
        (say([Extent(0, 4), Extent(0, -1)], [Extent(3, 4), Extent(0, -1)]), r"\[3:7, 0:5\] overlaps another one"),
        (say(ROWS[0], [Extent(3, 6), Extent(0, -1)]), "a slice of 6 from 3 in a dimension of 8"),
        (say(ROWS[0], [Extent(-3, 11), Extent(0, -1)]), "a slice of 11 from -3"),
        (say(ROWS[0], [Extent(3, -7), Extent(0, -1)]), "a slice of -7 from 3"),
        (say(ROWS[0], [Extent(3, 1 << 62), Extent(0, -1)]), "a slice of 4611686018427387904"),
        (say([Extent(0, -1)]), "a slice of 1 dimensions"),
        (say([Extent(0, -1)] * 40), "40 dimensions"),
        (say(*ROWS, shape=(1 << 30, 5)), "and the shape"),
        (first_slice("int32", [3, 5]), r"the slice \[0:3, 0:5\] has dtype 3, the variable 1"),
        (first_slice("float32", [5, 3]), r"the slice \[0:3, 0:5\] has the shape \(5, 3\)"),
        (first_slice("float32", [3, 5], offset=1 << 30), "of a shard of"),
        (first_slice("float32", [3, 5], size=10), "10 bytes, but"),
        (first_slice("float32", [3, 5], crc=7), "crc32c"),
        (first_slice("float32", [3, 5], slices=ROWS), "has dtype"),
    ],
)
def test_slices(tmp_path: Path, edit: Callable[[Bundle, dict[str, int]], None], text: str) -> None:
    costs_one_leaf(sliced(tmp_path, edit), CorruptCheckpointError, text)


def test_sound_slices_are_read(tmp_path: Path) -> None:
    with open_tf_bundle(sliced(tmp_path, lambda bundle, where: None)) as checkpoint:
        assert same_bits(read_whole(leaf_of(checkpoint, "bad")), W)


@pytest.mark.slow
def test_very_many_slices_are_checked_quickly_or_refused(tmp_path: Path) -> None:
    regular = [[Extent(n, 1)] for n in range(3000)]
    crosses = [[Extent(n, 1), Extent(3000 - n, 1)] for n in range(3000)]
    for slices, shape, text in ((regular, (3001,), "and the shape"), (crosses, (3001, 3001), "and the shape")):
        bundle = bundle_of({"good": GOOD})
        bundle.entries[b"bad"] = entry("float32", shape, slices=slices)
        for extents in slices:
            bundle.entries[slice_key(b"bad", tuple(extents))] = b""
        costs_one_leaf(bundle.write(tmp_path), CorruptCheckpointError, text)


ARRAYS = {
    "a": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "b/c": np.array(7, np.int64),
    "b/d": np.zeros((0, 5), np.float16),
    "c64": np.array([1 + 2j, -3j], np.complex64),
    "bits": np.array([True, False, True]),
    "bf": np.arange(5).astype(np_dtype("bfloat16")),
    "f8": np.arange(5).astype(np_dtype("float8_e4m3fn")),
    "i4": np.arange(-3, 4).astype(np_dtype("int4")),
}


@pytest.mark.parametrize(("rows", "columns"), [(3, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "string"])
def test_partitioned_variables(tmp_path: Path, rows: int, columns: int, dtype: str) -> None:
    value = np.arange(42).reshape(7, 6)
    array = value.astype(np_dtype(dtype)) if dtype != "string" else np.array([b"%d" % n for n in range(42)], object)
    array = array.reshape(7, 6)
    bundle = Bundle(2)
    bundle.add("plain", np.arange(3))
    bundle.add_sliced("w", array, partitions(rows, columns))
    checkpoint = open_tf_bundle(bundle.write(tmp_path))
    assert list(checkpoint.leaves) == ["plain", "w"]
    leaf = leaf_of(checkpoint, "w")
    assert (leaf.shape, leaf.dtype) == (array.shape, array.dtype)
    assert same_bits(read_whole(leaf), array)
    for box in [((2, 6), (1, 5)), ((0, 7), (3, 4)), ((6, 7), (0, 6)), ((3, 3), (0, 6))]:
        reading = read_boxes(leaf, [box, full_box(array.shape)])
        assert same_bits(reading.arrays[0], array[box_slices(box)].copy())
        assert same_bits(reading.arrays[1], array)
        assert reading.verified is True


def test_a_box_touches_only_its_slices(tmp_path: Path) -> None:
    array = np.arange(300, dtype=np.float32).reshape(30, 10)
    bundle = Bundle(3)
    bundle.add_sliced("w", array, [[Extent(k * 10, 10), Extent(0, -1)] for k in range(3)])
    prefix = bundle.write(tmp_path)
    leaf = leaf_of(open_tf_bundle(prefix), "w")
    reading = read_boxes(leaf, [((10, 20), (0, 10))])
    assert reading.stats.bytes_read == 400 and reading.verified is False
    assert read_boxes(leaf, [((10, 20), (0, 10))], "full").verified is True
    data = bytearray(shard_path(prefix, 2, 3).read_bytes())
    data[7] ^= 1
    shard_path(prefix, 2, 3).write_bytes(bytes(data))
    leaf = leaf_of(open_tf_bundle(prefix), "w")
    assert read_boxes(leaf, [((0, 20), (0, 10))]).verified is False
    with pytest.raises(CorruptCheckpointError, match="crc32c"):
        read_boxes(leaf, [((19, 30), (0, 10))], "full")
    with pytest.raises(CorruptCheckpointError, match="crc32c"):
        read_boxes(leaf)


def test_too_many_dimensions_cost_one_leaf(tmp_path: Path) -> None:
    checkpoint = open_tf_bundle(bundle_of(ARRAYS).write(tmp_path), limits=Limits(rank=2))
    with pytest.raises(CorruptCheckpointError, match=r"Limits\.rank"):
        read_boxes(leaf_of(checkpoint, "a"), [])
    assert same_bits(read_whole(leaf_of(checkpoint, "bf")), ARRAYS["bf"])


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (0, "no dtype"),
        (9999, "9999"),
        (20, "resource"),
        (21, "variant"),
        (11, "qint8"),
        (101, "reference"),
        (114, "reference"),
    ],
)
def test_dtypes(tmp_path: Path, dtype: int, text: str) -> None:
    prefix = with_entry(tmp_path, entry(dtype, [6], **place()))
    costs_one_leaf(prefix, UnsupportedCheckpointError, text)
    with open_tf_bundle(prefix) as checkpoint:
        assert leaf_of(checkpoint, "bad").shape == (6,)


def test_a_dtype_of_the_same_width_cannot_be_told_apart(tmp_path: Path) -> None:
    with open_tf_bundle(with_entry(tmp_path, entry("int32", [6], **place()))) as checkpoint:
        assert same_bits(read_whole(leaf_of(checkpoint, "bad")), VALUE.view(np.int32))
