"""The nodes that pick and order elements: a leaf, and a walk over dimensions (slice, transpose, new axis, repeat).

A walk is one node however many of these are composed. It writes straight into the buffer: transposed and negative steps
as views of it, a repeat by copying after the read. Steps beyond 1 read their covering box into memory of their own
where the rows between are small, and row by row where they are not, so that never more than `GAP_BYTES` at a time is
read for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from orbax_t5x.lazy import geometry as _geometry
from orbax_t5x.lazy.box import Box, box_shape, box_size
from orbax_t5x.lazy.geometry import Walk, compose
from orbax_t5x.lazy.leaf import Leaf, Request
from orbax_t5x.lazy.view import Lowered, View, freeze

# NumPy sets the source of a copy within one array aside unless it sees that the two do not overlap; so copies along a
# repeat are made in blocks of this size. Larger: more memory. Smaller: more calls, about a microsecond each.
_COPY_BYTES = 256 << 10

_ALL = slice(None)
_FLIP = slice(None, None, -1)


class LeafView(View):
    """A whole leaf."""

    __slots__ = ("leaf",)

    leaf: Leaf

    def __init__(self, leaf: Leaf):
        super().__init__(tuple(leaf.shape), np.dtype(leaf.dtype))
        freeze(self, "leaf", leaf)

    @property
    def value(self) -> Any:
        """The constant as it was given where the leaf is one, else what reading gives."""
        return getattr(self.leaf, "value", None) if self.is_value else self.get()

    def leaves(self) -> tuple[Leaf, ...]:
        """The leaf."""
        return (self.leaf,)

    def _add_leaves(self, found: dict[int, Leaf]) -> None:
        found.setdefault(id(self.leaf), self.leaf)

    def _describe(self) -> str:
        return ""

    def _requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        found.append((self.leaf, box))

    def _temp_bytes(self, box: Box, contiguous_dims: int) -> int:
        return 0

    def _lower(self, box: Box, out: np.ndarray, lowered: Lowered) -> None:
        lowered.reads.append((self.leaf, Request(box, out)))


class _Cut(NamedTuple):
    """A box of a walk as a box of its input.

    Attributes:
      box: of the input.
      at: cuts the output down to one element along repeats, and turns negative steps round.
      strides: the index of the wanted elements within the covering box, or None where the box is exact.
    """

    box: Box
    at: tuple[Any, ...]
    strides: tuple[slice, ...] | None


class Strided(View):
    """A walk over the dimensions of the input: any composition of slices, transposes, new axes and repeats.

    Make it with `strided`, which simplifies first.
    """

    __slots__ = ("_far", "_repeats", "walk")

    walk: Walk
    _repeats: tuple[int, ...]
    _far: bool

    def __init__(self, source: View, walk: Walk):
        super().__init__(walk.shape, source.dtype, (source,))
        freeze(self, "walk", walk)
        freeze(self, "_repeats", tuple([axis for axis, (dim, _) in enumerate(walk.maps) if dim < 0]))
        freeze(self, "_far", any([step > 1 or step < -1 for _, step in walk.maps]))

    @property
    def only_reshapes(self) -> bool:
        """Whether all it does is to add and drop dimensions of size 1."""
        source, walk = self.inputs[0], self.walk
        left = [(dim, size) for (dim, step), size in zip(walk.maps, walk.shape, strict=True) if size != 1 and step == 1]
        return left == [(dim, size) for dim, size in enumerate(source.shape) if size != 1] and source.size == self.size

    def _describe(self) -> str:
        if self.only_reshapes:
            return f"reshape {self.shape}"
        start, maps, shape = self.walk
        axis_of = {dim: axis for axis, (dim, _) in enumerate(maps) if dim >= 0}
        cuts = [str(first) for first in start]
        for dim, axis in axis_of.items():
            cuts[dim] = _cut_text(start[dim], maps[axis][1], shape[axis], self.inputs[0].shape[dim])
        texts = []
        # A dimension of size 1 that is dropped is no choice among elements.
        if any(cut != ":" and size != 1 for cut, size in zip(cuts, self.inputs[0].shape, strict=True)):
            texts.append(f"[{', '.join(cuts)}]")
        order = sorted(axis_of)
        if order != list(axis_of):
            texts.append(f"transpose {tuple(order.index(dim) for dim in axis_of)}")
        texts += [f"repeat {shape[axis]} on axis {axis}" for axis in self._repeats if shape[axis] != 1]
        if not texts or any(shape[axis] == 1 for axis in self._repeats):
            texts.append(f"reshape {shape}")
        return ", ".join(texts)

    def _cut(self, box: Box) -> _Cut:
        """The input's box for an output box none of whose dimensions has to be read row by row."""
        start, maps, _ = self.walk
        inner = [(first, first + 1) for first in start]
        strides: dict[int, slice] = {}
        at: list[Any] = []
        for (first, last), (dim, step) in zip(box, maps, strict=True):
            if dim < 0:
                at.append(0)
            elif step == 1 or last - first == 1:
                begin = start[dim] + step * first
                inner[dim] = (begin, begin + last - first)
                at.append(_ALL)
            else:
                begin, end = start[dim] + step * first, start[dim] + step * (last - 1)
                inner[dim] = (begin, end + 1) if step > 0 else (end, begin + 1)
                at.append(_ALL if step > 0 else _FLIP)
                if not -2 < step < 2:
                    strides[dim] = slice(None, None, abs(step))
        # The ellipsis keeps what has no dimension left an array that can be written to.
        at.append(Ellipsis)
        every = tuple([strides.get(dim, _ALL) for dim in range(len(start))]) if strides else None
        return _Cut(tuple(inner), tuple(at), every)

    def _row_axis(self, box: Box) -> int:
        """The output axis to read index by index because the rows between its steps are large, or -1."""
        if not self._far:
            return -1
        sizes = [1] * len(self.walk.start)
        for (first, last), (dim, step) in zip(box, self.walk.maps, strict=True):
            if dim >= 0:
                sizes[dim] = abs(step) * (last - first - 1) + 1
        found = (len(sizes), -1)
        for axis, ((first, last), (dim, step)) in enumerate(zip(box, self.walk.maps, strict=True)):
            if dim >= 0 and abs(step) > 1 and last - first > 1:
                row_bytes = math.prod(sizes[dim + 1 :]) * self._dtype.itemsize
                if (abs(step) - 1) * row_bytes >= _geometry.GAP_BYTES:
                    found = min(found, (dim, axis))
        return found[1]

    def _requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        axis = self._row_axis(box)
        if axis < 0:
            self.inputs[0]._requests(self._cut(box).box, found)
            return
        for row in _rows(box, axis):
            self._requests(row, found)

    def _temp_bytes(self, box: Box, contiguous_dims: int) -> int:
        copying = _copy_bytes(box, self._repeats, self._dtype.itemsize) if self._repeats else 0
        return copying + self._read_temp_bytes(box, contiguous_dims)

    def _read_temp_bytes(self, box: Box, contiguous_dims: int) -> int:
        """What reading takes, without the copies along repeats."""
        axis = self._row_axis(box)
        if axis >= 0:
            return sum(self._read_temp_bytes(row, 0) for row in _rows(box, axis))
        cut = self._cut(box)
        if cut.strides is None:
            return self.inputs[0]._temp_bytes(cut.box, self._contiguous_inside(contiguous_dims))
        return box_size(cut.box) * self._dtype.itemsize + self.inputs[0]._temp_bytes(cut.box, len(cut.box))

    def _contiguous_inside(self, contiguous_dims: int) -> int:
        """How many of the input's last dimensions lie in C order in a buffer of which `contiguous_dims` do."""
        count = 0
        for axis in reversed(range(len(self.walk.maps))):
            dim, step = self.walk.maps[axis]
            outside = len(self.walk.maps) - axis
            inside = len(self.walk.start) - dim
            if outside > contiguous_dims or step != 1 or inside != outside:
                break
            count = inside
        return count

    def _lower(self, box: Box, out: np.ndarray, lowered: Lowered) -> None:
        first = out
        if self._repeats:
            first = out[(*(slice(0, 1) if dim < 0 else slice(None) for dim, _ in self.walk.maps), Ellipsis)]
        self._lower_rows(box, first, lowered)
        for axis in self._repeats:
            if out.shape[axis] > 1:
                later = tuple(slice(0, 1) if a > axis and a in self._repeats else slice(None) for a in range(out.ndim))
                lowered.finish.append(partial(_copy_along, out[later], axis))

    def _lower_rows(self, box: Box, first: np.ndarray, lowered: Lowered) -> None:
        """Reads a box into a buffer that holds index 0 of every repeat."""
        axis = self._row_axis(box)
        if axis < 0:
            self._lower_cut(self._cut(box), first, lowered)
            return
        for position, row in enumerate(_rows(box, axis)):
            part = first[(*(slice(None),) * axis, slice(position, position + 1))]
            self._lower_rows(row, part, lowered)

    def _as_input(self, walked: np.ndarray) -> np.ndarray:
        """A buffer of the walked dimensions as one of the input's: reordered, with an axis for each that stays put."""
        dims = [dim for dim, _ in self.walk.maps if dim >= 0]
        axes = sorted(range(len(dims)), key=dims.__getitem__)
        if axes != list(range(len(dims))):
            walked = walked.transpose(axes)
        if len(dims) < len(self.walk.start):
            walked = walked[(*(slice(None) if dim in dims else None for dim in range(len(self.walk.start))), Ellipsis)]
        return walked

    def _lower_cut(self, cut: _Cut, first: np.ndarray, lowered: Lowered) -> None:
        source = self.inputs[0]
        into = self._as_input(first[cut.at])
        if cut.strides is None:
            source._lower(cut.box, into, lowered)
            return
        temp = np.empty(box_shape(cut.box), self._dtype)
        source._lower(cut.box, temp, lowered)
        lowered.finish.append(partial(np.copyto, into, temp[(*cut.strides, Ellipsis)]))


def strided(source: View, walk: Walk) -> View:
    """A walk over a view, simplified: no walk over a walk, no identity, no inputs that are left out."""
    if isinstance(source, Strided):
        source, walk = source.inputs[0], compose(source.walk, walk)
    start, maps, shape = walk
    if 1 in shape:
        pairs = zip(maps, shape, strict=True)
        maps = tuple([(dim, 1) if dim >= 0 and size == 1 else (dim, step) for (dim, step), size in pairs])
        walk = Walk(start, maps, shape)
    if shape == source.shape and maps == _in_order(len(shape)) and not any(start):
        return source
    if 0 in shape:
        return Strided(source, walk)
    simpler = source._select(walk)
    return Strided(source, walk) if simpler is None else simpler


@cache
def _in_order(rank: int) -> tuple[tuple[int, int], ...]:
    return tuple((dim, 1) for dim in range(rank))


def _cut_text(start: int, step: int, size: int, full: int) -> str:
    """A slice as one writes it."""
    if step == 1:
        return ":" if size == full else f"{start}:{start + size}"
    last = start + step * (size - 1)
    stop = "" if step < 0 and last == 0 else last + (1 if step > 0 else -1)
    return f"{start}:{stop}:{step}"


def _rows(box: Box, axis: int) -> list[Box]:
    first, last = box[axis]
    return [(*box[:axis], (i, i + 1), *box[axis + 1 :]) for i in range(first, last)]


def _block(sizes: Sequence[int], axis: int, itemsize: int) -> tuple[int, int, int]:
    """How a copy along an axis is cut: (axis of the cuts, indices per block, bytes of a block)."""
    cut = max((a for a in range(len(sizes)) if a != axis), key=sizes.__getitem__, default=-1)
    row = math.prod(sizes) // sizes[axis] * itemsize
    if cut < 0:
        return cut, 1, row
    row //= sizes[cut]
    count = min(max(1, _COPY_BYTES // row), sizes[cut])
    return cut, count, count * row


def _copy_bytes(box: Box, repeats: tuple[int, ...], itemsize: int) -> int:
    """What `_copy_along` takes at most for a box."""
    sizes = [last - first for first, last in box]
    found = 0
    for axis in repeats:
        if sizes[axis] > 1:
            part = [1 if a > axis and a in repeats else size for a, size in enumerate(sizes)]
            found = max(found, _block(part, axis, itemsize)[2])
    return found


def _copy_along(out: np.ndarray, axis: int) -> None:
    """Copies index 0 of an axis to the rest of it."""
    cut, count, _ = _block(out.shape, axis, out.itemsize)
    before = (slice(None),) * axis
    for begin in range(0, out.shape[cut] if cut >= 0 else 1, count):
        block = out[(*(slice(None),) * cut, slice(begin, begin + count))] if cut >= 0 else out
        for index in range(1, out.shape[axis]):
            np.copyto(block[(*before, slice(index, index + 1))], block[(*before, slice(0, 1))])
