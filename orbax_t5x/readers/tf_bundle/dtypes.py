"""TensorFlow's numbers for dtypes, as a bundle's index has them."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from orbax_t5x.errors import UnsupportedCheckpointError

# TensorFlow's DataType. Those with an `ml_dtypes` name take one byte per element below 8 bits, too.
_DTYPES: dict[int, np.dtype] = {
    number: np.dtype(kind)
    for number, kind in {
        1: np.float32,
        2: np.float64,
        3: np.int32,
        4: np.uint8,
        5: np.int16,
        6: np.int8,
        8: np.complex64,
        9: np.int64,
        10: np.bool_,
        14: ml_dtypes.bfloat16,
        17: np.uint16,
        18: np.complex128,
        19: np.float16,
        22: np.uint32,
        23: np.uint64,
        24: ml_dtypes.float8_e5m2,
        25: ml_dtypes.float8_e4m3fn,
        26: ml_dtypes.float8_e4m3fnuz,
        27: ml_dtypes.float8_e4m3b11fnuz,
        28: ml_dtypes.float8_e5m2fnuz,
        29: ml_dtypes.int4,
        30: ml_dtypes.uint4,
        31: ml_dtypes.int2,
        32: ml_dtypes.uint2,
        33: ml_dtypes.float4_e2m1fn,
    }.items()
}
STRING = 7
_OBJECT = np.dtype(object)
# Quantised types mean nothing without the ranges that are stored elsewhere; the others are no arrays.
_UNSUPPORTED = {
    0: "no dtype",
    11: "qint8",
    12: "quint8",
    13: "qint32",
    15: "qint16",
    16: "quint16",
    20: "a resource handle",
    21: "a variant",
}
_FIRST_REFERENCE_TYPE = 101


def dtype_of(number: int, *, path: str, leaf: str) -> np.dtype:
    """Returns the NumPy dtype, object for strings."""
    if number == STRING:
        return _OBJECT
    dtype = _DTYPES.get(number)
    if dtype is None:
        fallback = "unknown" if number < _FIRST_REFERENCE_TYPE else "a reference type"
        kind = _UNSUPPORTED.get(number, fallback)
        raise UnsupportedCheckpointError(f"TensorFlow's dtype {number} ({kind}) is not read", path=path, leaf=leaf)
    return dtype
