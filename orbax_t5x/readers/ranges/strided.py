"""An array at any strides in a byte range, read by box.

It is transposed, repeated, or a slice of a larger array. Its dimensions in the order of their strides are the
dimensions of a row-major array, of which it is a box; a request is one to that array, with its buffer's dimensions in
that order. Where a stride is no multiple of the next one (every second column of an odd number), there is such an array
for each index of the dimensions before.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from orbax_t5x.files.crc import Crc
from orbax_t5x.lazy.box import Box, box_shape, union_size
from orbax_t5x.lazy.leaf import Request
from orbax_t5x.lazy.read_stats import ChecksummedRange
from orbax_t5x.readers.ranges.byte_range import ByteRange, ReadOutcome
from orbax_t5x.readers.ranges.extents import StoredBytes


def last_element(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Returns the last element's position from the first element."""
    return sum([(size - 1) * stride for size, stride in zip(shape, strides, strict=True)])


def has_overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Tests if indices share elements, repeats by stride 0 aside."""
    reached = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride:
            if stride <= reached:
                return True
            reached += (size - 1) * stride
    return False


class StridedRange:
    """Strided array with element 0 at `offset` of a file.

    The reader has proven that its elements are inside.

    Attributes:
      file: that holds it.
      shape, dtype: of the array.
    """

    def __init__(
        self,
        file: StoredBytes,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: np.dtype,
        *,
        swap: bool,
        kind: Crc,
    ):
        """Finds the row-major array."""
        self.file = file
        self.shape = shape
        self.dtype = dtype
        self._offset, self._swap, self._kind = offset, swap, kind
        self._strides = strides
        axes = [axis for axis, size in enumerate(shape) if size > 1 and strides[axis]]
        axes.sort(key=lambda axis: -strides[axis])
        first = max(0, len(axes) - 1)
        while first and strides[axes[first - 1]] % strides[axes[first]] == 0:
            first -= 1
        self._outer, self._inner = axes[:first], axes[first:]
        steps = [strides[axis] for axis in self._inner] or [1]
        self._base = (
            *(shape[axis] for axis in self._inner[:1]),
            *(before // after for before, after in itertools.pairwise(steps)),
            steps[-1],
        )
        self._order = [sorted(self._inner).index(axis) for axis in self._inner]

    def bytes_of(self, boxes: tuple[Box, ...]) -> int:
        """Counts the bytes of boxes, each element as often as stored."""
        axes = self._outer + self._inner
        stored = {tuple(box[axis] for axis in axes) for box in boxes if 0 not in box_shape(box)}
        return union_size(tuple(stored)) * self.dtype.itemsize

    def read(self, requests: Sequence[Request], *, checksum: bool, leaf: str) -> ReadOutcome:
        """Fills all requests."""
        for box, out in requests:
            if box_shape(box) != out.shape or out.dtype != self.dtype:
                raise ValueError(
                    f"{leaf}: a buffer of {out.dtype} {out.shape} for {box} of an array of {self.dtype} {self.shape}"
                )
        wanted = [request for request in requests if request.out.size]
        ranges: list[ChecksummedRange] = []
        sizes = [0, 0]
        for index, inner in self._by_outer_index(wanted):
            at = sum([i * self._strides[axis] for i, axis in zip(index, self._outer, strict=True)])
            offset = self._offset + at * self.dtype.itemsize
            stored = ByteRange(self.file, offset, self._base, self.dtype, self._swap, self._kind)
            outcome = stored.read(inner, checksum=checksum and not self._outer, leaf=leaf)
            ranges += [one._replace(start=one.start + offset, stop=one.stop + offset) for one in outcome.ranges]
            sizes = [sizes[0] + outcome.wanted, sizes[1] + outcome.gaps]
        for _, out in wanted:
            self._repeat(out)
        return ReadOutcome(ranges, sizes[0], sizes[1])

    def _by_outer_index(self, requests: Sequence[Request]) -> Iterator[tuple[tuple[int, ...], list[Request]]]:
        """Yields each wanted outer index with requests below it."""
        if not requests:
            return
        sides = [[request.box[axis] for request in requests] for axis in self._outer]
        spans = [range(min(low for low, _ in side), max(high for _, high in side)) for side in sides]
        for index in itertools.product(*spans):
            inner = [
                self._inner_request(request, index)
                for request in requests
                if all(
                    request.box[axis][0] <= i < request.box[axis][1] for i, axis in zip(index, self._outer, strict=True)
                )
            ]
            if inner:
                yield index, inner

    def _inner_request(self, request: Request, index: tuple[int, ...]) -> Request:
        box, out = request
        places = dict(zip(self._outer, index, strict=True))
        at = [
            slice(None) if axis in self._inner else places[axis] - box[axis][0] if axis in places else 0
            for axis in range(out.ndim)
        ]
        buffer = out[(*at, ...)].transpose(self._order)[..., None]
        return Request((*(box[axis] for axis in self._inner), (0, 1)), buffer)

    def _repeat(self, out: np.ndarray) -> None:
        """Copies read elements along the dimensions of stride 0."""
        read = set(self._outer + self._inner)
        first = tuple(slice(None) if axis in read else slice(1) for axis in range(out.ndim))
        if out[first].size < out.size:
            out[...] = out[first]

    def __repr__(self) -> str:
        return f"<StridedRange {self.dtype} {self.shape} at strides {self._strides}>"


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a row-major array, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
