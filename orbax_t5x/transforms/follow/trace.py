"""Following what a transform does to parameters, so that the same can be done to what belongs to them.

A transform is run on symbols: views of leaves that cannot be read. What it makes of them is a graph of views, and
  that graph can be
built again over other arrays: over the parameters themselves, over a momentum of the same shape, or over an array
  that keeps only some
of the parameter's dimensions, because the others were averaged away (a factored second moment).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from orbax_t5x.lazy import (
    AllEqual,
    Average,
    Cast,
    Concat,
    Join,
    Leaf,
    LeafView,
    ReadStats,
    Request,
    Split,
    Stack,
    Strided,
    View,
    as_view,
    concatenate,
    repeat,
    stack,
)

Kept = frozenset[int]
"""The dimensions of an array that were not averaged away."""


class CannotFollowError(ValueError):
    """What was done to the parameter cannot be done to what belongs to it; the text says why."""


class Symbol(Leaf):
    """A leaf that stands for a parameter and cannot be read."""

    def __init__(self, name: str, shape: Sequence[int], dtype: np.dtype):
        self.name = name
        self.shape = tuple(shape)
        self.dtype = dtype

    async def read_into(self, requests: Sequence[Request], stats: ReadStats) -> None:
        """Refuses."""
        raise TypeError(
            f"{self.name!r} stands for a parameter while its optimizer state is followed; it cannot be read"
        )


def symbol_for(name: str, value: Any) -> View | None:
    """A symbol of the shape and dtype of a leaf; None for what is no array."""
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
    """The symbols that a result is made of, each once, in order."""
    if isinstance(value, View):
        yield from (leaf for leaf in value.leaves() if isinstance(leaf, Symbol))


def is_symbol(value: Any) -> bool:
    """Whether a result is a symbol itself, with nothing done to it."""
    return isinstance(value, LeafView) and isinstance(value.leaf, Symbol)


@dataclasses.dataclass
class Replay:
    """Builds a graph of views again over other leaves.

    Attributes:
      leaf: gives what stands in for a symbol, as an array of the kept dimensions; it may raise `CannotFollowError`.
      casts: whether casts are done, too.
      is_exact: whether everything so far was; cutting or repeating a dimension that was averaged away is not, nor
        is averaging.
    """

    leaf: Callable[[Symbol, Kept], View]
    casts: bool
    is_exact: bool = True

    def build(self, view: View, kept: Kept) -> View:
        """The view over the other leaves; its dimensions are the kept ones of `view`, in order."""
        match view:
            case LeafView():
                return self._leaf(view, kept)
            case Strided():
                return self._walk(view, kept)
            case Cast():
                built = self.build(view.inputs[0], kept)
                return built.astype(view.dtype) if self.casts else built
            case Join():
                return self._join(view, kept)
            case Split():
                return self._split(view, kept)
            case Stack():
                return self._stack(view, kept)
            case Concat():
                return self._concat(view, kept)
            case Average():
                self.is_exact = False
                return Average([self.build(item, kept) for item in view.inputs], view.weights)
            case AllEqual():
                return AllEqual([self.build(item, kept) for item in view.inputs])
        raise CannotFollowError(f"{type(view).__name__} is not known")

    def _leaf(self, view: LeafView, kept: Kept) -> View:
        if isinstance(view.leaf, Symbol):
            return self.leaf(view.leaf, kept)
        if len(kept) == view.ndim:
            self.is_exact = False
            return view
        raise CannotFollowError("a constant has no optimizer state")

    def _walk(self, view: Strided, kept: Kept) -> View:
        source, walk = view.inputs[0], view.walk
        axis_of = {dim: axis for axis, (dim, _) in enumerate(walk.maps) if dim >= 0}
        inner: list[int] = []
        index: list[Any] = []
        for dim, first in enumerate(walk.start):
            axis = axis_of.get(dim)
            if axis is None:
                inner.append(dim)
                index.append(first)
                continue
            step, size = walk.maps[axis][1], walk.shape[axis]
            if axis in kept:
                stop = first + step * size
                inner.append(dim)
                index.append(slice(first, stop if stop >= 0 else None, step))
            elif size != source.shape[dim]:
                self.is_exact = False
        built = self.build(source, frozenset(inner))[tuple(index)]
        order = sorted(dim for dim, axis in axis_of.items() if axis in kept)
        wanted = [dim for axis, (dim, _) in enumerate(walk.maps) if dim >= 0 and axis in kept]
        built = built.transpose(tuple(order.index(dim) for dim in wanted))
        position = 0
        for axis, (dim, _) in enumerate(walk.maps):
            if dim < 0 and walk.shape[axis] != 1:
                self.is_exact = False
            if axis in kept:
                built = repeat(built, walk.shape[axis], position) if dim < 0 else built
                position += 1
        return built

    def _join(self, view: Join, kept: Kept) -> View:
        inner: list[int] = []
        at = 0
        for axis, sizes in enumerate(view.groups):
            if axis in kept:
                inner.extend(range(at, at + len(sizes)))
            at += len(sizes)
        return self.build(view.inputs[0], frozenset(inner)).reshape(_sizes(view, kept))

    def _split(self, view: Split, kept: Kept) -> View:
        inner: list[int] = []
        at = 0
        for dim, sizes in enumerate(view.groups):
            axes = [axis for axis in range(at, at + len(sizes)) if view.shape[axis] != 1]
            at += len(sizes)
            stay = {axis in kept for axis in axes}
            if len(stay) > 1:
                raise CannotFollowError("only a part of a dimension that is split would be averaged")
            if True in stay or not axes:
                inner.append(dim)
        return self.build(view.inputs[0], frozenset(inner)).reshape(_sizes(view, kept))

    def _stack(self, view: Stack, kept: Kept) -> View:
        axis = view.axis
        inner = frozenset(dim - (dim > axis) for dim in kept if dim != axis)
        built = [self.build(item, inner) for item in view.inputs]
        if axis in kept:
            return stack(built, sum(dim < axis for dim in kept))
        self.is_exact = False
        return Average(built, [1.0] * len(built))

    def _concat(self, view: Concat, kept: Kept) -> View:
        axis = view.axis
        built = [self.build(item, kept) for item in view.inputs]
        if axis in kept:
            return concatenate(built, sum(dim < axis for dim in kept))
        self.is_exact = False
        return Average(built, [float(item.shape[axis]) for item in view.inputs])


def _sizes(view: View, kept: Kept) -> tuple[int, ...]:
    return tuple(size for axis, size in enumerate(view.shape) if axis in kept)
