"""Nodes that place inputs side by side: stack, concatenate, pad.

Each writes straight into the buffer, and reads only the boxes of its inputs that overlap a box.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools

import numpy as np

from orbax_t5x.lazy.box import Box, IndexMap, basic_index, slices_within
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.lazy.node import Lowering, Node
from orbax_t5x.lazy.strided import strided


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class StackNode(Node):
    """Inputs of one shape and dtype on a new axis; see `stacked`."""

    axis: int

    def describe_step(self) -> str:
        return f"stack of {len(self.inputs)} on axis {self.axis}"

    def select(self, index_map: IndexMap) -> Node | None:
        axis, count = self.axis, len(self.inputs)
        start, maps, shape = index_map
        position = _output_of(index_map, axis)
        if position is None:
            rest = tuple((dim - (dim > axis), step) for dim, step in maps)
            return strided(self.inputs[start[axis]], IndexMap((*start[:axis], *start[axis + 1 :]), rest, shape))
        step, extent = maps[position][1], shape[position]
        if (start[axis], step, extent) == (0, 1, count):
            return None
        picked = tuple(self.inputs[start[axis] + step * i] for i in range(extent))
        return strided(stacked(picked, axis), _whole_dimension(index_map, axis, position))

    def add_requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        first, last = box[self.axis]
        inner = (*box[: self.axis], *box[self.axis + 1 :])
        for node in self.inputs[first:last]:
            node.add_requests(inner, found)

    def add_work(self, box: Box, out: np.ndarray, lowered: Lowering) -> None:
        first, last = box[self.axis]
        inner = (*box[: self.axis], *box[self.axis + 1 :])
        before = (slice(None),) * self.axis
        for position, node in enumerate(self.inputs[first:last]):
            # The ellipsis keeps a rank-0 piece an array.
            node.add_work(inner, out[(*before, position, Ellipsis)], lowered)


def stacked(inputs: tuple[Node, ...], axis: int) -> StackNode:
    """Stacks inputs on a new axis."""
    shape = inputs[0].shape
    return StackNode((*shape[:axis], len(inputs), *shape[axis:]), inputs[0].dtype, inputs, axis)


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class ConcatNode(Node):
    """Inputs of one dtype in order along an axis; see `concatenated`."""

    axis: int
    # Where each input ends along the axis.
    _ends: tuple[int, ...]

    def describe_step(self) -> str:
        return f"concatenation of {len(self.inputs)} on axis {self.axis}"

    def _touched(self, first: int, last: int) -> list[tuple[Node, int, int, int]]:
        """Returns the inputs that overlap a range along the axis."""
        touched: list[tuple[Node, int, int, int]] = []
        for i in range(bisect.bisect_right(self._ends, first), len(self.inputs)):
            base = self._ends[i - 1] if i else 0
            if base >= last:
                break
            begin, end = max(first, base), min(last, self._ends[i])
            if begin < end:
                touched.append((self.inputs[i], begin - base, end - base, begin - first))
        return touched

    def select(self, index_map: IndexMap) -> Node | None:
        axis = self.axis
        position = _output_of(index_map, axis)
        first = index_map.start[axis]
        if position is None:
            node, at, _, _ = self._touched(first, first + 1)[0]
            return strided(node, index_map._replace(start=_with_start(index_map, axis, at)))
        step, extent = index_map.maps[position][1], index_map.shape[position]
        if (first, step, extent) == (0, 1, self.shape[axis]):
            return None
        parts: list[Node] = []
        wanted = range(first, first + step * extent, step)
        for i, node in enumerate(self.inputs):
            base = self._ends[i] - node.shape[axis]
            inside = _members_between(wanted, base, self._ends[i])
            if inside:
                stop = inside[-1] - base + step
                part = slice(inside[0] - base, None if stop < 0 else stop, step)
                parts.append(strided(node, basic_index((*(slice(None),) * axis, part), node.shape)))
        if step < 0:
            parts.reverse()
        joined = parts[0] if len(parts) == 1 else concatenated(tuple(parts), axis)
        return strided(joined, _whole_dimension(index_map, axis, position))

    def add_requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        before, after = box[: self.axis], box[self.axis + 1 :]
        for node, first, last, _ in self._touched(*box[self.axis]):
            node.add_requests((*before, (first, last), *after), found)

    def add_work(self, box: Box, out: np.ndarray, lowered: Lowering) -> None:
        before, after = box[: self.axis], box[self.axis + 1 :]
        index = (slice(None),) * self.axis
        for node, first, last, position in self._touched(*box[self.axis]):
            part = out[(*index, slice(position, position + last - first))]
            node.add_work((*before, (first, last), *after), part, lowered)


def concatenated(inputs: tuple[Node, ...], axis: int) -> ConcatNode:
    """Concatenates inputs along an axis."""
    ends = tuple(itertools.accumulate(node.shape[axis] for node in inputs))
    shape = inputs[0].shape
    return ConcatNode((*shape[:axis], ends[-1], *shape[axis + 1 :]), inputs[0].dtype, inputs, axis, ends)


def _output_of(index_map: IndexMap, axis: int) -> int | None:
    """Returns the output dimension of an input dimension, or None."""
    return next((position for position, (dim, _) in enumerate(index_map.maps) if dim == axis), None)


def _with_start(index_map: IndexMap, axis: int, start: int) -> tuple[int, ...]:
    return (*index_map.start[:axis], start, *index_map.start[axis + 1 :])


def _whole_dimension(index_map: IndexMap, axis: int, position: int) -> IndexMap:
    maps = (*index_map.maps[:position], (axis, 1), *index_map.maps[position + 1 :])
    return index_map._replace(start=_with_start(index_map, axis, 0), maps=maps)


def _members_between(wanted: range, low: int, high: int) -> range:
    """Returns the members of an arithmetic sequence in [low, high)."""
    start, step = wanted.start, wanted.step
    if step > 0:
        first, last = -(-(low - start) // step), -(-(high - start) // step)
    else:
        first, last = -(-(start - high + 1) // -step), (start - low) // -step + 1
    return wanted[max(first, 0) : max(last, 0)]


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class PadNode(Node):
    """An input at the origin of a larger input."""

    filling: str

    @property
    def filler(self) -> Node:
        """The array of the result's shape that gives the new elements."""
        return self.inputs[1]

    @property
    def described_inputs(self) -> tuple[Node, ...]:
        return (self.input,)

    def describe_step(self) -> str:
        return f"pad to {self.shape} with {self.filling}"

    def select(self, index_map: IndexMap) -> Node | None:
        start, maps, shape = index_map
        axis_of = {dim: axis for axis, (dim, _) in enumerate(maps) if dim >= 0}
        kept = list(shape)
        for dim, (first, size) in enumerate(zip(start, self.input.shape, strict=True)):
            axis = axis_of.get(dim)
            if axis is None:
                if first >= size:
                    return strided(self.filler, index_map)
                continue
            step = maps[axis][1]
            if step < 0:
                return None
            kept[axis] = min(shape[axis], len(range(first, size, step)))
        if 0 in kept:
            return strided(self.filler, index_map)
        old = strided(self.input, IndexMap(start, maps, tuple(kept)))
        return padded(old, strided(self.filler, index_map), self.filling)

    def _cut(self, box: Box) -> tuple[Box | None, list[Box]]:
        """Cuts a box at the old array's borders."""
        beyond: list[Box] = []
        for dim, size in enumerate(self.input.shape):
            first, last = box[dim]
            if last > size:
                beyond.append((*box[:dim], (max(first, size), last), *box[dim + 1 :]))
                if first >= size:
                    return None, beyond
                box = (*box[:dim], (first, size), *box[dim + 1 :])
        return box, beyond

    def add_requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        within, beyond = self._cut(box)
        if within is not None:
            self.input.add_requests(within, found)
        for part in beyond:
            self.filler.add_requests(part, found)

    def add_work(self, box: Box, out: np.ndarray, lowered: Lowering) -> None:
        within, beyond = self._cut(box)
        if within is not None:
            self.input.add_work(within, out[slices_within(within, box)], lowered)
        for part in beyond:
            self.filler.add_work(part, out[slices_within(part, box)], lowered)


def padded(old: Node, filler: Node, filling: str) -> Node:
    """Grows an array to the shape of another array."""
    return old if old.shape == filler.shape else PadNode(filler.shape, old.dtype, (old, filler), filling)
