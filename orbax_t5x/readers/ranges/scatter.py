"""Copies from a window of stored bytes to buffers of boxes.

The elements are NumPy's. Most elements are in memory as they are in the file. Three kinds are not: those of the other
byte order, those of fewer than eight bits (stored one to a byte, with bits above them that mean nothing), and bools, of
which a byte other than 0 and 1 makes no value at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import ml_dtypes
import numpy as np

from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.files.memory import strided
from orbax_t5x.lazy.leaf import Request

if TYPE_CHECKING:
    from orbax_t5x.readers.ranges.byte_runs import Window

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


class _ScatterTarget(NamedTuple):
    """A request: outer ranges, cut range and inner slices.

    Windows cut the middle range. Of several requests together, `out` has one dimension more: an inner one is split in
    their number and their width.
    """

    outer: tuple[tuple[int, int], ...]
    low: int
    high: int
    inner: tuple[slice, ...]
    out: np.ndarray


class Scatter:
    """Thread-safe copier from windows of an array to buffers."""

    def __init__(self, shape: tuple[int, ...], depth: int, requests: Sequence[Request], elements: Elements):
        self._elements = elements
        self._inner_shape = (shape or (1,))[depth + 1 :]
        targets: list[_ScatterTarget] = []
        for request in requests:
            box, out = request if request.box else (((0, 1),), request.out.reshape(1))
            inner = tuple(slice(low, high) for low, high in box[depth + 1 :])
            targets.append(_ScatterTarget(box[:depth], *box[depth], inner, out))
        self._targets = [
            joined for _, alike in itertools.groupby(targets, _layout) for joined in _join_neighbours(list(alike))
        ]
        self._outs = [request.out for request in requests]  # a joined target refers to the memory of the first only

    def window(self, window: Window, data: np.ndarray) -> int:
        """Copies a window's requested elements; returns their number."""
        stored = data.view(self._elements.dtype).reshape(window.high - window.low, *self._inner_shape)
        filled = 0
        for outer, low, high, inner, out in self._targets:
            first, last = max(low, window.low), min(high, window.high)
            if first >= last or not all(a <= at < b for at, (a, b) in zip(window.outer, outer, strict=True)):
                continue
            values = stored[(slice(first - window.low, last - window.low), *inner)]
            index = tuple(at - a for at, (a, _) in zip(window.outer, outer, strict=True))
            part = out[(*index, slice(first - low, last - low))]
            self._elements.copy(values.reshape(part.shape), part)
            filled += values.size
        return filled


def _layout(target: _ScatterTarget) -> tuple[object, ...]:
    return target.outer, target.low, target.high, target.out.shape, target.out.strides


def _join_neighbours(alike: list[_ScatterTarget]) -> list[_ScatterTarget]:
    """Joins neighbouring targets with equally distant buffers."""
    first = alike[0]
    rank = len(first.inner)
    axes = [axis for axis in range(rank) if any(target.inner[axis] != first.inner[axis] for target in alike)]
    if len(axes) != 1:
        return alike
    (axis,) = axes
    slices = [target.inner[axis] for target in alike]
    addresses = [target.out.__array_interface__["data"][0] for target in alike]
    distance = addresses[1] - addresses[0]
    if any(before.stop != after.start for before, after in itertools.pairwise(slices)):
        return alike
    if any(after - before != distance for before, after in itertools.pairwise(addresses)):
        return alike
    at = first.out.ndim - rank + axis
    shape, strides = list(first.out.shape), list(first.out.strides)
    shape.insert(at, len(alike))
    strides.insert(at, distance)
    inner = (*first.inner[:axis], slice(slices[0].start, slices[-1].stop), *first.inner[axis + 1 :])
    return [first._replace(inner=inner, out=strided(first.out, shape, strides))]
