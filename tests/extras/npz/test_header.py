"""Headers of NumPy's arrays: what NumPy writes is parsed, and nothing else is."""

import io
import random

import hypothesis.extra.numpy as hnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbax_t5x.errors import CheckpointError, CorruptCheckpointError, UnsafeCheckpointError, UnsupportedCheckpointError
from orbax_t5x.extras.npz.header import LONGEST_FIXED_BYTES, ArrayHeader, header_bytes, parse_npy_header


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
