"""Bundles that lie, with checksums that hold: one typed error naming file and leaf, and the other leaves still read.

Numbers in comments are those of the list of hostile inputs in the robustness document, section 1.1; its items 1 to 8
are in `test_sstable.py`.
"""

import math
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbax_t5x.errors import (
    CheckpointError,
    CorruptCheckpointError,
    LimitExceededError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)
from orbax_t5x.lazy.box import full_box
from orbax_t5x.readers.tf_bundle.open import open_tf_bundle
from orbax_t5x.readers.tf_bundle.proto import BadMessage, Extent, parse_entry, slice_key
from orbax_t5x.testing.leaf_reads import leaf_of, read_boxes, read_whole, same_bits
from tests.support.bundle_mutations import sealed_mutation, values_of
from tests.support.bundle_writer import (
    Bundle,
    bundle_of,
    entry,
    header,
    integer,
    message,
    shape_proto,
    shard_path,
    string_bytes,
    table,
    varint,
)

GOOD = np.arange(40, dtype=np.float32).reshape(8, 5)
VALUE = np.arange(6, dtype=np.float32)


def with_entry(directory: Path, value: bytes, *, shards: int = 1) -> Path:
    """A bundle of a sound leaf `good` and of `bad`, whose entry is `value`."""
    bundle = bundle_of({"good": GOOD}, shards)
    bundle.store(VALUE)
    bundle.entries[b"bad"] = value
    return bundle.write(directory)


def place(**change) -> dict[str, int]:
    """Where VALUE really is, but for the change."""
    return {"offset": GOOD.nbytes, "size": VALUE.nbytes, "crc": google_crc32c.value(VALUE.tobytes()), **change}


def costs_one_leaf(prefix: Path, kind: type[CheckpointError], text: str) -> CheckpointError:
    """The bundle opens, `good` reads, `bad` is listed and raises."""
    with open_tf_bundle(prefix) as checkpoint:
        assert list(checkpoint.leaves) == ["bad", "good"]
        assert same_bits(read_whole(leaf_of(checkpoint, "good")), GOOD)
        bad = leaf_of(checkpoint, "bad")
        with pytest.raises(kind, match=text) as caught:
            read_boxes(
                bad, [full_box(bad.shape)] if math.prod(bad.shape) < 1000 else [tuple((0, 0) for _ in bad.shape)]
            )
        assert caught.value.leaf == "bad" and caught.value.path
        assert str(caught.value).startswith(caught.value.path)
    return caught.value


def refused(prefix: Path, kind: type[CheckpointError], text: str) -> None:
    with pytest.raises(kind, match=text) as caught:
        open_tf_bundle(prefix)
    assert caught.value.path == f"{prefix}.index"


# -- 9: the header


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        (None, CorruptCheckpointError, "header is missing"),
        (header(0), CorruptCheckpointError, "0 shards"),
        (header(-1), CorruptCheckpointError, "-1 shards"),
        (header((1 << 31) - 1), CorruptCheckpointError, "2147483647 shards"),
        (header(1 << 40), CorruptCheckpointError, "more than 32 bits"),
        (header(1, 2), UnsupportedCheckpointError, "byte order 2"),
        (header(1, 99), UnsupportedCheckpointError, "byte order 99"),
        (header(min_consumer=2), UnsupportedCheckpointError, "readers of version 2"),
        (b"\xff", CorruptCheckpointError, "header cannot be read"),
        (header() + integer(1, 1), CorruptCheckpointError, "occurs twice"),
        (message(1, b"1"), CorruptCheckpointError, "wire type 2, not 0"),
        (b"", CorruptCheckpointError, "0 shards"),
    ],
)
def test_headers(tmp_path: Path, data: bytes | None, kind: type[CheckpointError], text: str) -> None:
    entries = [(b"x", entry("float32", [6], **place()))]
    prefix = bundle_of({"x": VALUE}).write(
        tmp_path, index=table([*([(b"", data)] if data is not None else []), *entries])
    )
    refused(prefix, kind, text)


def test_an_empty_table(tmp_path: Path) -> None:
    refused(bundle_of({}).write(tmp_path, index=table([])), CorruptCheckpointError, "header is missing")


def test_a_newer_producer_is_read(tmp_path: Path) -> None:
    bundle = bundle_of({"x": VALUE})
    bundle.header = header(producer=5, min_consumer=1) + message(9, b"new")
    with open_tf_bundle(bundle.write(tmp_path)) as checkpoint:
        assert checkpoint.metadata["version"] == 5
        assert same_bits(read_whole(leaf_of(checkpoint, "x")), VALUE)


# -- 11: entry protos


def nested(depth: int) -> bytes:
    """Messages in messages, without copying each into the next."""
    starts, size = [], 0
    for _ in range(depth):
        starts.append(varint(2 << 3 | 2) + varint(size))
        size += len(starts[-1])
    return b"".join(reversed(starts))


SOUND = entry("float32", [6], **place())


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (b"", UnsupportedCheckpointError, "no dtype"),
        (b"garbage that is no message", CorruptCheckpointError, "cannot be read"),
        (SOUND[:-1], CorruptCheckpointError, "cannot be read"),
        (SOUND[:5], CorruptCheckpointError, "cannot be read"),
        (SOUND + integer(1, 1), CorruptCheckpointError, "field 1 of BundleEntryProto occurs twice"),
        (SOUND + message(2, b""), CorruptCheckpointError, "field 2 of BundleEntryProto occurs twice"),
        (message(1, b"\x01") + SOUND[2:], CorruptCheckpointError, "wire type 2, not 0"),
        (integer(6, 12) + SOUND, CorruptCheckpointError, "wire type 0, not 5"),
        (SOUND + b"\x4b\x4c", CorruptCheckpointError, "wire type 3"),
        (SOUND + varint(0) + varint(1), CorruptCheckpointError, "field number 0"),
        (SOUND + message(9, b"abc")[:-1], CorruptCheckpointError, "are left"),
        (integer(1, 1 << 40) + SOUND[2:], CorruptCheckpointError, "more than 32 bits"),
        (integer(1, 1) + b"\x10" + b"\xff" * 11, CorruptCheckpointError, "cannot be read"),
        (nested(10_000), UnsupportedCheckpointError, "no dtype"),
        (SOUND + message(7, message(1, nested(10_000))), CorruptCheckpointError, "wire type 2, not 0"),
        (message(2, b"\x12\xff\x01"), CorruptCheckpointError, "cannot be read"),
    ],
)
def test_entries_that_are_no_entries(tmp_path: Path, value: bytes, kind: type[CheckpointError], text: str) -> None:
    costs_one_leaf(with_entry(tmp_path, value), kind, text)


def test_unknown_fields_are_skipped(tmp_path: Path) -> None:
    prefix = with_entry(tmp_path, SOUND + integer(99, 5) + message(100, b"later") + b"\xc9\x3e12345678")
    with open_tf_bundle(prefix) as checkpoint:
        assert same_bits(read_whole(leaf_of(checkpoint, "bad")), VALUE)


@given(
    st.binary(max_size=60) | st.just(SOUND).flatmap(lambda data: st.integers(0, len(data)).map(lambda cut: data[:cut]))
)
def test_any_bytes_are_an_entry_or_a_bad_message(data: bytes) -> None:
    try:
        parse_entry(data, 32, 100)
    except BadMessage:
        pass


def test_messages_in_messages_are_not_followed() -> None:
    assert parse_entry(nested(100_000), 32, 100).dtype == 0


# -- 12: shapes


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (message(2, integer(1, -1)), "negative dimension"),
        (shape_proto([1 << 33, 1 << 33]), "more bytes than can be counted"),
        (shape_proto([0, 1 << 62, 1 << 62]), "more bytes than can be counted"),
        (shape_proto([1] * 300), "300 dimensions"),
        (integer(3, 1), "rank is unknown"),
        (shape_proto([1 << 62]), "more bytes than can be counted"),
        (shape_proto([1 << 60]), "takes"),
        (message(2, message(1, b"6")), "wire type 2, not 0"),
    ],
)
def test_shapes(tmp_path: Path, shape: bytes, text: str) -> None:
    rest = SOUND[2 + len(message(2, shape_proto([6]))) :]
    costs_one_leaf(with_entry(tmp_path, integer(1, 1) + message(2, shape) + rest), CorruptCheckpointError, text)


# -- 13: sizes and offsets


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"size": 0}, "0 bytes, but float32 of shape .6,. takes 24"),
        ({"size": 23}, "23 bytes, but .* takes 24"),
        ({"size": -24}, "-24 bytes"),
        ({"size": 1 << 62}, "takes 24"),
        ({"offset": -1}, "at byte -1"),
        ({"offset": -(1 << 63)}, "at byte -9223372036854775808"),
        ({"offset": GOOD.nbytes + 1}, "bytes 161 to 185 of a shard of 184"),
        ({"offset": 1 << 40}, "of a shard of 184"),
        ({"offset": (1 << 63) - 1}, "of a shard of 184"),
        ({"shard": -1}, "shard -1 of 1"),
        ({"shard": 1}, "shard 1 of 1"),
        ({"shard": (1 << 31) - 1}, "shard 2147483647 of 1"),
    ],
)
def test_places(tmp_path: Path, change: dict[str, int], text: str) -> None:
    costs_one_leaf(with_entry(tmp_path, entry("float32", [6], **place(**change))), CorruptCheckpointError, text)


# -- 14, 15: dtypes


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


# -- 16: strings


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
def test_strings(tmp_path: Path, data: bytes, shape: list[int], text: str) -> None:
    costs_one_leaf(with_strings(tmp_path, data, shape), CorruptCheckpointError, text)


def test_strings_of_many_gigabytes_are_not_read_whole(tmp_path: Path) -> None:
    prefix = with_strings(tmp_path, b"", [1], size=1 << 40)
    os.truncate(shard_path(prefix), 2 << 40)
    costs_one_leaf(prefix, LimitExceededError, "Limits.index_bytes")


def test_a_flipped_string_fails_its_checksum(tmp_path: Path) -> None:
    prefix = with_strings(tmp_path, TEXT[:-1] + b"e", [2], crc=TEXT_CRC)
    costs_one_leaf(prefix, CorruptCheckpointError, "crc32c")


# -- 17: what stands in the place of a shard


def fifo(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(path.parent)
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)


def link_outside(path: Path) -> None:
    secret = path.parent.parent / "secret"
    secret.write_bytes(bytes(1000))
    path.symlink_to(secret)


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda path: None, CorruptCheckpointError, "the shard is missing"),
        (lambda path: path.mkdir(), CorruptCheckpointError, "a directory"),
        (fifo, CorruptCheckpointError, "a FIFO"),
        (unix_socket, CorruptCheckpointError, "a socket"),
        (lambda path: path.symlink_to("/dev/zero"), UnsafeCheckpointError, "leads out"),
        (lambda path: path.symlink_to("../../../../../etc/passwd"), UnsafeCheckpointError, "leads out"),
        (link_outside, UnsafeCheckpointError, "leads out"),
        (lambda path: path.symlink_to("nothing"), CorruptCheckpointError, "dangling"),
        (lambda path: path.symlink_to(path.name), CorruptCheckpointError, "circle"),
        (lambda path: path.write_bytes(b""), CorruptCheckpointError, "of a shard of 0"),
    ],
)
def test_shards(tmp_path: Path, make: Callable[[Path], None], kind: type[CheckpointError], text: str) -> None:
    (tmp_path / "run").mkdir()
    bundle = Bundle(2)
    bundle.add("good", GOOD, 0)
    bundle.add("bad", VALUE, 1)
    prefix = bundle.write(tmp_path / "run")
    shard_path(prefix, 1, 2).unlink()
    make(shard_path(prefix, 1, 2))
    error = costs_one_leaf(prefix, kind, text)
    assert error.path == str(shard_path(prefix, 1, 2))


def test_an_index_that_is_a_fifo_or_a_link_outside(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    prefix = tmp_path / "run/model.ckpt-1"
    fifo(Path(f"{prefix}.index"))
    with pytest.raises(CorruptCheckpointError, match="a FIFO"):
        open_tf_bundle(prefix)
    Path(f"{prefix}.index").unlink()
    link_outside(Path(f"{prefix}.index"))
    with pytest.raises(UnsafeCheckpointError, match="leads out"):
        open_tf_bundle(prefix)


def test_a_checkpoint_file_that_is_a_fifo(tmp_path: Path) -> None:
    bundle_of({"x": VALUE}).write(tmp_path)
    fifo(tmp_path / "checkpoint")
    with pytest.raises(CorruptCheckpointError, match="a FIFO"):
        open_tf_bundle(tmp_path)


# -- 18, 19: the wrong bytes


def two_shards(directory: Path, seed: int, rows: int = 50) -> tuple[Path, dict[str, np.ndarray]]:
    directory.mkdir(exist_ok=True)
    random = np.random.default_rng(seed)
    arrays = {"a": random.random((rows, 4), np.float32), "b": random.random((rows, 4), np.float32)}
    bundle = Bundle(2)
    bundle.add("a", arrays["a"], 0)
    bundle.add("b", arrays["b"], 1)
    return bundle.write(directory), arrays


def test_swapped_shards_fail_their_checksums(tmp_path: Path) -> None:
    prefix, _ = two_shards(tmp_path, 0)
    one, two = shard_path(prefix, 0, 2), shard_path(prefix, 1, 2)
    one.rename(tmp_path / "x")
    two.rename(one)
    (tmp_path / "x").rename(two)
    with open_tf_bundle(prefix) as checkpoint:
        for name in "ab":
            with pytest.raises(CorruptCheckpointError, match=r"have the crc32c 0x[0-9a-f]{8}, stored is 0x[0-9a-f]{8}"):
                read_boxes(leaf_of(checkpoint, name))


@pytest.mark.parametrize("rows", [50, 80])
def test_a_shard_of_another_step(tmp_path: Path, rows: int) -> None:
    """A longer one passes the look at its size, and fails its checksum."""
    prefix, arrays = two_shards(tmp_path / "one", 0)
    other, _ = two_shards(tmp_path / "two", 1, rows)
    shutil.copy(shard_path(other, 1, 2), shard_path(prefix, 1, 2))
    with open_tf_bundle(prefix) as checkpoint:
        assert same_bits(read_whole(leaf_of(checkpoint, "a")), arrays["a"])
        with pytest.raises(CorruptCheckpointError, match="crc32c"):
            read_boxes(leaf_of(checkpoint, "b"))


def test_a_shorter_shard_is_found_at_opening(tmp_path: Path) -> None:
    prefix, arrays = two_shards(tmp_path, 0)
    os.truncate(shard_path(prefix, 1, 2), 799)
    with open_tf_bundle(prefix) as checkpoint:
        error = leaf_of(checkpoint, "b").error
        assert isinstance(error, CorruptCheckpointError) and "bytes 0 to 800 of a shard of 799" in str(error)
        assert same_bits(read_whole(leaf_of(checkpoint, "a")), arrays["a"])


def test_flips_and_zeroed_pages_in_the_data(tmp_path: Path) -> None:
    array = np.random.default_rng(0).random((64, 100), np.float32)
    prefix = bundle_of({"w": array}).write(tmp_path)
    data = shard_path(prefix).read_bytes()
    damages = [bytes([*data[:n], data[n] ^ 1 << n % 8, *data[n + 1 :]]) for n in (0, 777, len(data) - 1)]
    damages.append(data[:4096] + bytes(4096) + data[8192:])
    for damaged in damages:
        shard_path(prefix).write_bytes(damaged)
        with open_tf_bundle(prefix) as checkpoint:
            leaf = leaf_of(checkpoint, "w")
            halves = [((0, 32), (0, 100)), ((32, 64), (0, 100))]
            columns = [((0, 64), (0, 50)), ((0, 64), (50, 100))]
            for boxes in (None, halves, columns):
                with pytest.raises(CorruptCheckpointError, match="crc32c") as caught:
                    read_boxes(leaf, boxes)
                assert caught.value.leaf == "w" and caught.value.path == str(shard_path(prefix))
            with pytest.raises(CorruptCheckpointError, match="crc32c"):
                read_boxes(leaf, halves[:1], "full")
            assert read_boxes(leaf, halves[:1]).verified is False
            assert read_boxes(leaf, verify="off").verified is None


# -- 20: names


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (b"\xff\xfe", "not UTF-8"),
        (b"a\0b", "holds a NUL"),
        (b"\0orphan", "no slice of any variable"),
        (slice_key(b"nobody", (Extent(0, 1),)), "no slice of any variable"),
        (b"k" * 5000, "Limits.name_bytes"),
        (b"k" * (1 << 20), "Limits.name_bytes"),
    ],
)
def test_names(tmp_path: Path, name: bytes, text: str) -> None:
    bundle = bundle_of({"good": GOOD})
    bundle.entries[name] = SOUND
    refused(bundle.write(tmp_path), CorruptCheckpointError, text)


@pytest.mark.parametrize("keys", [[b"b", b"a"], [b"a", b"a"], [b"", b"a"]])
def test_names_out_of_order(tmp_path: Path, keys: list[bytes]) -> None:
    index = table([(b"", header()), *((key, SOUND) for key in keys)], restart_interval=1)
    refused(bundle_of({"x": VALUE}).write(tmp_path, index=index), CorruptCheckpointError, "does not come after")


def test_names_are_only_names(tmp_path: Path) -> None:
    names = ["../../etc/passwd", "/etc/passwd", "a/../b", "a//b", ".", "a/b", "a", "%2e%2e", "C:\\x", "unicode/\u540d"]
    with open_tf_bundle(bundle_of(dict.fromkeys(names, VALUE)).write(tmp_path)) as checkpoint:
        assert list(checkpoint.leaves) == sorted(names)
        for name in names:
            assert same_bits(read_whole(leaf_of(checkpoint, name)), VALUE)


# -- 21: amplification


def test_many_names_of_one_region_cost_nothing_to_list(tmp_path: Path) -> None:
    data = np.zeros(4096, np.float32)
    bundle = Bundle()
    where = bundle.store(data)
    one = entry("float32", [4096], **where)
    bundle.entries = {b"leaf_%06d" % number: one for number in range(20_000)}
    with open_tf_bundle(bundle.write(tmp_path, block_bytes=1 << 18)) as checkpoint:
        assert len(checkpoint.leaves) == 20_000
        assert same_bits(read_whole(leaf_of(checkpoint, "leaf_019999")), data)


# -- 22: partitioned variables


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
        (say(ROWS[1]), r"\[0:3, 0:5\] of the shape \(8, 5\) is in none of its slices"),
        (say(ROWS[0], [Extent(4, 4), Extent(0, -1)]), r"\[3:4, 0:5\] .* is in none"),
        (say(ROWS[0], [Extent(2, 6), Extent(0, -1)]), r"\[2:3, 0:5\] .* is in 2 of its slices"),
        (say(ROWS[0], *ROWS), "is in 2 of its slices"),
        (say(ROWS[0], [Extent(3, 6), Extent(0, -1)]), "a slice of 6 from 3 in a dimension of 8"),
        (say(ROWS[0], [Extent(-3, 11), Extent(0, -1)]), "a slice of 11 from -3"),
        (say(ROWS[0], [Extent(3, -7), Extent(0, -1)]), "a slice of -7 from 3"),
        (say(ROWS[0], [Extent(3, 1 << 62), Extent(0, -1)]), "a slice of 4611686018427387904"),
        (say([Extent(0, -1)]), "a slice of 1 dimensions"),
        (say([Extent(0, -1)] * 40), "40 dimensions"),
        (say(*ROWS, shape=(1 << 30, 5)), "is in none"),
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


def test_very_many_slices_are_checked_quickly_or_refused(tmp_path: Path) -> None:
    regular = [[Extent(n, 1)] for n in range(3000)]
    crosses = [[Extent(n, 1), Extent(3000 - n, 1)] for n in range(3000)]
    for slices, shape, text in ((regular, (3001,), "is in none"), (crosses, (3001, 3001), "too many to check")):
        bundle = bundle_of({"good": GOOD})
        bundle.entries[b"bad"] = entry("float32", shape, slices=slices)
        for extents in slices:
            bundle.entries[slice_key(b"bad", tuple(extents))] = b""
        costs_one_leaf(bundle.write(tmp_path), CorruptCheckpointError, text)


# -- any single edit, anywhere


@pytest.fixture(scope="module")
def small_bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    arrays = {
        "b": np.arange(7).astype(np.float32),
        "flag": np.array([True, False]),
        "step": np.array(5, np.int64),
        "text": np.array([b"one", b"", b"three"], object),
        "z/empty": np.zeros((0, 3), np.float32),
    }
    bundle = bundle_of(arrays, 2)
    sliced_value = np.arange(20, dtype=np.int16).reshape(5, 4)
    bundle.add_sliced("w", sliced_value, [[Extent(0, 2), Extent(0, -1)], [Extent(2, 3), Extent(0, -1)]])
    return bundle.write(tmp_path_factory.mktemp("small"), block_bytes=120), {**arrays, "w": sliced_value}


@pytest.mark.slow
@given(st.data())
@settings(max_examples=400)
def test_any_single_edit_gives_right_values_or_typed_errors(small_bundle, tmp_path_factory, data) -> None:
    """Any flip, deletion or insertion of a byte, index or shard: right names, dtypes, shapes and bytes, or an error."""
    prefix, arrays = small_bundle
    directory = tmp_path_factory.mktemp("edited")
    for path in prefix.parent.iterdir():
        shutil.copy(path, directory)
    target = directory / data.draw(st.sampled_from(sorted(path.name for path in directory.iterdir())))
    content = target.read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    byte = bytes([data.draw(st.integers(0, 255))])
    edit = data.draw(st.sampled_from([byte + content[at + 1 :], content[at + 1 :], byte + content[at:]]))
    target.write_bytes(content[:at] + edit)
    right_or_typed(directory / prefix.name, arrays)


def right_or_typed(prefix: Path, arrays: dict[str, np.ndarray]) -> None:
    try:
        checkpoint = open_tf_bundle(prefix)
    except CheckpointError:
        return
    with checkpoint:
        assert sorted(checkpoint.leaves) == sorted(arrays)
        for name, value in arrays.items():
            try:
                assert same_bits(read_whole(leaf_of(checkpoint, name)), value), name
            except CheckpointError as error:
                assert error.leaf == name


@pytest.mark.slow
@given(st.randoms(use_true_random=False))
@settings(max_examples=300)
def test_sealed_mutations_never_escape(tmp_path_factory, random) -> None:
    """Keys, entries and header edited at random, checksums made whole again: values or typed errors, nothing else."""
    bundle, index = sealed_mutation(random)
    values_of(bundle.write(tmp_path_factory.mktemp("sealed"), index=index))


CORPUS = sorted((Path(__file__).parents[2] / "corpus/tf_bundle").glob("*"))


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_the_corpus(path: Path, tmp_path: Path) -> None:
    """Indexes that once broke a reader, TensorFlow's or this one; the name says the error of opening or of its leaf."""
    kind = {"corrupt": CorruptCheckpointError, "unsupported": UnsupportedCheckpointError}[path.name.split("-")[0]]
    prefix = bundle_of({"x": VALUE}).write(tmp_path, index=path.read_bytes())
    with pytest.raises(kind), open_tf_bundle(prefix) as checkpoint:
        for name in checkpoint.leaves:
            leaf = leaf_of(checkpoint, name)
            read_boxes(leaf, [tuple((0, 0) for _ in leaf.shape)] if leaf.shape else None)


def test_the_corpus_is_here() -> None:
    assert len(CORPUS) >= 8
