"""What a GGUF header's values become."""

import struct
from contextlib import closing

import pytest

from orbax_t5x.extras.gguf.header import read_header
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.local import LocalFiles
from tests.support.gguf_files import F32, header, pair, tensor, text

NUMBERS = [(0, "B", 200), (1, "b", -3), (2, "H", 60000), (3, "h", -9), (4, "I", 1 << 31), (5, "i", -1), (6, "f", 0.5)]
NUMBERS += [(7, "?", True), (10, "Q", 1 << 63), (11, "q", -(1 << 62)), (12, "d", 0.1)]


def parsed(tmp_path, data):
    (tmp_path / "m.gguf").write_bytes(data)
    with closing(LocalFiles(tmp_path)) as files:
        return read_header(files.file("m.gguf"), Limits())


@pytest.mark.parametrize(("code", "form", "value"), NUMBERS)
def test_numbers_alone_and_in_arrays(tmp_path, code, form, value):
    packed = struct.pack(f"<{form}", value)
    alone = text("one") + struct.pack("<I", code) + packed
    several = text("two") + struct.pack("<IIQ", 9, code, 2) + packed * 2
    metadata = parsed(tmp_path, header([], [alone, several])).metadata
    assert metadata == {"one": value, "two": [value, value]}
    assert type(metadata["one"]) is type(value)


def test_texts_and_arrays(tmp_path):
    pairs = [pair("text", "é"), pair("list", [["a", "b"], ["c"]]), pair("long", "x" * 70_000)]
    pairs += [pair("many", ["token"] * 300), pair("numbers", [1] * 300), pair("bad", "?")]
    data = header([tensor("w", (2, 3), F32, 0)], [*pairs[:-1], text("bad") + struct.pack("<I", 8) + text(b"\xff")])
    found = parsed(tmp_path, data + bytes(32))
    assert found.metadata == {
        "text": "é",
        "list": [["a", "b"], ["c"]],
        "long": "(a text of 70000 bytes)",
        "many": "(an array of 300 values)",
        "numbers": "(an array of 300 values)",
        "bad": "\ufffd",
    }
    assert found.tensors == [("w", (2, 3), F32, len(data))]


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_the_data_begin_at_the_alignment(tmp_path, alignment):
    data = header([tensor("w", (2,), F32, 0)], [pair("general.alignment", alignment)])
    start = parsed(tmp_path, data + bytes(8192)).tensors[0].start
    assert start % alignment == 0 and 0 <= start - len(data.rstrip(b"\0")) < alignment + 32
