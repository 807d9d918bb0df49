"""Records transforms of parameters and repeats them on other arrays.

A transform is run on symbols: views of leaves that cannot be read. Its results are graphs of views over symbols. A
graph is built again over other arrays: over the parameters themselves, over a momentum of the same shape, or over an
array that keeps only some of the parameter's dimensions, because the others were averaged away (a factored second
moment).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from orbax_t5x.lazy import AffineFunction, Leaf, ReadStats, Request, View, as_view, broadcast_to, repeat
from orbax_t5x.lazy.assemble import ConcatNode, PadNode, StackNode
from orbax_t5x.lazy.cast import CastNode, MappedNode
from orbax_t5x.lazy.node import LeafNode, Node
from orbax_t5x.lazy.several import (
    AllEqualNode,
    AverageNode,
    LowRankNode,
    ScaledNode,
    add_low_rank,
    all_equal,
    average,
    concatenate,
    pad,
    stack,
)
from orbax_t5x.lazy.strided import JoinNode, SplitNode, StridedNode

KeptDims = frozenset[int]
"""The dimensions of an array that were not averaged away."""


class CannotFollowError(ValueError):
    """Error: a parameter's change cannot be made to its slot."""


class Symbol(Leaf):
    """A leaf that stands for a parameter and cannot be read."""

    def __init__(self, name: str, shape: Sequence[int], dtype: np.dtype):
        self.name = name
        self.shape: tuple[int, ...] = tuple(shape)
        self.dtype = dtype

    async def read_into(self, requests: Sequence[Request], stats: ReadStats) -> None:
        """Refuses."""
        raise TypeError(
            f"{self.name!r} stands for a parameter while its optimizer state is followed; it cannot be read"
        )


def symbol_for(name: str, value: Any) -> View | None:
    """Returns a symbol of an array's shape and dtype, or None."""
    if value is None:
        return None
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        if not isinstance(value, (bool, int, float, complex)):
            return None
        array = np.asarray(value)
        shape, dtype = array.shape, array.dtype
    try:
        return as_view(Symbol(name, shape, np.dtype(dtype)))
    except TypeError:  # an extended dtype, such as a typed PRNG key's
        return None


def symbols_of(value: Any) -> Iterator[Symbol]:
    """Yields the symbols of a result, each once."""
    if isinstance(value, View):
        yield from (leaf for leaf in value.leaves() if isinstance(leaf, Symbol))


def is_symbol(value: Any) -> bool:
    """Reports whether a result is an unchanged symbol."""
    return isinstance(value, View) and isinstance(value.leaf, Symbol)


def symbol_below(value: Any) -> Symbol | None:
    """Returns the symbol below casts and added constants, or None."""
    node = value.node if isinstance(value, View) else None
    while isinstance(node, CastNode) or (isinstance(node, MappedNode) and _is_sum(node)):
        node = node.input
    return node.leaf if isinstance(node, LeafNode) and isinstance(node.leaf, Symbol) else None


def is_rearranged(value: View) -> bool:
    """Returns True if a result has all elements of one symbol and no others, in any order."""
    node = value.node
    while isinstance(node, CastNode | StridedNode | JoinNode | SplitNode) or (
        isinstance(node, MappedNode) and _is_sum(node)
    ):
        node = node.input
    is_one = isinstance(node, LeafNode) and isinstance(node.leaf, Symbol)
    return is_one and math.prod(node.shape) == math.prod(value.shape)


def _is_sum(node: MappedNode) -> bool:
    """Returns True if a constant was added to the values."""
    return isinstance(node.function, AffineFunction) and node.function.scale == 1


@dataclasses.dataclass
class Replay:
    """Builder of a recorded graph of views over other leaves.

    Attributes:
      leaf: returns the array for a symbol, with only the kept dimensions; it may raise `CannotFollowError`.
      of_parameters: whether the arrays are the parameters themselves. Else they belong to an optimizer: casts are left
        out, elements that are new are zero, and a sum with a low-rank product cannot be followed.
      is_exact: whether all that was built so far is exact. Slicing or repeating a dimension that was averaged away is
        not, nor is padding one or averaging.
    """

    leaf: Callable[[Symbol, KeptDims], View]
    of_parameters: bool
    is_exact: bool = True

    def build(self, view: View, kept: KeptDims) -> View:
        """Builds the view over other leaves in kept dimensions."""
        return self._build(view.node, kept)

    def _build(self, node: Node, kept: KeptDims) -> View:
        match node:
            case LeafNode():
                return self._leaf(node, kept)
            case StridedNode():
                return self._index_map(node, kept)
            case CastNode():
                built = self._build(node.input, kept)
                return built.astype(node.dtype) if self.of_parameters else built
            case JoinNode():
                return self._join(node, kept)
            case SplitNode():
                return self._split(node, kept)
            case StackNode():
                return self._stack(node, kept)
            case ConcatNode():
                return self._concat(node, kept)
            case AverageNode() if self.of_parameters:
                return average([self._build(item, kept) for item in node.inputs], node.weights)
            case AverageNode():
                raise CannotFollowError("its parameter is an average")
            case AllEqualNode():
                return all_equal([self._build(item, kept) for item in node.inputs], advice=node.advice)
            case PadNode():
                return self._pad(node, kept)
            case MappedNode() if self.of_parameters:
                return View(dataclasses.replace(node, inputs=(self._build(node.input, kept).node,)))
            case MappedNode() if _is_sum(node):
                return self._build(node.input, kept)
            case MappedNode():
                raise CannotFollowError(f"its parameter was computed anew ({node.text})")
            case ScaledNode() if self.of_parameters:
                product, scale = self._build(node.input, kept), self._build(node.inputs[1], _all_dims(node.inputs[1]))
                return View(dataclasses.replace(node, inputs=(product.node, scale.node)))
            case ScaledNode():
                raise CannotFollowError("its parameter was quantized")
            case LowRankNode() if self.of_parameters:
                kernel, down, up = (self._build(item, _all_dims(item)) for item in node.inputs)
                return add_low_rank(kernel, down, up, node.scale)
            case LowRankNode():
                raise CannotFollowError("a low-rank product was added to its parameter")
        raise CannotFollowError(f"{type(node).__name__} is not known")

    def _leaf(self, node: LeafNode, kept: KeptDims) -> View:
        if isinstance(node.leaf, Symbol):
            return self.leaf(node.leaf, kept)
        if len(kept) == len(node.shape):
            self.is_exact = False
            return as_view(node.leaf)
        raise CannotFollowError("a constant has no optimizer state")

    def _index_map(self, node: StridedNode, kept: KeptDims) -> View:
        index_map = node.index_map
        axis_of = {dim: axis for axis, (dim, _) in enumerate(index_map.maps) if dim >= 0}
        inner: list[int] = []
        index: list[Any] = []
        for dim, first in enumerate(index_map.start):
            axis = axis_of.get(dim)
            if axis is None:
                inner.append(dim)
                index.append(first)
                continue
            step, size = index_map.maps[axis][1], index_map.shape[axis]
            if axis in kept:
                stop = first + step * size
                inner.append(dim)
                index.append(slice(first, stop if stop >= 0 else None, step))
            elif size != node.input.shape[dim]:
                self.is_exact = False
        built = self._build(node.input, frozenset(inner))[tuple(index)]
        order = sorted(dim for dim, axis in axis_of.items() if axis in kept)
        order_wanted = [dim for axis, (dim, _) in enumerate(index_map.maps) if dim >= 0 and axis in kept]
        built = built.transpose(tuple(order.index(dim) for dim in order_wanted))
        position = 0
        for axis, (dim, _) in enumerate(index_map.maps):
            if dim < 0 and index_map.shape[axis] != 1:
                self.is_exact = False
            if axis in kept:
                built = repeat(built, index_map.shape[axis], position) if dim < 0 else built
                position += 1
        return built

    def _join(self, node: JoinNode, kept: KeptDims) -> View:
        inner: list[int] = []
        at = 0
        for axis, sizes in enumerate(node.groups):
            if axis in kept:
                inner.extend(range(at, at + len(sizes)))
            at += len(sizes)
        return self._build(node.input, frozenset(inner)).reshape(_kept_sizes(node, kept))

    def _split(self, node: SplitNode, kept: KeptDims) -> View:
        inner: list[int] = []
        at = 0
        for dim, sizes in enumerate(node.groups):
            axes = [axis for axis in range(at, at + len(sizes)) if node.shape[axis] != 1]
            at += len(sizes)
            stay = {axis in kept for axis in axes}
            if len(stay) > 1:
                raise CannotFollowError("only a part of a dimension that is split would be averaged")
            if True in stay or not axes:
                inner.append(dim)
        return self._build(node.input, frozenset(inner)).reshape(_kept_sizes(node, kept))

    def _stack(self, node: StackNode, kept: KeptDims) -> View:
        axis = node.axis
        inner = frozenset(dim - (dim > axis) for dim in kept if dim != axis)
        built = [self._build(item, inner) for item in node.inputs]
        if axis in kept:
            return stack(built, sum(dim < axis for dim in kept))
        self.is_exact = False
        return self.mean(built)

    @staticmethod
    def mean(views: Sequence[View]) -> View:
        """Averages views with equal weights."""
        return average(views, [1.0] * len(views))

    def _pad(self, node: PadNode, kept: KeptDims) -> View:
        built = self._build(node.input, kept)
        if self.of_parameters:
            return pad(built, self._build(node.filler, kept), node.filling)
        if _kept_sizes(node, _all_dims(node) - kept) != tuple(
            size for dim, size in enumerate(node.input.shape) if dim not in kept
        ):
            self.is_exact = False
        return pad(built, broadcast_to(np.zeros((), built.dtype), _kept_sizes(node, kept)), "0")

    def _concat(self, node: ConcatNode, kept: KeptDims) -> View:
        axis = node.axis
        built = [self._build(item, kept) for item in node.inputs]
        if axis in kept:
            return concatenate(built, sum(dim < axis for dim in kept))
        self.is_exact = False
        return average(built, [float(item.shape[axis]) for item in node.inputs])


def _all_dims(node: Node) -> KeptDims:
    return frozenset(range(len(node.shape)))


def _kept_sizes(node: Node, kept: KeptDims) -> tuple[int, ...]:
    return tuple(size for axis, size in enumerate(node.shape) if axis in kept)
