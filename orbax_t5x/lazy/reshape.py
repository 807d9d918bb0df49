"""Reshaping by a `JoinNode` and a `SplitNode` at most.

A join reads exactly what is wanted and writes straight into the buffer. A split reads, per box, the flat intervals that
cover it; it writes straight into the buffer where the buffer's strides allow, in pieces of at least `GAP_BYTES` where
they do not, and goes through memory of its own only for less, or where the interval covers gaps.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np

from orbax_t5x.lazy import geometry as _geometry
from orbax_t5x.lazy.box import Box, box_shape, box_size, slices_within
from orbax_t5x.lazy.geometry import FlatRun, IndexMap, box_runs, interval_boxes, reshape_groups
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.lazy.node import Lowering, Node, copy_step
from orbax_t5x.lazy.strided import StridedNode, strided

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
                if row * self.dtype.itemsize < _geometry.GAP_BYTES:
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
