"""Leaves of a msgpack tree: chunked arrays, texts, names."""

import flax.serialization
import msgpack
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.local import LocalFiles
from orbax_t5x.readers.flax_msgpack.leaves import JoinedExtents, named_nodes
from orbax_t5x.readers.flax_msgpack.walk import walk
from orbax_t5x.testing.leaf_reads import assert_same, leaf_of, read_boxes


def open_bytes(directory, data, name="state.msgpack", **limits):
    path = directory / name
    path.write_bytes(data)
    return ot.open_checkpoint(path, format="flax_msgpack", limits=Limits(**limits))


def test_a_long_text_is_read_when_it_is_wanted(tmp_path):
    text = "grüße" * 5000
    with open_bytes(tmp_path, msgpack.packb({"a": text, "b": 1})) as checkpoint:
        assert checkpoint.index_bytes < 2 * 4096 + 32
        assert checkpoint.leaves["a"].get()[()] == text.encode()
        assert checkpoint.leaves["b"].get() == 1
    with pytest.raises(ValueError, match="closed"):
        checkpoint.leaves["b"].get()


def test_boxes_of_a_chunked_array_read_their_bytes_alone(tmp_path):
    value = np.random.default_rng(0).random((64, 1000), np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 9_999)
        data = flax.serialization.msgpack_serialize({"w": value})
    with open_bytes(tmp_path, data) as checkpoint:
        leaf = leaf_of(checkpoint, "w")
        reading = read_boxes(leaf, [((3, 9), (0, 1000)), ((0, 64), (500, 501)), ((63, 64), (999, 1000))])
        assert_same(reading.arrays[0], value[3:9])
        assert_same(reading.arrays[1], value[:, 500:501])
        assert_same(reading.arrays[2], value[63:, 999:])
        assert reading.stats.bytes_read == 4 * (6 * 1000 + 58 + 1)


def test_names_of_a_deep_tree_are_bounded_by_the_file(tmp_path):
    """A long key around many small values would make far more of names than the file has bytes."""
    data = msgpack.packb({"x" * 4000: {f"{k:04}": None for k in range(5000)}})
    with pytest.raises(ot.errors.LimitExceededError, match="names"):
        open_bytes(tmp_path, data)
    (tmp_path / "file").write_bytes(data)
    file = LocalFiles(tmp_path).file("file")
    with pytest.raises(ot.errors.LimitExceededError):
        list(named_nodes(walk(file)[0], file))


DATA = bytes(range(100))
EXTENTS = [(10, 5), (40, 0), (3, 4), (90, 10), (10, 2)]
JOINED = b"".join(DATA[start : start + size] for start, size in EXTENTS)


@pytest.mark.parametrize("announced", [False, True])
def test_any_range_cut_into_any_buffers_is_that_of_the_joined_bytes(tmp_path, announced):
    (tmp_path / "data").write_bytes(DATA)
    joined = JoinedExtents(LocalFiles(tmp_path).file("data"), EXTENTS)
    assert joined.size == len(JOINED) == 21
    for offset in range(joined.size):
        for size in range(1, joined.size - offset + 1):
            buffers = [np.full(size // 2, 255, np.uint8), np.full(size - size // 2, 255, np.uint8)]
            source = joined.ahead([(offset, size)]) if announced else joined
            source.read_into(offset, buffers)
            assert np.concatenate(buffers).tobytes() == JOINED[offset : offset + size]
