"""Elements of arrays as files store them.

The elements are NumPy's. Most elements are in memory as they are in the file. Three kinds are not: those of the other
byte order, those of fewer than eight bits (stored one to a byte, with bits above them that mean nothing), and bools, of
which a byte other than 0 and 1 makes no value at all.
"""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np

from orbax_t5x.errors import CorruptCheckpointError

# Values are stored one to a byte; the bits above theirs are padding.
LOW_BITS = {
    np.dtype(ml_dtypes.int4): 0x0F,
    np.dtype(ml_dtypes.uint4): 0x0F,
    np.dtype(ml_dtypes.float4_e2m1fn): 0x0F,
    np.dtype(ml_dtypes.int2): 0x03,
    np.dtype(ml_dtypes.uint2): 0x03,
}
_BOOL = np.dtype(np.bool_)


def as_stored(dtype: np.dtype) -> bool:
    """Tests if any bytes are valid elements of this dtype."""
    return dtype != _BOOL and dtype not in LOW_BITS


class Elements(NamedTuple):
    """Storage format of elements, with their leaf for errors."""

    dtype: np.dtype
    swap: bool
    path: str
    leaf: str

    def copy(self, values: np.ndarray, out: np.ndarray) -> None:
        """Copies stored elements into a buffer."""
        if self.swap:
            out[...] = _swapped(values)
        elif self.dtype == _BOOL:
            largest = int(values.view(np.uint8).max())
            if largest > 1:
                raise CorruptCheckpointError(f"a bool is stored as {largest}", path=self.path, leaf=self.leaf)
            out[...] = values
        elif self.dtype in LOW_BITS:
            out[...] = (values.view(np.uint8) & np.uint8(LOW_BITS[self.dtype])).view(self.dtype)
        else:
            out[...] = values


def _swapped(values: np.ndarray) -> np.ndarray:
    """Swaps the bytes of each number."""
    dtype = values.dtype
    width = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    contiguous = np.ascontiguousarray(values)
    return contiguous.view(np.dtype(f"u{width}")).byteswap().view(dtype).reshape(values.shape)
