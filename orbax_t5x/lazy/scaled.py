"""Node of an array times its stored scale."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import numpy as np

from orbax_t5x.lazy.box import Box, box_shape, full_box
from orbax_t5x.lazy.cast import cast_into
from orbax_t5x.lazy.geometry import IndexMap
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.lazy.node import Lowering, Node
from orbax_t5x.lazy.strided import strided
from orbax_t5x.trees.dtypes import kind_of


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class ScaledNode(Node):
    """Product of an input and a scale."""

    def describe_step(self) -> str:
        return f"times a scale, {self.dtype.name}"

    @property
    def described_inputs(self) -> tuple[Node, ...]:
        return (self.input,)

    def select(self, index_map: IndexMap) -> Node | None:
        if any(dim < 0 for dim, _ in index_map.maps):
            return None
        scale = strided(self.inputs[1], index_map) if self._is_by_element else self.inputs[1]
        return ScaledNode(index_map.shape, self.dtype, (strided(self.input, index_map), scale))

    @property
    def _is_by_element(self) -> bool:
        return self.inputs[1].shape == self.shape

    def _scale_box(self, box: Box) -> Box:
        return box if self._is_by_element else full_box(self.inputs[1].shape)

    def add_requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        self.input.add_requests(box, found)
        self.inputs[1].add_requests(self._scale_box(box), found)

    def add_work(self, box: Box, out: np.ndarray, lowered: Lowering) -> None:
        values = lowered.allocate(out.shape, self.input.dtype)
        self.input.add_work(box, values, lowered)
        wanted = self._scale_box(box)
        scale = lowered.allocate(box_shape(wanted), self.inputs[1].dtype)
        self.inputs[1].add_work(wanted, scale, lowered)
        # What a cast through another dtype takes.
        lowered.add_step(partial(self._multiply, values, scale, out), math.prod(out.shape) * self.dtype.itemsize)

    def _multiply(self, values: np.ndarray, scale: np.ndarray, out: np.ndarray) -> None:
        cast_into(out, values)
        with np.errstate(all="ignore"):
            out *= scale.astype(self.dtype).reshape(out.shape if self._is_by_element else ())


def scaled_node(node: Node, scale: Node) -> Node:
    """Scales an array in float32, or float64 for 64-bit inputs."""
    if math.prod(scale.shape) != 1 and not (len(node.shape) > 1 and scale.shape == node.shape):
        if len(node.shape) > 1 and scale.shape == (node.shape[0], *(1 for _ in node.shape[1:])):
            # NumPy's rule: a flat scale of as many numbers would be of columns.
            maps = ((0, 1), *(((-1, 0),) * (len(node.shape) - 1)))
            scale = strided(scale, IndexMap((0,) * len(scale.shape), maps, node.shape))
        else:
            raise ValueError(
                f"a scale is one number, one for each row (rows, 1) or element, not an array of shape {scale.shape}"
            )
    for one, kinds in ((node, ("float", "int")), (scale, ("float",))):
        if kind_of(one.dtype) not in kinds:
            raise TypeError(f"a scale and what it scales are real numbers, not {one.dtype.name}: {one.summary()}")
    is_wide = any(one.dtype.itemsize == 8 for one in (node, scale))
    return ScaledNode(node.shape, np.dtype("float64" if is_wide else "float32"), (node, scale))
