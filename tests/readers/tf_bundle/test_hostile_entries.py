"""Headers, entries and names of a bundle that cannot be right."""

from pathlib import Path

import numpy as np
import pytest

from orbax_t5x.errors import CheckpointError, CorruptCheckpointError, UnsupportedCheckpointError
from orbax_t5x.readers.tf_bundle.open import open_tf_bundle
from orbax_t5x.readers.tf_bundle.proto import Extent, parse_entry, slice_key
from orbax_t5x.testing.leaf_reads import leaf_of, read_whole, same_bits
from tests.support.bundle_damage import GOOD, VALUE, costs_one_leaf, place, with_entry
from tests.support.bundle_writer import Bundle, bundle_of, entry, header, integer, message, shape_proto, table, varint


def refused(prefix: Path, kind: type[CheckpointError], text: str) -> None:
    with pytest.raises(kind, match=text) as caught:
        open_tf_bundle(prefix)
    assert caught.value.path == f"{prefix}.index"


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


def test_messages_in_messages_are_not_followed() -> None:
    assert parse_entry(nested(100_000), 32).dtype == 0


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (message(2, integer(1, -1)), "negative dimension"),
        (shape_proto([1 << 33, 1 << 33]), "more bytes than can be counted"),
        (shape_proto([0, 1 << 62, 1 << 62]), "more bytes than can be counted"),
        (shape_proto([1] * 300), "300 dimensions"),
        (integer(3, 1), "unknown rank"),
        (shape_proto([1 << 62]), "more bytes than can be counted"),
        (shape_proto([1 << 60]), "takes"),
        (message(2, message(1, b"6")), "wire type 2, not 0"),
    ],
)
def test_shapes(tmp_path: Path, shape: bytes, text: str) -> None:
    rest = SOUND[2 + len(message(2, shape_proto([6]))) :]
    costs_one_leaf(with_entry(tmp_path, integer(1, 1) + message(2, shape) + rest), CorruptCheckpointError, text)


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


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (b"\xff\xfe", "not UTF-8"),
        (b"a\0b", "holds a NUL"),
        (b"\0orphan", "no slice of any variable"),
        (slice_key(b"nobody", (Extent(0, 1),)), "no slice of any variable"),
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


@pytest.mark.slow
def test_many_names_of_one_region_cost_nothing_to_list(tmp_path: Path) -> None:
    data = np.zeros(4096, np.float32)
    bundle = Bundle()
    where = bundle.store(data)
    one = entry("float32", [4096], **where)
    bundle.entries = {b"leaf_%06d" % number: one for number in range(20_000)}
    with open_tf_bundle(bundle.write(tmp_path, block_bytes=1 << 18)) as checkpoint:
        assert len(checkpoint.leaves) == 20_000
        assert same_bits(read_whole(leaf_of(checkpoint, "leaf_019999")), data)
