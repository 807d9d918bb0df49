"""Node that multiplies an array by one number that is stored beside it: quantized weights and their scale."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import numpy as np

from orbax_t5x.lazy.box import Box, full_box
from orbax_t5x.lazy.cast import cast_into
from orbax_t5x.lazy.geometry import IndexMap
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.lazy.node import Lowering, Node
from orbax_t5x.lazy.strided import strided
from orbax_t5x.trees.dtypes import kind_of


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class ScaledNode(Node):
    """The first input times the second, which has one element; make it with `scaled_node`."""

    def describe_step(self) -> str:
        return f"times a scale, {self.dtype.name}"

    @property
    def described_inputs(self) -> tuple[Node, ...]:
        return (self.input,)

    def select(self, index_map: IndexMap) -> Node | None:
        if any(dim < 0 for dim, _ in index_map.maps):
            return None
        return scaled_node(strided(self.input, index_map), self.inputs[1])

    def add_requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        self.input.add_requests(box, found)
        self.inputs[1].add_requests(full_box(self.inputs[1].shape), found)

    def add_work(self, box: Box, out: np.ndarray, lowered: Lowering) -> None:
        values = lowered.allocate(out.shape, self.input.dtype)
        self.input.add_work(box, values, lowered)
        scale = lowered.allocate(self.inputs[1].shape, self.inputs[1].dtype)
        self.inputs[1].add_work(full_box(scale.shape), scale, lowered)
        # What a cast through another dtype takes.
        lowered.add_step(partial(self._multiply, values, scale, out), math.prod(out.shape) * self.dtype.itemsize)

    def _multiply(self, values: np.ndarray, scale: np.ndarray, out: np.ndarray) -> None:
        cast_into(out, values)
        with np.errstate(all="ignore"):
            out *= scale.astype(self.dtype).reshape(())


def scaled_node(node: Node, scale: Node) -> Node:
    """Multiplies an array by one number, in float32, or in float64 where one of them has 64 bits.

    A ValueError for a scale of several elements, a TypeError for what holds no real numbers.
    """
    if math.prod(scale.shape) != 1:
        raise ValueError(f"a scale is one number, not an array of shape {scale.shape}")
    for one, kinds in ((node, ("float", "int")), (scale, ("float",))):
        if kind_of(one.dtype) not in kinds:
            raise TypeError(f"a scale and what it scales are real numbers, not {one.dtype.name}: {one.summary()}")
    is_wide = any(one.dtype.itemsize == 8 for one in (node, scale))
    return ScaledNode(node.shape, np.dtype("float64" if is_wide else "float32"), (node, scale))
