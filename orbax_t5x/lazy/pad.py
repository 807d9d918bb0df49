"""Node that grows an array at its end.

What the array has is read straight into the buffer; of the array that fills the rest only the boxes beyond it are read.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from orbax_t5x.lazy.box import Box, slices_within
from orbax_t5x.lazy.geometry import IndexMap
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.lazy.node import Lowering, Node
from orbax_t5x.lazy.strided import strided


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
