"""Node that adds a product of two thin matrices to an array.

A box of the result takes that box of the kernel, read straight into the buffer, the rows of `down` and the columns of
`up` that belong to it. Products are summed one rank after the other, elements by themselves: a matrix product of BLAS
sums in an order that depends on the shape, and then the same element would differ from shard to shard.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import numpy as np

from orbax_t5x.lazy.box import Box
from orbax_t5x.lazy.cast import cast_into
from orbax_t5x.lazy.leaf import Leaf
from orbax_t5x.lazy.node import Lowering, Node
from orbax_t5x.trees.dtypes import kind_of

# Rows are summed in blocks of this size, which stay in a processor's cache over all ranks. Larger: every rank goes
# through memory. Smaller: more calls, about a microsecond each.
_BLOCK_BYTES = 128 << 10


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class LowRankNode(Node):
    """`kernel + scale * tensordot(down, up, 1)` of the inputs; make it with `low_rank_node`.

    Sums are made in `sum_dtype`, and rounded to the kernel's dtype once.
    """

    scale: float
    sum_dtype: np.dtype

    @property
    def rank(self) -> int:
        """The size of the dimension that is summed over."""
        return self.inputs[1].shape[-1]

    def describe_step(self) -> str:
        return f"plus {self.scale:g} times a product of rank {self.rank}"

    def _factor_boxes(self, box: Box) -> tuple[Box, Box]:
        """Returns the boxes of `down` and `up` that a box needs."""
        rows = len(self.inputs[1].shape) - 1
        ranks = (0, self.rank)
        return (*box[:rows], ranks), (ranks, *box[rows:])

    def add_requests(self, box: Box, found: list[tuple[Leaf, Box]]) -> None:
        for node, part in zip(self.inputs, (box, *self._factor_boxes(box)), strict=True):
            node.add_requests(part, found)

    def add_work(self, box: Box, out: np.ndarray, lowered: Lowering) -> None:
        self.input.add_work(box, out, lowered)
        factors = list(map(lowered.read, self.inputs[1:], self._factor_boxes(box)))
        widened = sum(factor.size for factor in factors) + 2 * math.prod(self._block(out)[1:])
        lowered.add_step(partial(self._add, *factors, out), widened * self.sum_dtype.itemsize)

    def _block(self, out: np.ndarray) -> tuple[int, ...]:
        """Returns the rows summed at a time, and their elements."""
        row = math.prod(out.shape[1:])
        return min(out.shape[0], max(1, _BLOCK_BYTES // (row * self.sum_dtype.itemsize))), *out.shape[1:]

    def _add(self, down: np.ndarray, up: np.ndarray, out: np.ndarray) -> None:
        count, *rest = self._block(out)
        left, right = (np.empty(factor.shape, self.sum_dtype) for factor in (down, up))
        cast_into(left, down)
        cast_into(right, up)
        right = right.reshape(self.rank, -1)
        total, term = (np.empty((count, *rest), self.sum_dtype) for _ in range(2))
        with np.errstate(all="ignore"):
            for first in range(0, len(out), count):
                rows = out[first : first + count]
                columns = left[first : first + count].reshape(-1, self.rank)
                part, one = total[: len(rows)], term[: len(rows)]
                flat_part, flat_one = (array.reshape(len(columns), -1) for array in (part, one))
                flat_part[...] = 0
                for k in range(self.rank):
                    np.multiply(columns[:, k, None], right[k], out=flat_one)
                    flat_part += flat_one
                part *= self.sum_dtype.type(self.scale)
                cast_into(one, rows)
                part += one
                cast_into(rows, part)


def low_rank_node(kernel: Node, down: Node, up: Node, scale: float) -> Node:
    """Adds the scaled product of `down` and `up` to the kernel."""
    for node in (kernel, down, up):
        if kind_of(node.dtype) != "float":
            raise TypeError(f"a low-rank product is of floating-point numbers, not {node.dtype.name}: {node.summary()}")
    fits = len(down.shape) > 1 and len(up.shape) > 1 and down.shape[-1] == up.shape[0]
    if not fits or (*down.shape[:-1], *up.shape[1:]) != kernel.shape:
        raise ValueError(
            f"the product of shapes {down.shape} and {up.shape} has not the kernel's shape {kernel.shape}: down is "
            "[in, rank], up is [rank, out]"
        )
    if 0 in up.shape[:1]:
        return kernel
    is_wide = any(node.dtype.name == "float64" for node in (kernel, down, up))
    sum_dtype = np.dtype("float64" if is_wide else "float32")
    return LowRankNode(kernel.shape, kernel.dtype, (kernel, down, up), scale, sum_dtype)
