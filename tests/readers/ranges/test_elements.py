"""Elements of arrays as stored: NumPy's dtypes are the oracle of byte orders, bools and small integers."""

import ml_dtypes
import numpy as np
import pytest

from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.readers.ranges.elements import LOW_BITS, Elements, as_stored


def copied(stored, dtype, *, swap=False):
    out = np.zeros(stored.shape, dtype)
    Elements(np.dtype(dtype), swap, "/checkpoint", "leaf").copy(stored, out)
    return out


@pytest.mark.parametrize("dtype", ["int16", "float32", "uint64", "complex64"])
def test_bytes_of_the_other_order_are_numpys(dtype):
    values = np.arange(6).reshape(2, 3).astype(dtype) * 3
    stored = values.astype(np.dtype(dtype).newbyteorder(">")).view(np.dtype(dtype))
    assert np.array_equal(copied(stored, dtype, swap=True), values)
    assert not np.array_equal(copied(stored, dtype), values)


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.int2])
def test_padding_bits_of_small_integers_count_nothing(dtype):
    info = ml_dtypes.iinfo(dtype)
    values = np.arange(info.min, info.max + 1).astype(dtype)
    padded = (values.view(np.uint8) | np.uint8(0xFF ^ LOW_BITS[np.dtype(dtype)])).view(dtype)
    assert np.array_equal(copied(padded, dtype), values)
    assert not as_stored(np.dtype(dtype))


def test_a_bool_is_0_or_1():
    assert copied(np.array([0, 1], np.uint8).view(bool), bool).tolist() == [False, True]
    with pytest.raises(CorruptCheckpointError, match="2"):
        copied(np.array([0, 2], np.uint8).view(bool), bool)
    assert as_stored(np.dtype("float32")) and not as_stored(np.dtype(bool))
