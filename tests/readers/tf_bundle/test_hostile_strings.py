"""String tensors of a bundle that cannot be right."""

import os
from pathlib import Path

import google_crc32c
import pytest

from orbax_t5x.errors import (
    CorruptCheckpointError,
    LimitExceededError,
)
from tests.support.bundle_damage import GOOD, costs_one_leaf
from tests.support.bundle_writer import (
    bundle_of,
    entry,
    shard_path,
    string_bytes,
    varint,
)


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
