"""NumPy's archives, written by NumPy: stored members by range, compressed ones whole, and what is refused."""

import io
import os
import random
import struct
import tracemalloc
import zipfile
import zlib

import hypothesis.extra.numpy as hnp
import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, CorruptCheckpointError, UnsafeCheckpointError, UnsupportedCheckpointError
from orbax_t5x.extras.npz.open import (
    LONGEST_FIXED_BYTES,
    ArrayHeader,
    DeflatedLeaf,
    decompress_head,
    header_bytes,
    parse_npy_header,
)
from orbax_t5x.files.local import LocalFiles
from orbax_t5x.lazy import read_views
from orbax_t5x.readers.zip_members import Archive
from orbax_t5x.testing.leaf_reads import assert_same, leaf_of, read_boxes
from tests.support.format_suites import NpzSuite
from tests.support.zip_files import Entry, archive_of


class TestStored(NpzSuite):
    pass


class TestCompressed(NpzSuite):
    save = staticmethod(np.savez_compressed)


SAVES = [np.savez, np.savez_compressed]
ROWS = np.random.default_rng(4).integers(0, 100, (64, 48)).astype(np.float32)


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_eighth_of_an_array(tmp_path, save, order):
    save(tmp_path / "a.npz", w=np.asarray(ROWS, order=order), big=ROWS.astype(">i4"))
    with ot.open_checkpoint(tmp_path / "a.npz") as checkpoint:
        for name, expected in (("w", ROWS), ("big", ROWS.astype(np.int32))):
            for box in (((8, 16), (0, 48)), ((0, 64), (6, 12))):
                found = read_boxes(leaf_of(checkpoint, name), [box])
                assert_same(found.arrays[0], expected[box[0][0] : box[0][1], box[1][0] : box[1][1]])
                assert found.stats.bytes_read == ROWS.nbytes // 8
        verified = read_boxes(leaf_of(checkpoint, "w")).verified
        assert verified is (True if save is np.savez else None)
    assert {leaf.status for leaf in ot.verify(tmp_path / "a.npz").leaves} == {"ok"}


def test_a_model_of_slashes(tmp_path):
    """As Big Vision and Scenic name their arrays; restored, and converted to Orbax and back."""
    values = {"params/Transformer/encoder/kernel": ROWS, "params/bias": ROWS[0]}
    np.savez(tmp_path / "model.npz", **values)
    with ot.open_checkpoint(tmp_path / "model.npz") as checkpoint:
        assert checkpoint.format == "npz"
        assert list(checkpoint.tree()["params"]) == ["Transformer", "bias"]
    target = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in values.items()}
    for name, value in ot.restore(tmp_path / "model.npz", target).items():
        assert_same(np.asarray(value), values[name])
    ot.convert(tmp_path / "model.npz", tmp_path / "orbax")
    assert {leaf.status for leaf in ot.diff(tmp_path / "model.npz", tmp_path / "orbax").leaves} == {"equal"}


def test_arrays_that_are_none_of_numbers(tmp_path, monkeypatch):
    class Hostile:
        def __reduce__(self):
            return os.system, ("touch executed",)

    monkeypatch.chdir(tmp_path)
    fields, text = np.zeros(2, [("x", "f4")]), np.array("text")
    np.savez(tmp_path / "a.npz", good=ROWS, bad=np.array([Hostile()], object), fields=fields, text=text)
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.writestr("readme", b"text")
    with ot.open_checkpoint(tmp_path / "a.npz") as checkpoint:
        assert_same(checkpoint.leaves["good"].get(), ROWS)
        for name, error in (
            *(("bad", UnsafeCheckpointError), ("fields", UnsupportedCheckpointError)),
            *(("text", UnsupportedCheckpointError), ("readme", UnsupportedCheckpointError)),
        ):
            with pytest.raises(error) as caught:
                checkpoint.leaves[name].get()
            assert caught.value.leaf == name
    assert os.listdir(tmp_path) == ["a.npz"]


def damaged(save, old, new):
    made = io.BytesIO()
    save(made, w=ROWS)
    data = made.getvalue()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        array = archive.read("w.npy").replace(old, new, 1)
    again = io.BytesIO()
    with zipfile.ZipFile(
        again, "w", zipfile.ZIP_DEFLATED if save is np.savez_compressed else zipfile.ZIP_STORED
    ) as file:
        file.writestr("w.npy", array)
    return again.getvalue()


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"(64, 48), ", b"(64, 49), "),
        (b"(64, 48), }                       ", b"(4611686018427387904, 4611686018), }"[:34]),
        (b"\x93", b"\x94"),
        (b"False", b"exit()"),
        (b"\x76\x00", b"\xff\xff"),
    ],
)
def test_damaged_arrays(tmp_path, save, old, new):
    (tmp_path / "a.npz").write_bytes(damaged(save, old, new))
    with ot.open_checkpoint(tmp_path / "a.npz") as checkpoint, pytest.raises(CorruptCheckpointError) as caught:
        checkpoint.leaves["w"].get()
    assert (caught.value.leaf, caught.value.path) == ("w", str(tmp_path / "a.npz"))


@pytest.mark.parametrize("save", SAVES)
def test_a_flipped_bit(tmp_path, save):
    save(tmp_path / "a.npz", w=ROWS)
    data = bytearray((tmp_path / "a.npz").read_bytes())
    data[1000] ^= 1
    (tmp_path / "a.npz").write_bytes(data)
    assert [leaf.status for leaf in ot.verify(tmp_path / "a.npz").leaves] == ["damaged"]
    with pytest.raises(CorruptCheckpointError, match=r"crc32|decompress"):
        ot.restore(tmp_path / "a.npz", None)


def test_a_file_without_arrays_and_a_file_of_another_name(tmp_path):
    np.savez(tmp_path / "none.npz")
    assert not ot.open_checkpoint(tmp_path / "none.npz").leaves
    np.savez(tmp_path / "a.npz", w=ROWS)
    (tmp_path / "a.npz").rename(tmp_path / "weights")
    with ot.open_checkpoint(tmp_path / "weights") as checkpoint:
        assert checkpoint.format == "npz"
    with pytest.raises(CorruptCheckpointError, match=r"data\.pkl"):
        ot.open_checkpoint(tmp_path / "weights", format="torch")


def saved(array, version=None):
    made = io.BytesIO()
    np.lib.format.write_array(made, array, version)
    return made.getvalue()


def header_of(data):
    return parse_npy_header(data[: header_bytes(data[:LONGEST_FIXED_BYTES])])


def npy(text, version=1):
    return b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(2 if version == 1 else 4, "little") + text


@given(
    st.sampled_from(["?", "<i2", ">i4", "=u8", "|u1", "<f2", ">f8", "<c8", ">c16"]),
    hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4),
    st.booleans(),
    st.sampled_from([None, (1, 0), (2, 0), (3, 0)]),
)
@settings(max_examples=settings.default.max_examples // 2)
def test_what_numpy_writes(dtype, shape, fortran, version):
    array = np.ones(shape, dtype, "F" if fortran else "C")
    data = saved(array, version)
    found = header_of(data)
    assert len(data) == header_bytes(data[:LONGEST_FIXED_BYTES]) + found.nbytes
    assert (found.dtype, found.shape, found.nbytes) == (array.dtype.newbyteorder("="), shape, array.nbytes)
    assert found.swap == (array.dtype.byteorder == ">")
    if array.size:
        strides = [stride * array.itemsize for stride in found.strides]
        assert all(a == b or n == 1 for a, b, n in zip(strides, array.strides, shape, strict=True))


def test_bfloat16_and_other_spellings():
    assert header_of(saved(np.zeros(3, ml_dtypes.bfloat16))).dtype == ml_dtypes.bfloat16
    expected = ArrayHeader(np.dtype(np.float32), False, (2, 3), (3, 1))
    for text in (
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }   \n",
        b'{"shape":(2,3),"fortran_order":False,"descr":"<f4"}',
        b"{'shape': (2L, 3L), 'descr': '=f4', 'fortran_order': False}",
    ):
        assert header_of(npy(text)) == expected == header_of(npy(text, 2))


def test_elements_that_are_no_numbers():
    with pytest.raises(UnsafeCheckpointError, match="pickle"):
        header_of(saved(np.array([{}], object)))
    others = (
        np.zeros(2, [("x", "f4")]),
        np.array(["a"]),
        np.array([b"a"]),
        np.zeros(2, "M8[s]"),
        np.zeros(2, np.longdouble),
    )
    for array in (*others, np.zeros(2, ml_dtypes.float8_e5m2), np.zeros(2, "V3")):
        with pytest.raises(UnsupportedCheckpointError):
            header_of(saved(array))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY\x01",
        b"\x94NUMPY" + saved(np.zeros(2))[6:],
        npy(b"", 9),
        npy(b"{'descr': '<f4'}"),
        npy(b"x" * 20_000),
        npy(b"{'descr': __import__('os').system('x'), 'fortran_order': False, 'shape': (2,)}"),
        npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (2,)} or exit()"),
        npy(b"{'descr': '<f4', 'fortran_order': 0, 'shape': (2,)}"),
        npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (-2,)}"),
        npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3L5)}"),
        npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (%d,)}" % (1 << 63)),
        npy(b"{'descr': '<f4', 'descr': '<f4', 'shape': (2,)}"),
        npy(b"{" * 9000),
        npy(b"{'shape': (" + b"1," * 4900 + b"x)}"),
    ],
)
def test_what_is_no_header(data):
    with pytest.raises(CorruptCheckpointError):
        header_of(data)


def test_mutations():
    sound = saved(np.ones((2, 3), ">f4", "F"))
    generator = random.Random(1)
    for _ in range(500):
        data = bytearray(sound)
        for _ in range(generator.randint(1, 3)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        try:
            header_of(bytes(data))
        except CheckpointError:
            pass


def test_a_header_is_as_long_as_numpy_takes_it():
    assert header_bytes(npy(b" " * 10_000)) == 10_010
    with pytest.raises(CorruptCheckpointError, match="a header of 10001 bytes"):
        header_bytes(npy(b" " * 10_001))


VALUES = np.random.default_rng(3).integers(0, 4, (50, 40)).astype(np.int16)
HEADER = ArrayHeader(VALUES.dtype, False, VALUES.shape, (40, 1))


def deflated(data):
    stream = zlib.compressobj(9, zlib.DEFLATED, -15)
    return stream.compress(data) + stream.flush()


def deflated_leaf(directory, data, header=HEADER, **fields):
    plain = b"head" + VALUES.tobytes()
    right = {"size": len(plain), "crc": zlib.crc32(plain), "method": 8}
    (directory / "file").write_bytes(archive_of([Entry(b"m", data, **(right | fields))]))
    archive = Archive(LocalFiles(directory).file("file"))
    return DeflatedLeaf("x", archive, "m", 4, header)


def test_boxes(tmp_path):
    leaf = deflated_leaf(tmp_path, deflated(b"head" + VALUES.tobytes()))
    found = read_boxes(leaf, [((3, 9), (0, 40)), ((0, 50), (7, 8)), ((3, 9), (0, 40))])
    for array, expected in zip(found.arrays, (VALUES[3:9], VALUES[:, 7:8], VALUES[3:9]), strict=True):
        np.testing.assert_array_equal(array, expected)
    assert found.stats.bytes_read == 2 * (6 * 40 + 50 - 6)
    assert (leaf.chunks, leaf.chunk_checksum) == ((50, 40), "zip")
    other = deflated_leaf(
        tmp_path, deflated(b"head" + VALUES.tobytes()), ArrayHeader(VALUES.dtype, True, (40, 50), (1, 40))
    )
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
        read_boxes(deflated_leaf(tmp_path, data, **fields))
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
