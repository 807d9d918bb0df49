"""Compressed members: sizes that lie, streams that end early or go on, and reads of parts."""

import struct
import tracemalloc
import zlib

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.extras.npz.deflated import DeflatedLeaf, decompress_head
from orbax_t5x.extras.npz.header import ArrayHeader
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.local import LocalFiles
from orbax_t5x.lazy import read_views
from orbax_t5x.readers.zip_members import Archive
from orbax_t5x.testing.leaf_reads import read_boxes
from tests.support.zip_files import Entry, archive_of

VALUES = np.random.default_rng(3).integers(0, 4, (50, 40)).astype(np.int16)
HEADER = ArrayHeader(VALUES.dtype, False, VALUES.shape, (40, 1))


def deflated(data):
    stream = zlib.compressobj(9, zlib.DEFLATED, -15)
    return stream.compress(data) + stream.flush()


def leaf_of(directory, data, header=HEADER, **fields):
    plain = b"head" + VALUES.tobytes()
    right = {"size": len(plain), "crc": zlib.crc32(plain), "method": 8}
    (directory / "file").write_bytes(archive_of([Entry(b"m", data, **(right | fields))]))
    archive = Archive(LocalFiles(directory).file("file"), Limits())
    return DeflatedLeaf("x", archive, "m", 4, header, Limits())


def test_boxes(tmp_path):
    leaf = leaf_of(tmp_path, deflated(b"head" + VALUES.tobytes()))
    found = read_boxes(leaf, [((3, 9), (0, 40)), ((0, 50), (7, 8)), ((3, 9), (0, 40))])
    for array, expected in zip(found.arrays, (VALUES[3:9], VALUES[:, 7:8], VALUES[3:9]), strict=True):
        np.testing.assert_array_equal(array, expected)
    assert found.stats.bytes_read == 2 * (6 * 40 + 50 - 6)
    assert (leaf.chunks, leaf.chunk_checksum) == ((50, 40), "zip")
    other = leaf_of(tmp_path, deflated(b"head" + VALUES.tobytes()), ArrayHeader(VALUES.dtype, True, (40, 50), (1, 40)))
    np.testing.assert_array_equal(read_boxes(other).arrays[0], VALUES.T.byteswap())


@pytest.mark.parametrize(
    ("data", "fields"),
    [
        (deflated(b"head" + VALUES.tobytes())[:-3], {}),
        (deflated(b"head" + VALUES.tobytes()) + b"more", {}),
        (deflated(b"head" + VALUES.tobytes() + b"more"), {}),
        (deflated(b"head" + VALUES.tobytes()[:-2]), {}),
        (deflated(b"head" + VALUES.tobytes()), {"crc": 7}),
        (b"\xff" * 100, {}),
        (b"", {}),
        (deflated(bytes(1 << 24)), {}),
    ],
)
def test_streams_that_lie(tmp_path, data, fields):
    with pytest.raises(CorruptCheckpointError) as caught:
        read_boxes(leaf_of(tmp_path, data, **fields))
    assert (caught.value.leaf, caught.value.path) == ("x", str(tmp_path / "file"))


@pytest.mark.parametrize("order", "CF")
def test_a_large_member_takes_little_memory(tmp_path, order):
    values = np.random.default_rng(1).integers(0, 9, (3, 1 << 10, 1 << 11)).astype(np.int32)
    np.savez_compressed(tmp_path / "a.npz", a=np.asarray(values, order=order))
    with ot.open_checkpoint(tmp_path / "a.npz") as checkpoint:
        part = np.empty((3, 1 << 10, 16), np.int32)
        view = checkpoint.leaves["a"]
        tracemalloc.start()
        try:
            read_views([(view, ((0, 3), (0, 1 << 10), (32, 48)), part)])
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        np.testing.assert_array_equal(part, values[:, :, 32:48])
        np.testing.assert_array_equal(view.get(), values)
    assert peak < values.nbytes / 3


def test_a_head():
    whole = struct.pack("<1000I", *range(1000))
    assert decompress_head(deflated(whole)[:200], 64) == whole[:64]
    with pytest.raises(CorruptCheckpointError):
        decompress_head(b"\xff" * 20, 64)
