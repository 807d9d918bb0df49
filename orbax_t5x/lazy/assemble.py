"""The node kinds that lay inputs side by side: stack on a new axis, concatenate along one.

Both write straight into the buffer and ask only the inputs that a box touches.
"""

from __future__ import annotations

import bisect
import itertools

import numpy as np

from orbax_t5x.lazy.box import Box
from orbax_t5x.lazy.geometry import Walk
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.lazy.view import Lowered, View, freeze


class Stack(View):
    """Inputs of one shape and dtype side by side on a new axis."""

    __slots__ = ("axis",)

    axis: int

    def __init__(self, inputs: tuple[View, ...], axis: int):
        shape = inputs[0].shape
        super().__init__((*shape[:axis], len(inputs), *shape[axis:]), inputs[0].dtype, inputs)
        freeze(self, "axis", axis)

    def _describe(self) -> str:
        return f"stack of {len(self.inputs)} on axis {self.axis}"

    def _select(self, walk: Walk) -> View | None:
        """Picks inputs, so that those left out are neither listed nor read."""
        axis, count = self.axis, len(self.inputs)
        user = next((out for out, (dim, _) in enumerate(walk.maps) if dim == axis), None)
        if user is None:
            start = (*walk.start[:axis], *walk.start[axis + 1 :])
            maps = tuple((dim - (dim > axis), step) for dim, step in walk.maps)
            return self.inputs[walk.start[axis]]._walked(Walk(start, maps, walk.shape))
        step, extent = walk.maps[user][1], walk.shape[user]
        if (walk.start[axis], step, extent) == (0, 1, count):
            return None
        picked = tuple(self.inputs[walk.start[axis] + step * i] for i in range(extent))
        return Stack(picked, axis)._walked(_whole(walk, axis, user))

    def _requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        first, last = box[self.axis]
        inner = (*box[: self.axis], *box[self.axis + 1 :])
        for source in self.inputs[first:last]:
            source._requests(inner, found)

    def _temp_bytes(self, box: Box, contiguous_dims: int) -> int:
        first, last = box[self.axis]
        inner = (*box[: self.axis], *box[self.axis + 1 :])
        contiguous = min(contiguous_dims, self.ndim - 1 - self.axis)
        return sum(source._temp_bytes(inner, contiguous) for source in self.inputs[first:last])

    def _lower(self, box: Box, out: np.ndarray, lowered: Lowered) -> None:
        first, last = box[self.axis]
        inner = (*box[: self.axis], *box[self.axis + 1 :])
        before = (slice(None),) * self.axis
        for position, source in enumerate(self.inputs[first:last]):
            # The ellipsis keeps a rank-0 piece an array.
            source._lower(inner, out[(*before, position, Ellipsis)], lowered)


class Concat(View):
    """Inputs of one dtype one after the other along an axis."""

    __slots__ = ("_ends", "axis")

    axis: int
    _ends: tuple[int, ...]

    def __init__(self, inputs: tuple[View, ...], axis: int):
        ends = tuple(itertools.accumulate(view.shape[axis] for view in inputs))
        shape = inputs[0].shape
        super().__init__((*shape[:axis], ends[-1], *shape[axis + 1 :]), inputs[0].dtype, inputs)
        freeze(self, "axis", axis)
        freeze(self, "_ends", ends)

    def _describe(self) -> str:
        return f"concatenation of {len(self.inputs)} on axis {self.axis}"

    def _touched(self, first: int, last: int) -> list[tuple[View, int, int, int]]:
        """(input, first, last, position in the output) of each input that a range along the axis touches."""
        touched = []
        for i in range(bisect.bisect_right(self._ends, first), len(self.inputs)):
            base = self._ends[i - 1] if i else 0
            if base >= last:
                break
            begin, end = max(first, base), min(last, self._ends[i])
            if begin < end:
                touched.append((self.inputs[i], begin - base, end - base, begin - first))
        return touched

    def _select(self, walk: Walk) -> View | None:
        """Cuts the inputs themselves, so that those left out are neither listed nor read."""
        axis = self.axis
        user = next((out for out, (dim, _) in enumerate(walk.maps) if dim == axis), None)
        first = walk.start[axis]
        if user is None:
            source, at, _, _ = self._touched(first, first + 1)[0]
            return source._walked(walk._replace(start=(*walk.start[:axis], at, *walk.start[axis + 1 :])))
        step, extent = walk.maps[user][1], walk.shape[user]
        if (first, step, extent) == (0, 1, self.shape[axis]):
            return None
        parts = []
        wanted = range(first, first + step * extent, step)
        for i, source in enumerate(self.inputs):
            base = self._ends[i] - source.shape[axis]
            inside = _between(wanted, base, self._ends[i])
            if inside:
                index = (slice(None),) * axis
                stop = inside[-1] - base + step
                parts.append(source[(*index, slice(inside[0] - base, None if stop < 0 else stop, step))])
        if step < 0:
            parts.reverse()
        joined = parts[0] if len(parts) == 1 else Concat(tuple(parts), axis)
        return joined._walked(_whole(walk, axis, user))

    def _requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        before, after = box[: self.axis], box[self.axis + 1 :]
        for source, first, last, _ in self._touched(*box[self.axis]):
            source._requests((*before, (first, last), *after), found)

    def _temp_bytes(self, box: Box, contiguous_dims: int) -> int:
        before, after = box[: self.axis], box[self.axis + 1 :]
        contiguous = contiguous_dims if self.axis == 0 else min(contiguous_dims, self.ndim - self.axis)
        return sum(
            source._temp_bytes((*before, (first, last), *after), contiguous)
            for source, first, last, _ in self._touched(*box[self.axis])
        )

    def _lower(self, box: Box, out: np.ndarray, lowered: Lowered) -> None:
        before, after = box[: self.axis], box[self.axis + 1 :]
        index = (slice(None),) * self.axis
        for source, first, last, position in self._touched(*box[self.axis]):
            part = out[(*index, slice(position, position + last - first))]
            source._lower((*before, (first, last), *after), part, lowered)


def _whole(walk: Walk, axis: int, user: int) -> Walk:
    """The walk with an input dimension, and the output dimension that walks it, left as they are."""
    start = (*walk.start[:axis], 0, *walk.start[axis + 1 :])
    return walk._replace(start=start, maps=(*walk.maps[:user], (axis, 1), *walk.maps[user + 1 :]))


def _between(wanted: range, low: int, high: int) -> range:
    """The members of an arithmetic sequence in [low, high)."""
    start, step = wanted.start, wanted.step
    if step > 0:
        first, last = -(-(low - start) // step), -(-(high - start) // step)
    else:
        first, last = -(-(start - high + 1) // -step), (start - low) // -step + 1
    return wanted[max(first, 0) : max(last, 0)]
