"""Nodes that select, reorder and reshape elements.

However many index maps are composed, they are one node. It writes straight into the buffer: transposed and negative
steps as views of it, a repeat by copying after the read. Steps beyond 1 read their covering box into memory of their
own where the rows between are small, and row by row where they are not, so that never more than `GAP_BYTES` at a time
is read for nothing.

A reshape is a `JoinNode` and a `SplitNode` at most. A join reads exactly what is wanted and writes straight into the
buffer. A split reads, per box, the flat intervals that cover it; it writes straight into the buffer where the buffer's
strides allow, in pieces of at least `GAP_BYTES` where they do not, and goes through memory of its own only for less, or
where the interval covers gaps.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from orbax_t5x.lazy import box as _boxes
from orbax_t5x.lazy.box import (
    Box,
    FlatRun,
    IndexMap,
    box_runs,
    box_shape,
    box_size,
    compose,
    interval_boxes,
    reshape_groups,
    slices_within,
)
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.lazy.node import Lowering, Node, copy_step

# NumPy sets the source of a copy within one array aside unless it sees that the two do not overlap; so copies along a
# repeat are made in blocks of this size. Larger: more memory. Smaller: more calls, about a microsecond each.
_COPY_BYTES = 256 << 10

_ALL = slice(None)
_FLIP = slice(None, None, -1)


class _Cut(NamedTuple):
    """A box of the output as a box of the input.

    `at` cuts the output down to one element along repeats, and turns negative steps round; `strides` index the wanted
    elements within the covering box, or are None where the box is exact.
    """

    box: Box
    at: tuple[Any, ...]
    strides: tuple[slice, ...] | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class StridedNode(Node):
    """The input under an index map."""

    index_map: IndexMap
    # The output dimensions that repeat, and whether a step is larger than 1.
    _repeats: tuple[int, ...]
    _has_steps: bool

    @property
    def only_reshapes(self) -> bool:
        """True if the index map only adds and drops dimensions of size 1."""
        _, maps, shape = self.index_map
        left = [(dim, size) for (dim, step), size in zip(maps, shape, strict=True) if size != 1 and step == 1]
        old = self.input.shape
        return left == [(dim, size) for dim, size in enumerate(old) if size != 1] and math.prod(old) == math.prod(shape)

    def describe_step(self) -> str:
        if self.only_reshapes:
            return f"reshape {self.shape}"
        start, maps, shape = self.index_map
        axis_of = {dim: axis for axis, (dim, _) in enumerate(maps) if dim >= 0}
        cuts = [str(first) for first in start]
        for dim, axis in axis_of.items():
            cuts[dim] = _cut_text(start[dim], maps[axis][1], shape[axis], self.input.shape[dim])
        texts: list[str] = []
        # A dimension of size 1 that is dropped is no choice among elements.
        if any(cut != ":" and size != 1 for cut, size in zip(cuts, self.input.shape, strict=True)):
            texts.append(f"[{', '.join(cuts)}]")
        order = sorted(axis_of)
        if order != list(axis_of):
            texts.append(f"transpose {tuple(order.index(dim) for dim in axis_of)}")
        texts += [f"repeat {shape[axis]} on axis {axis}" for axis in self._repeats if shape[axis] != 1]
        if not texts or any(shape[axis] == 1 for axis in self._repeats):
            texts.append(f"reshape {shape}")
        return ", ".join(texts)

    def _cut(self, box: Box) -> _Cut:
        """Returns the input's box for an output box."""
        start, maps, _ = self.index_map
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
        """Returns the output axis to read by index, or -1."""
        if not self._has_steps:
            return -1
        sizes = [1] * len(self.index_map.start)
        for (first, last), (dim, step) in zip(box, self.index_map.maps, strict=True):
            if dim >= 0:
                sizes[dim] = abs(step) * (last - first - 1) + 1
        found = (len(sizes), -1)
        for axis, ((first, last), (dim, step)) in enumerate(zip(box, self.index_map.maps, strict=True)):
            if dim >= 0 and abs(step) > 1 and last - first > 1:
                row_bytes = math.prod(sizes[dim + 1 :]) * self.dtype.itemsize
                if (abs(step) - 1) * row_bytes >= _boxes.GAP_BYTES:
                    found = min(found, (dim, axis))
        return found[1]

    def add_requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        axis = self._row_axis(box)
        if axis < 0:
            self.input.add_requests(self._cut(box).box, found)
            return
        for row in _rows(box, axis):
            self.add_requests(row, found)

    def add_work(self, box: Box, out: np.ndarray, lowered: Lowering) -> None:
        first = out
        if self._repeats:
            first = out[(*(slice(0, 1) if dim < 0 else _ALL for dim, _ in self.index_map.maps), Ellipsis)]
        self._lower_rows(box, first, lowered)
        for axis in self._repeats:
            if out.shape[axis] > 1:
                later = tuple(slice(0, 1) if a > axis and a in self._repeats else _ALL for a in range(out.ndim))
                block_bytes = _block(out[later].shape, axis, out.itemsize)[2]
                lowered.add_step(partial(_copy_along, out[later], axis), block_bytes)

    def _lower_rows(self, box: Box, first: np.ndarray, lowered: Lowering) -> None:
        """Reads a box into a buffer that holds index 0 of every repeat."""
        axis = self._row_axis(box)
        if axis < 0:
            self._lower_cut(self._cut(box), first, lowered)
            return
        for position, row in enumerate(_rows(box, axis)):
            part = first[(*(slice(None),) * axis, slice(position, position + 1))]
            self._lower_rows(row, part, lowered)

    def _as_input(self, out: np.ndarray) -> np.ndarray:
        """Views an output buffer with the dimensions of the input."""
        dims = [dim for dim, _ in self.index_map.maps if dim >= 0]
        axes = sorted(range(len(dims)), key=dims.__getitem__)
        if axes != list(range(len(dims))):
            out = out.transpose(axes)
        if len(dims) < len(self.index_map.start):
            out = out[(*(_ALL if dim in dims else None for dim in range(len(self.index_map.start))), Ellipsis)]
        return out

    def _lower_cut(self, cut: _Cut, first: np.ndarray, lowered: Lowering) -> None:
        into = self._as_input(first[cut.at])
        if cut.strides is None:
            self.input.add_work(cut.box, into, lowered)
            return
        covering = lowered.read(self.input, cut.box)
        copy_step(lowered, into, covering[(*cut.strides, Ellipsis)])


def strided(node: Node, index_map: IndexMap) -> Node:
    """Applies an index map to a node, simplified."""
    if isinstance(node, StridedNode):
        node, index_map = node.input, compose(node.index_map, index_map)
    start, maps, shape = index_map
    if 1 in shape:
        pairs = zip(maps, shape, strict=True)
        maps = tuple([(dim, 1) if dim >= 0 and size == 1 else (dim, step) for (dim, step), size in pairs])
        index_map = IndexMap(start, maps, shape)
    if shape == node.shape and maps == _in_order(len(shape)) and not any(start):
        return node
    simpler = None if 0 in shape else node.select(index_map)
    if simpler is not None:
        return simpler
    repeats = tuple([axis for axis, (dim, _) in enumerate(maps) if dim < 0])
    has_steps = any([step > 1 or step < -1 for _, step in maps])
    return StridedNode(shape, node.dtype, (node,), index_map, repeats, has_steps)


@cache
def _in_order(rank: int) -> tuple[tuple[int, int], ...]:
    return tuple((dim, 1) for dim in range(rank))


def _cut_text(start: int, step: int, size: int, full: int) -> str:
    """Writes a slice as in Python."""
    if step == 1:
        return ":" if size == full else f"{start}:{start + size}"
    last = start + step * (size - 1)
    stop = "" if step < 0 and last == 0 else last + (1 if step > 0 else -1)
    return f"{start}:{stop}:{step}"


def _rows(box: Box, axis: int) -> list[Box]:
    first, last = box[axis]
    return [(*box[:axis], (i, i + 1), *box[axis + 1 :]) for i in range(first, last)]


def _block(sizes: Sequence[int], axis: int, itemsize: int) -> tuple[int, int, int]:
    """Cuts a copy along an axis into blocks."""
    cut = max((a for a in range(len(sizes)) if a != axis), key=sizes.__getitem__, default=-1)
    row = math.prod(sizes) // sizes[axis] * itemsize
    if cut < 0:
        return cut, 1, row
    row //= sizes[cut]
    count = min(max(1, _COPY_BYTES // row), sizes[cut])
    return cut, count, count * row


def _copy_along(out: np.ndarray, axis: int) -> None:
    """Copies index 0 of an axis to the rest of it."""
    cut, count, _ = _block(out.shape, axis, out.itemsize)
    before = (slice(None),) * axis
    for begin in range(0, out.shape[cut] if cut >= 0 else 1, count):
        block = out[(*(slice(None),) * cut, slice(begin, begin + count))] if cut >= 0 else out
        for index in range(1, out.shape[axis]):
            np.copyto(block[(*before, slice(index, index + 1))], block[(*before, slice(0, 1))])


_Groups = tuple[tuple[int, ...], ...]


def reshaped(node: Node, new: tuple[int, ...]) -> Node:
    """Reshapes a node to a shape of the same size."""
    node = _before_reshapes(node)
    shape = node.shape
    if new == shape:
        return node
    if 0 in new:
        # No element, so any index map will do; this one keeps the leaf known.
        return strided(node, IndexMap((0,) * len(shape), ((-1, 0),) * len(new), new))
    core = node
    if 1 in shape:
        kept = [(axis, size) for axis, size in enumerate(shape) if size > 1]
        squeeze = IndexMap((0,) * len(shape), tuple((axis, 1) for axis, _ in kept), tuple(size for _, size in kept))
        core = strided(node, squeeze)
    groups = reshape_groups(core.shape, [size for size in new if size > 1])
    if any(len(old) > 1 for old, _ in groups):
        joined = tuple(old for old, _ in groups)
        core = JoinNode(tuple(math.prod(sizes) for sizes in joined), core.dtype, (core,), joined)
    if any(len(parts) > 1 for _, parts in groups):
        split = tuple(parts for _, parts in groups)
        core = SplitNode(tuple(itertools.chain.from_iterable(split)), core.dtype, (core,), split)
    if 1 not in new:
        return core
    position = iter(range(len(core.shape)))
    maps = tuple((next(position), 1) if size > 1 else (-1, 0) for size in new)
    return strided(core, IndexMap((0,) * len(core.shape), maps, new))


def _before_reshapes(node: Node) -> Node:
    """Returns the node under a chain of reshapes."""
    while isinstance(node, JoinNode | SplitNode) or (
        isinstance(node, StridedNode) and node.only_reshapes and 0 not in node.shape
    ):
        node = node.input
    return node


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class JoinNode(Node):
    """Adjacent dimensions merged in C order."""

    groups: _Groups

    def describe_step(self) -> str:
        return f"reshape {self.shape}"

    def _pieces(self, box: Box) -> Iterator[tuple[tuple[Box, int, int], ...]]:
        return itertools.product(
            *(interval_boxes(first, last, sizes) for (first, last), sizes in zip(box, self.groups, strict=True))
        )

    def add_requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        for piece in self._pieces(box):
            self.input.add_requests(tuple(itertools.chain.from_iterable(part for part, _, _ in piece)), found)

    def add_work(self, box: Box, out: np.ndarray, lowered: Lowering) -> None:
        for piece in self._pieces(box):
            inner = tuple(itertools.chain.from_iterable(part for part, _, _ in piece))
            flat = tuple((first, last) for _, first, last in piece)
            # Splitting a dimension never copies, whatever its stride.
            into = out[slices_within(flat, box)].reshape(box_shape(inner))
            self.input.add_work(inner, into, lowered)


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class SplitNode(Node):
    """Dimensions split in C order."""

    groups: _Groups

    def describe_step(self) -> str:
        return f"reshape {self.shape}"

    def _pieces(self, box: Box) -> Iterator[tuple[FlatRun, ...]]:
        """Returns every combination of runs."""
        runs: list[list[FlatRun]] = []
        at = len(box)
        row_bytes = self.dtype.itemsize
        for sizes in reversed(self.groups):
            part = box[at - len(sizes) : at]
            runs.append(box_runs(part, sizes, row_bytes))
            row_bytes *= box_size(part)
            at -= len(sizes)
        return itertools.product(*reversed(runs))

    def add_requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        for piece in self._pieces(box):
            self.input.add_requests(_intervals(piece), found)

    def _cuts_are_large(self, covered: Box) -> bool:
        """Tests if ranges stay at `GAP_BYTES` or more when cut."""
        at = len(covered)
        for sizes in reversed(self.groups):
            if len(sizes) > 1 and any(last - first > 1 for first, last in covered[at - len(sizes) : at - 1]):
                row = math.prod(last - first for first, last in covered[at - 1 :])
                if row * self.dtype.itemsize < _boxes.GAP_BYTES:
                    return False
            at -= len(sizes)
        return True

    def add_work(self, box: Box, out: np.ndarray, lowered: Lowering) -> None:
        for piece in self._pieces(box):
            into = out[slices_within(_covered(piece), box)]
            if all(run.exact for run in piece):
                self._lower_exact(piece, into, lowered)
            else:
                self._lower_covering(piece, into, lowered)

    def _lower_exact(self, piece: tuple[FlatRun, ...], into: np.ndarray, lowered: Lowering) -> None:
        """Reads intervals that hold only wanted elements."""
        interval = _intervals(piece)
        scattered = self._scattered_axis(into)
        if scattered < 0:
            self.input.add_work(interval, into.reshape(box_shape(interval)), lowered)
            return
        covered = _covered(piece)
        if not self._cuts_are_large(covered):
            whole = lowered.allocate(into.shape, self.dtype)
            self.input.add_work(interval, whole.reshape(box_shape(interval)), lowered)
            copy_step(lowered, into, whole)
            return
        first, last = covered[scattered]
        for i in range(first, last):
            part = (*covered[:scattered], (i, i + 1), *covered[scattered + 1 :])
            for small in self._pieces(part):
                self._lower_exact(small, into[(slice(None),) * scattered + (slice(i - first, i - first + 1),)], lowered)

    def _scattered_axis(self, into: np.ndarray) -> int:
        """Returns the first axis that the buffer cannot join, or -1."""
        at = 0
        for sizes in self.groups:
            axes = [axis for axis in range(at, at + len(sizes)) if into.shape[axis] > 1]
            for outer, inner in itertools.pairwise(axes):
                if into.strides[outer] != into.strides[inner] * into.shape[inner]:
                    return axes[0]
            at += len(sizes)
        return -1

    def _lower_covering(self, piece: tuple[FlatRun, ...], into: np.ndarray, lowered: Lowering) -> None:
        """Reads intervals with gaps, and copies the wanted elements."""
        shapes = [_aligned(run, sizes) for run, sizes in zip(piece, self.groups, strict=True)]
        flat = lowered.allocate(tuple(math.prod(shape) for shape in shapes), self.dtype)
        interval = _intervals(piece)
        # The first wanted element goes to the front: distances are what they are in whole rows, wherever those begin.
        self.input.add_work(interval, flat[slices_within(interval, interval)], lowered)
        rows = flat.reshape(tuple(itertools.chain.from_iterable(shapes)))
        copy_step(lowered, into, rows[tuple(slice(0, size) for size in into.shape)])


def _intervals(piece: tuple[FlatRun, ...]) -> Box:
    """Returns the box of the input that runs are read from."""
    return tuple([(run.start, run.stop) for run in piece])


def _covered(piece: tuple[FlatRun, ...]) -> Box:
    return tuple(itertools.chain.from_iterable([run.box for run in piece]))


def _aligned(run: FlatRun, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the run's box, widened to whole inner dimensions."""
    outer = next((dim for dim, (first, last) in enumerate(run.box) if last - first > 1), len(sizes) - 1)
    return tuple(last - first if dim <= outer else sizes[dim] for dim, (first, last) in enumerate(run.box))
