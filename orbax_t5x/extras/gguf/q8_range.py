"""Arrays in GGML's quantization Q8_0, read by box as float32.

The last dimension is cut into blocks of 32 elements, each a float16 scale and 32 int8. A box is read in whole blocks; a
slab of the array at a time, so that the blocks of a large box never are in memory together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from orbax_t5x.lazy.box import Box, box_shape, box_size
from orbax_t5x.lazy.leaf import Request
from orbax_t5x.readers.ranges.byte_range import ByteRange, ReadOutcome, StoredRange

BLOCK_ELEMENTS = 32
_SCALE_BYTES = 2
_BLOCK = np.dtype(f"V{_SCALE_BYTES + BLOCK_ELEMENTS}")
# Of blocks in memory at a time; as float32 they take four times as much.
_SLAB_BYTES = 2 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Q8Range(StoredRange):
    """A row-major array of blocks.

    Readers have proven that the last dimension is a multiple of 32.
    """

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // BLOCK_ELEMENTS * _BLOCK.itemsize

    def bytes_of(self, boxes: tuple[Box, ...]) -> int:
        return self._blocks().bytes_of(tuple([_in_blocks(box) for box in boxes if box_size(box)]))

    def read(self, requests: Sequence[Request], *, checksum: bool, leaf: str) -> ReadOutcome:
        for box, out in requests:
            if box_shape(box) != out.shape or out.dtype != self.dtype:
                raise ValueError(f"{leaf}: a buffer of {out.dtype} {out.shape} for {box} of {self.dtype}")
        stored = self._blocks()
        wanted = gaps = 0
        for some in _slabs(stored.shape, [request for request in requests if request.out.size]):
            boxes = [_in_blocks(box) for box, _ in some]
            blocks = [Request(box, np.empty(box_shape(box), _BLOCK)) for box in boxes]
            outcome = stored.read(blocks, checksum=False, leaf=leaf)
            wanted, gaps = wanted + outcome.wanted, gaps + outcome.gaps
            for request, block in zip(some, blocks, strict=True):
                _dequantize(block.out, request)
        return ReadOutcome([], wanted, gaps)

    def sum(self, ranges: Iterable[tuple[int, int]], *, leaf: str) -> ReadOutcome:
        return self._blocks().sum(ranges, leaf=leaf)

    def _blocks(self) -> ByteRange:
        return ByteRange(self.file, self.offset, (*self.shape[:-1], self.shape[-1] // BLOCK_ELEMENTS), _BLOCK)


def _in_blocks(box: Box) -> Box:
    """Returns the box of blocks that hold a box of elements."""
    low, high = box[-1]
    return (*box[:-1], (low // BLOCK_ELEMENTS, -(-high // BLOCK_ELEMENTS)))


def _slabs(shape: tuple[int, ...], requests: Sequence[Request]) -> Iterator[list[Request]]:
    """Yields the requests cut along the longest dimension.

    It is that of the array of blocks; no slab takes too much.
    """
    size = sum([box_size(_in_blocks(box)) for box, _ in requests]) * _BLOCK.itemsize
    if size <= _SLAB_BYTES:
        if requests:
            yield list(requests)
        return
    axis = int(np.argmax(shape))
    unit = BLOCK_ELEMENTS if axis == len(shape) - 1 else 1
    step = max(1, shape[axis] * _SLAB_BYTES // size)
    for start in range(0, shape[axis], step):
        if some := [part for one in requests if (part := _cut_request(one, axis, start * unit, (start + step) * unit))]:
            yield some


def _cut_request(request: Request, axis: int, low: int, high: int) -> Request | None:
    """Cuts a request to a range, or returns None."""
    box, out = request
    first, last = max(box[axis][0], low), min(box[axis][1], high)
    if first >= last:
        return None
    index = (*[slice(None)] * axis, slice(first - box[axis][0], last - box[axis][0]))
    return Request((*box[:axis], (first, last), *box[axis + 1 :]), out[index])


def _dequantize(blocks: np.ndarray, request: Request) -> None:
    """Fills a buffer with the elements of its blocks."""
    box, out = request
    stored = blocks.view(np.uint8).reshape(*blocks.shape, _BLOCK.itemsize)
    scales = np.ascontiguousarray(stored[..., :_SCALE_BYTES]).view("<f2").astype(np.float32)
    with np.errstate(all="ignore"):  # a scale may be no number
        values = stored[..., _SCALE_BYTES:].view(np.int8) * scales
    start = box[-1][0] % BLOCK_ELEMENTS
    out[...] = values.reshape(*blocks.shape[:-1], -1)[..., start : start + out.shape[-1]]
