"""Tables: what TensorFlow and the hand-made writer made reads back; what breaks a rule is one typed error, at once."""

import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import cramjam
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbax_t5x.errors import CheckpointError, CorruptCheckpointError, LimitExceededError, UnsupportedCheckpointError
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.local import LocalFiles
from orbax_t5x.readers.tf_bundle.sstable import BadVarint, Table, is_table, read_varint, unmask
from tests.support.bundle_writer import (
    MAGIC,
    block,
    block_entries,
    footer,
    handle,
    masked,
    sealed,
    table,
    table_of_blocks,
    varint,
)

ENTRIES = [(f"key/{number:04d}".encode(), bytes([number % 256]) * (number % 40)) for number in range(200)]
Entries = list[tuple[bytes, bytes]]


def read(directory: Path, data: bytes, limits: Limits | None = None) -> Entries:
    (directory / "x.index").write_bytes(data)
    files = LocalFiles(directory, limits=limits)
    try:
        return list(Table(files.file("x.index")).entries())
    finally:
        files.close()


def refused(directory: Path, data: bytes, kind: type[CheckpointError], text: str, limits: Limits | None = None) -> None:
    with pytest.raises(kind, match=text) as caught:
        read(directory, data, limits)
    assert caught.value.path == str(directory / "x.index")


@given(
    st.dictionaries(st.binary(max_size=20), st.binary(max_size=60), max_size=60),
    st.integers(1, 500),
    st.integers(1, 20),
    st.booleans(),
)
def test_any_layout_gives_the_same_entries(tmp_path_factory, entries, block_bytes, interval, snappy) -> None:
    expected = sorted(entries.items())
    data = table(expected, block_bytes=block_bytes, restart_interval=interval, snappy=snappy)
    assert read(tmp_path_factory.mktemp("table"), data) == expected


def test_the_goldens_are_tables(goldens: Path) -> None:
    indexes = sorted(goldens.glob("tf_bundle/*/*.index"))
    assert len(indexes) == 7
    for path in indexes:
        files = LocalFiles(path.parent)
        assert is_table(files.file(path.name))
        keys = [key for key, _ in Table(files.file(path.name)).entries()]
        assert keys[0] == b"" and keys == sorted(set(keys))
        files.close()


@given(st.integers(0, (1 << 64) - 1), st.binary(max_size=3))
def test_varints(value: int, rest: bytes) -> None:
    data = varint(value)
    assert read_varint(data + rest, 0, len(data)) == (value, len(data))
    with pytest.raises(BadVarint):
        read_varint(data, 0, len(data) - 1)


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 10, b"\x80" * 10 + b"\x01", b"\xff" * 9 + b"\x02"])
def test_no_varints(data: bytes) -> None:
    with pytest.raises(BadVarint):
        read_varint(data, 0, len(data))


# -- the file and its footer


@pytest.mark.parametrize("data", [b"", b"x" * 47, MAGIC, b"\0" * 48, table(ENTRIES)[:-1], table(ENTRIES)[: 1 << 10]])
def test_what_is_no_table(tmp_path: Path, data: bytes) -> None:
    refused(tmp_path, data, CorruptCheckpointError, "not an SSTable")


@pytest.mark.slow
def test_every_cut_is_refused(tmp_path: Path) -> None:
    data = table(ENTRIES[:20], block_bytes=100)
    for size in range(len(data)):
        refused(tmp_path, data[:size], CorruptCheckpointError, "not an SSTable")


def test_a_middle_that_is_missing(tmp_path: Path) -> None:
    data = table(ENTRIES, block_bytes=500)
    for low in range(0, len(data) - 60, 97):
        refused(tmp_path, data[:low] + data[low + 50 :], CorruptCheckpointError, "crc32c|reaches beyond")


GOOD_INDEX = sealed(block([(b"z", handle(0, len(block(ENTRIES))))], 1))


@pytest.mark.parametrize(
    ("meta", "index"),
    [
        (handle(0, 1), handle(1 << 60, 10)),
        (handle(0, 1), handle(0, 32 << 30)),
        (handle(0, 1), handle((1 << 64) - 1, (1 << 64) - 1)),
        (handle(1 << 40, 1), handle(0, 1)),
        (handle(0, 1), handle(0, 1 << 20)),
        (handle(0, 1), b"\xff" * 20),
        (b"\xff" * 11, b""),
    ],
)
def test_handles_of_the_footer_that_lead_nowhere(tmp_path: Path, meta: bytes, index: bytes) -> None:
    data = sealed(block(ENTRIES)) + sealed(block([])) + GOOD_INDEX
    refused(tmp_path, data + footer(meta, index), CorruptCheckpointError, "reaches beyond|no block handles")


def test_a_block_that_overlaps_the_footer(tmp_path: Path) -> None:
    data = sealed(block(ENTRIES)) + sealed(block([]))
    index_at = len(data)
    data += GOOD_INDEX
    for size in (len(GOOD_INDEX) - 4, len(GOOD_INDEX), len(GOOD_INDEX) + 43):
        ends = footer(handle(0, 1), handle(index_at, size))
        refused(tmp_path, data + ends, CorruptCheckpointError, "reaches beyond")


def test_limits_come_first(tmp_path: Path) -> None:
    data = table(ENTRIES)
    refused(tmp_path, data, LimitExceededError, "Limits.index_bytes", Limits(index_bytes=100))


# -- flips and checksums


@pytest.mark.parametrize("snappy", [False, True])
def test_a_flipped_bit_in_a_block_is_refused(tmp_path: Path, snappy: bool) -> None:
    data = table(ENTRIES[:40], block_bytes=200, snappy=snappy)
    for place in range(0, len(data) - 48, 5):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        # An empty metaindex block holds nothing and is not read.
        try:
            assert read(tmp_path, bytes(damaged)) == ENTRIES[:40]
        except CheckpointError as error:
            assert "crc32c" in str(error) or "compression" in str(error)
    first = bytearray(data)
    first[3] ^= 1
    refused(tmp_path, bytes(first), CorruptCheckpointError, "the block at 0 has the crc32c")


@pytest.mark.slow
@given(st.data())
@settings(max_examples=settings.default.max_examples // 2)
def test_any_single_edit_gives_the_right_entries_or_a_typed_error(tmp_path_factory, data) -> None:
    written = table(ENTRIES[:30], block_bytes=150, snappy=data.draw(st.booleans()))
    place = data.draw(st.integers(0, len(written) - 1))
    byte = bytes([data.draw(st.integers(0, 255))])
    edit = data.draw(st.sampled_from([byte + written[place + 1 :], written[place + 1 :], byte + written[place:]]))
    try:
        assert read(tmp_path_factory.mktemp("table"), written[:place] + edit) == ENTRIES[:30]
    except CheckpointError:
        pass


# -- the index block


def moved(change: Callable[[list], list]) -> bytes:
    """A table of four blocks with its handles changed, its checksums whole."""
    groups = [ENTRIES[:50], ENTRIES[50:100], ENTRIES[100:150], ENTRIES[150:]]
    return table_of_blocks([(group[-1][0], sealed(block(group))) for group in groups], edit=change)


def with_first(offset: int, size: int) -> Callable[[list], list]:
    return lambda handles: [(handles[0][0], offset, size), *handles[1:]]


def index_of_itself(handles: list) -> list:
    _, offset, size = handles[-1]
    own = offset + size + 5 + len(sealed(block([])))
    return [*handles[:-1], (handles[-1][0], own, 80)]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (with_first(1 << 60, 10), "reaches beyond"),
        (with_first(0, 32 << 30), "reaches beyond"),
        (with_first(0, 1 << 62), "reaches beyond"),
        (index_of_itself, "begins inside another|reaches beyond"),
        (lambda handles: [handles[0], (handles[1][0], *handles[0][1:]), *handles[2:]], "begins inside another"),
        (
            lambda handles: [handles[0], (handles[1][0], *handles[2][1:]), (handles[2][0], *handles[1][1:])],
            "begins inside",
        ),
    ],
)
def test_handles_that_overlap_or_lead_nowhere(tmp_path: Path, change, text: str) -> None:
    refused(tmp_path, moved(change), CorruptCheckpointError, text)


def test_sound_handles_are_read(tmp_path: Path) -> None:
    assert read(tmp_path, moved(lambda handles: handles)) == ENTRIES


def test_a_handle_with_more_behind_it_or_none(tmp_path: Path) -> None:
    data = sealed(block(ENTRIES))
    for value in (handle(0, len(data) - 5) + b"\0", b"", b"\xff", b"\0"):
        meta_at, meta = len(data), sealed(block([]))
        index = sealed(block([(b"z", value)], 1))
        ends = footer(handle(meta_at, len(meta) - 5), handle(meta_at + len(meta), len(index) - 5))
        refused(tmp_path, data + meta + index + ends, CorruptCheckpointError, "block handle")


# -- what is inside a block


def one_block(data: bytes, kind: int = 0, compress: bool = True) -> bytes:
    return table_of_blocks([(b"zzz", sealed(data, kind, compress=compress))])


def restarts(*points: int) -> bytes:
    return struct.pack(f"<{len(points) + 1}I", *points, len(points))


def plain(shared: int, unshared: int, size: int, rest: bytes) -> bytes:
    return varint(shared) + varint(unshared) + varint(size) + rest


TWO, _ = block_entries([(b"a", b"1"), (b"b", b"2")], 1)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "no restart points"),
        (b"abc", "no restart points"),
        (TWO + struct.pack("<I", (1 << 32) - 1), "restart points"),
        (TWO + struct.pack("<II", 0, 1000), "restart points"),
        (b"\xff" * 11 + restarts(0), "no proper lengths"),
        (b"\x80" + restarts(0), "no proper lengths"),
        (plain(0, 1, 0, b"a") + plain(2, 1, 0, b"b") + restarts(0), "reaches outside"),
        (plain(0, 1, 10, b"ab") + restarts(0), "reaches outside"),
        (plain(0, 1 << 40, 0, b"ab") + restarts(0), "reaches outside"),
        (plain(0, 1, (1 << 64) - 1, b"ab") + restarts(0), "reaches outside"),
        (plain(0, 1, 0, b"b") + plain(0, 1, 0, b"a") + restarts(0), "does not come after"),
        (plain(0, 1, 0, b"b") + plain(0, 1, 0, b"b") + restarts(0), "does not come after"),
        (plain(0, 0, 0, b"") + plain(0, 0, 0, b"") + restarts(0), "does not come after"),
    ],
)
def test_blocks_that_lie_about_their_entries(tmp_path: Path, data: bytes, text: str) -> None:
    refused(tmp_path, one_block(data), CorruptCheckpointError, text)
    refused(tmp_path, one_block(data, 1), CorruptCheckpointError, text)


def test_keys_unsorted_across_blocks(tmp_path: Path) -> None:
    def blocks(*groups: Sequence[tuple[bytes, bytes]]) -> bytes:
        return table_of_blocks([(bytes([120 + n]), sealed(block(group))) for n, group in enumerate(groups)])

    refused(tmp_path, blocks([(b"b", b"")], [(b"a", b"")]), CorruptCheckpointError, "does not come after")
    refused(tmp_path, blocks([(b"b", b"")], [(b"b", b"")]), CorruptCheckpointError, "does not come after")


# -- snappy


def snappy_block(claimed: int, elements: bytes) -> bytes:
    return one_block(varint(claimed) + elements, 1, compress=False)


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        (snappy_block(4 << 30, b"\x00a"), LimitExceededError, "the limit is 67108864"),
        (snappy_block((64 << 20) + 1, b"\x00a"), LimitExceededError, "the limit is 67108864"),
        (snappy_block(64 << 20, b"\x00a"), CorruptCheckpointError, "cannot unpack"),
        (snappy_block(5, b"\x00a\x01\x00"), CorruptCheckpointError, "damaged"),  # a copy from offset 0
        (snappy_block(5, b"\x00a\x01\x05"), CorruptCheckpointError, "damaged"),  # a copy from before the start
        (snappy_block(9, b"\x20abc"), CorruptCheckpointError, "damaged"),  # a literal past the end
        (snappy_block(1, b"\x04ab"), CorruptCheckpointError, "damaged"),  # more than it says
        (snappy_block(9, b"\x04ab"), CorruptCheckpointError, "damaged"),  # less than it says
        (one_block(b"", 1, compress=False), CorruptCheckpointError, "has no length"),
        (one_block(b"\xff" * 12, 1, compress=False), CorruptCheckpointError, "has no length"),
    ],
)
def test_snappy_that_lies(tmp_path: Path, data: bytes, kind: type[CheckpointError], text: str) -> None:
    refused(tmp_path, data, kind, text)


def test_a_bomb_stops_at_the_limit(tmp_path: Path) -> None:
    """A few blocks of zeros unpack to twenty times their size: the sum counts."""
    zeros = block([(b"a", bytes(1 << 20))])
    assert len(cramjam.snappy.compress_raw(zeros)) < len(zeros) // 15
    blocks = []
    for number in range(8):
        key = b"%d" % number
        blocks.append((key, sealed(block([(key, bytes(1 << 20))]), 1)))
    data = table_of_blocks(blocks)
    assert len(read(tmp_path, data)) == 8
    refused(tmp_path, data, LimitExceededError, "Limits.index_bytes", Limits(index_bytes=4 << 20))


def test_keys_that_share_a_long_beginning_are_counted(tmp_path: Path) -> None:
    """Each entry takes five bytes, and its key ten thousand."""
    first = plain(0, 10_000, 0, b"k" * 10_000)
    more = b"".join(plain(10_000 + number, 1, 0, b"a") for number in range(100))
    data = one_block(first + more + restarts(0))
    assert len(read(tmp_path, data)) == 101
    refused(tmp_path, data, LimitExceededError, "Limits.index_bytes", Limits(index_bytes=1 << 18))


@pytest.mark.parametrize("kind", [2, 4, 7, 255])
def test_other_compressions_are_named(tmp_path: Path, kind: int) -> None:
    refused(tmp_path, one_block(block(ENTRIES), kind), UnsupportedCheckpointError, f"compression {kind};")


@given(st.integers(0, 2**32 - 1))
def test_a_masked_checksum_is_unmasked(crc: int):
    assert unmask(masked(crc)) == crc
