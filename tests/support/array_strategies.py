"""Dtypes, arrays of random bits, guarded buffers, and Hypothesis strategies of boxes."""

from collections.abc import Sequence

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from orbax_t5x.lazy import Box
from orbax_t5x.readers.ranges.elements import LOW_BITS

# Those of the newest version of ml_dtypes, as far as this one has them.
_ALL_ML_DTYPES = (
    "bfloat16 float4_e2m1fn float6_e2m3fn float6_e3m2fn float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn "
    "float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu int1 int2 int4 uint1 uint2 uint4"
)
ML_DTYPES = [name for name in _ALL_ML_DTYPES.split() if hasattr(ml_dtypes, name)]
NUMPY_DTYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128".split()
)
DTYPES = [np.dtype(getattr(ml_dtypes, name)) for name in ML_DTYPES] + [np.dtype(name) for name in NUMPY_DTYPES]


class GuardedBuffer:
    """An array of any strides inside a larger one whose other bytes must not change."""

    def __init__(self, draw, shape: Sequence[int], dtype: np.dtype):
        order = draw(st.permutations(range(len(shape))))
        steps = draw(st.lists(st.sampled_from([1, 1, -1, 2, -2]), min_size=len(shape), max_size=len(shape)))
        whole = np.empty(tuple(shape[axis] * abs(steps[axis]) + 2 for axis in order), dtype)
        self._bytes = whole.reshape(-1).view(np.uint8)
        self._bytes[...] = 0xA5
        index = tuple(slice(1, 1 + shape[axis] * abs(steps[axis]), abs(steps[axis])) for axis in order)
        flips = tuple(slice(None, None, 1 if steps[axis] > 0 else -1) for axis in order)
        self.array = whole[index][flips].transpose(np.argsort(order)) if len(shape) else whole[...]
        self._inside = np.zeros(whole.shape, bool)
        self._inside[index] = True

    def guards_hold(self) -> bool:
        outside = np.repeat(~self._inside.reshape(-1), self.array.dtype.itemsize)
        return bool((self._bytes[outside] == 0xA5).all())


@st.composite
def boxes(draw, shape: Sequence[int]) -> Box:
    box = []
    for size in shape:
        first = draw(st.integers(0, size))
        box.append((first, draw(st.integers(first, size))) if draw(st.booleans()) else (0, size))
    return tuple(box)


def random_bits(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Every bit pattern that the dtype stores, at random."""
    if dtype.kind == "b":
        return np.random.default_rng(1).integers(0, 2, shape).astype(bool)
    bits = np.random.default_rng(1).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    bits &= LOW_BITS.get(dtype, 0xFF)
    return bits.reshape(-1).view(dtype).reshape(shape)
