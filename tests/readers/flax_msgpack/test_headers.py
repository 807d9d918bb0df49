"""Msgpack headers of every width."""

import msgpack
import pytest

from orbax_t5x.files.limits import Limits
from orbax_t5x.files.local import LocalFiles
from orbax_t5x.readers.flax_msgpack.walk import StoredText, walk


def walked(directory, data):
    (directory / "file").write_bytes(data)
    return walk(LocalFiles(directory).file("file"), Limits())[0]


@pytest.mark.parametrize("size", [0, 1, 15, 16, 31, 32, 255, 256, 65535, 65536, 70000])
def test_headers_of_every_width(tmp_path, size):
    for value in ([None] * size, {f"{k:05}": k for k in range(size)}, "x" * size, b"x" * size):
        data = msgpack.packb({"value": value})
        node = walked(tmp_path, data)["value"]
        if isinstance(node, StoredText):
            assert data[node.start : node.start + node.size] == (value.encode() if isinstance(value, str) else value)
            assert (node.short is None) == (size > 4096)
        else:
            assert node == value
