"""The tree of a msgpack file, with offsets instead of bytes."""

import hypothesis
import msgpack
import pytest
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.local import LocalFiles
from orbax_t5x.readers.flax_msgpack.walk import StoredText, walk


def open_bytes(directory, data, name="state.msgpack", **limits):
    path = directory / name
    path.write_bytes(data)
    return ot.open_checkpoint(path, format="flax_msgpack", limits=Limits(**limits))


def walked(directory, data):
    (directory / "file").write_bytes(data)
    return walk(LocalFiles(directory).file("file"))[0]


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, width=32) | st.text(),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=40), inner, max_size=20),
    max_leaves=60,
)


@pytest.mark.slow
@hypothesis.given(value=PLAIN, single=st.booleans())
@hypothesis.settings(max_examples=hypothesis.settings.default.max_examples // 2)
def test_the_walk_finds_the_structure_that_msgpack_finds(tmp_path_factory, value, single):
    data = msgpack.packb(value, use_single_float=single)

    def plain(node):
        if isinstance(node, StoredText):
            assert data[node.start : node.start + node.size] == node.short
            return node.short.decode()
        if isinstance(node, dict):
            return {key: plain(inner) for key, inner in node.items()}
        return [plain(inner) for inner in node] if isinstance(node, list) else node

    assert plain(walked(tmp_path_factory.getbasetemp(), data)) == msgpack.unpackb(data)


@pytest.mark.slow
def test_a_linear_number_of_bytes_is_read_to_open(tmp_path):
    """Small values follow each other in few, growing pieces, none of them twice."""
    for count in (1000, 10_000, 30_000):
        data = msgpack.packb({f"{k:06}": k for k in range(count)})
        with open_bytes(tmp_path, data) as checkpoint:
            assert len(data) <= checkpoint.index_bytes <= len(data) + 1000


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
