"""Reshaping: `Join` makes one dimension of adjacent ones, `Split` several of one; every reshape is one of them or both.

A join reads exactly what is wanted and writes straight into the buffer. A split reads, per box, the flat intervals that
cover it; it writes straight into the buffer where the buffer's strides allow, in pieces of at least `GAP_BYTES` where
they do not, and goes through memory of its own only for less, or where the interval covers gaps.
"""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np

from orbax_t5x.lazy import geometry as _geometry
from orbax_t5x.lazy.box import Box, box_size
from orbax_t5x.lazy.geometry import Run, box_runs, interval_boxes
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.lazy.view import Lowered, View, freeze

_Groups = tuple[tuple[int, ...], ...]


class Join(View):
    """Adjacent dimensions made one, in C order."""

    __slots__ = ("groups",)

    groups: _Groups

    def __init__(self, source: View, groups: _Groups):
        """Makes the view.

        Args:
          source: the input.
          groups: for every dimension of the result, the sizes of the input's dimensions that it joins.
        """
        super().__init__(tuple(math.prod(sizes) for sizes in groups), source.dtype, (source,))
        freeze(self, "groups", groups)

    def _describe(self) -> str:
        return f"reshape {self.shape}"

    def _pieces(self, box: Box):
        return itertools.product(
            *(interval_boxes(first, last, sizes) for (first, last), sizes in zip(box, self.groups, strict=True))
        )

    def _requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        for piece in self._pieces(box):
            self.inputs[0]._requests(tuple(itertools.chain.from_iterable(part for part, _, _ in piece)), found)

    def _temp_bytes(self, box: Box, contiguous_dims: int) -> int:
        total = 0
        for piece in self._pieces(box):
            whole = all((first, last) == pair for (_, first, last), pair in zip(piece, box, strict=True))
            inside = (
                sum(len(sizes) for sizes in self.groups[len(self.groups) - contiguous_dims :]) if contiguous_dims else 0
            )
            inner = tuple(itertools.chain.from_iterable(part for part, _, _ in piece))
            total += self.inputs[0]._temp_bytes(inner, inside if whole else 0)
        return total

    def _lower(self, box: Box, out: np.ndarray, lowered: Lowered) -> None:
        for piece in self._pieces(box):
            inner = tuple(itertools.chain.from_iterable(part for part, _, _ in piece))
            index = tuple(
                slice(first - base, last - base) for (_, first, last), (base, _) in zip(piece, box, strict=True)
            )
            # Splitting a dimension never copies, whatever its stride.
            into = out[index].reshape(tuple(last - first for first, last in inner))
            self.inputs[0]._lower(inner, into, lowered)


class Split(View):
    """One or more dimensions each made several, in C order."""

    __slots__ = ("groups",)

    groups: _Groups

    def __init__(self, source: View, groups: _Groups):
        """Makes the view.

        Args:
          source: the input.
          groups: for every dimension of the input, the sizes of the result's dimensions that it becomes.
        """
        super().__init__(tuple(itertools.chain.from_iterable(groups)), source.dtype, (source,))
        freeze(self, "groups", groups)

    def _describe(self) -> str:
        return f"reshape {self.shape}"

    def _pieces(self, box: Box):
        """Every combination of runs, one for each dimension of the input."""
        runs: list[list[Run]] = []
        at = len(box)
        row_bytes = self._dtype.itemsize
        for sizes in reversed(self.groups):
            part = box[at - len(sizes) : at]
            runs.append(box_runs(part, sizes, row_bytes))
            row_bytes *= box_size(part)
            at -= len(sizes)
        return itertools.product(*reversed(runs))

    def _requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        for piece in self._pieces(box):
            self.inputs[0]._requests(tuple((run.start, run.stop) for run in piece), found)

    def _temp_bytes(self, box: Box, contiguous_dims: int) -> int:
        return sum(self._piece_temp_bytes(piece, box, contiguous_dims) for piece in self._pieces(box))

    def _piece_temp_bytes(self, piece: tuple[Run, ...], box: Box, contiguous_dims: int) -> int:
        source = self.inputs[0]
        interval = tuple((run.start, run.stop) for run in piece)
        covered = tuple(itertools.chain.from_iterable(run.box for run in piece))
        inside = source._temp_bytes(interval, 0)
        if not all(run.exact for run in piece):
            return inside + self._aligned_size(piece) * self._dtype.itemsize
        at, contiguous = self.ndim, 0
        for sizes in reversed(self.groups):
            at -= len(sizes)
            if self.ndim - at > contiguous_dims:
                break
            contiguous += 1
        # An exact run fills what lies behind its first dimension, so its own dimensions join in any buffer whose do.
        if all(len(sizes) == 1 for sizes in self.groups[: len(self.groups) - contiguous]):
            return source._temp_bytes(interval, contiguous if covered == box else 0)
        return inside + (0 if self._cuts_are_large(covered) else box_size(covered) * self._dtype.itemsize)

    def _cuts_are_large(self, covered: Box) -> bool:
        """Whether even cut index by index, each piece of what is written holds `GAP_BYTES`."""
        at = len(covered)
        for sizes in reversed(self.groups):
            if len(sizes) > 1 and any(last - first > 1 for first, last in covered[at - len(sizes) : at - 1]):
                row = math.prod(last - first for first, last in covered[at - 1 :])
                if row * self._dtype.itemsize < _geometry.GAP_BYTES:
                    return False
            at -= len(sizes)
        return True

    def _aligned_size(self, piece: tuple[Run, ...]) -> int:
        return math.prod(math.prod(_aligned(run, sizes)) for run, sizes in zip(piece, self.groups, strict=True))

    def _lower(self, box: Box, out: np.ndarray, lowered: Lowered) -> None:
        for piece in self._pieces(box):
            covered = tuple(itertools.chain.from_iterable(run.box for run in piece))
            into = out[tuple(slice(a - base, b - base) for (a, b), (base, _) in zip(covered, box, strict=True))]
            if all(run.exact for run in piece):
                self._lower_exact(piece, into, lowered)
            else:
                self._lower_covering(piece, into, lowered)

    def _lower_exact(self, piece: tuple[Run, ...], into: np.ndarray, lowered: Lowered) -> None:
        """Reads intervals that hold just what is wanted.

        Into the buffer; where its strides forbid, in pieces that it can take, or through memory of its own.
        """
        interval = tuple((run.start, run.stop) for run in piece)
        scattered = self._scattered_axis(into)
        if scattered < 0:
            self.inputs[0]._lower(interval, into.reshape(tuple(run.stop - run.start for run in piece)), lowered)
            return
        covered = tuple(itertools.chain.from_iterable(run.box for run in piece))
        if not self._cuts_are_large(covered):
            temp = np.empty(into.shape, self._dtype)
            self.inputs[0]._lower(interval, temp.reshape(tuple(run.stop - run.start for run in piece)), lowered)
            lowered.finish.append(partial(np.copyto, into, temp))
            return
        first, last = covered[scattered]
        for i in range(first, last):
            part = (*covered[:scattered], (i, i + 1), *covered[scattered + 1 :])
            for small in self._pieces(part):
                self._lower_exact(small, into[(slice(None),) * scattered + (slice(i - first, i - first + 1),)], lowered)

    def _scattered_axis(self, into: np.ndarray) -> int:
        """The first axis of a group that the buffer's strides do not allow to be joined, or -1."""
        at = 0
        for sizes in self.groups:
            axes = [axis for axis in range(at, at + len(sizes)) if into.shape[axis] > 1]
            for outer, inner in itertools.pairwise(axes):
                if into.strides[outer] != into.strides[inner] * into.shape[inner]:
                    return axes[0]
            at += len(sizes)
        return -1

    def _lower_covering(self, piece: tuple[Run, ...], into: np.ndarray, lowered: Lowered) -> None:
        """Reads intervals with gaps into memory of whole rows, and copies what is wanted out of it."""
        shapes = [_aligned(run, sizes) for run, sizes in zip(piece, self.groups, strict=True)]
        temp = np.empty(tuple(math.prod(shape) for shape in shapes), self._dtype)
        interval = tuple((run.start, run.stop) for run in piece)
        # The first wanted element goes to the front: distances are what they are in whole rows, wherever those begin.
        self.inputs[0]._lower(interval, temp[tuple(slice(0, stop - start) for start, stop in interval)], lowered)
        rows = temp.reshape(tuple(itertools.chain.from_iterable(shapes)))
        lowered.finish.append(partial(np.copyto, into, rows[tuple(slice(0, size) for size in into.shape)]))


def _aligned(run: Run, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The run's box with every dimension below its first one of several indices made full."""
    outer = next((dim for dim, (first, last) in enumerate(run.box) if last - first > 1), len(sizes) - 1)
    return tuple(last - first if dim <= outer else sizes[dim] for dim, (first, last) in enumerate(run.box))
