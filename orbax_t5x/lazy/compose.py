"""The operations on views: they check shapes and dtypes, choose the simplest node, and read nothing."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from orbax_t5x.lazy import assemble as _assemble
from orbax_t5x.lazy import cast as _cast
from orbax_t5x.lazy import reshape as _reshape
from orbax_t5x.lazy import strided as _nodes
from orbax_t5x.lazy.array import LazyArray
from orbax_t5x.lazy.geometry import Walk, index_walk, normalize_axis, reshape_groups, reshape_target
from orbax_t5x.lazy.value import OpaqueLeaf, ValueLeaf
from orbax_t5x.lazy.view import View


def as_view(value: Any, name: str | None = None) -> View:
    """A view of anything that holds an array.

    Args:
      value: a view (returned as it is), a `Leaf`, a lazy array of the get_fn kind, an array or a scalar.
      name: what errors and plans call it where it has no name of its own.
    """
    if isinstance(value, View):
        return value
    if isinstance(value, LazyArray):
        return _nodes.LeafView(OpaqueLeaf(value, name))
    if hasattr(value, "read_into"):
        return _nodes.LeafView(value)
    return _nodes.LeafView(ValueLeaf(value, name))


def walked(view: View, walk: Walk) -> View:
    """A view under a walk over its dimensions, simplified."""
    return _nodes.strided(view, walk)


def index(view: View, key: Any) -> View:
    """Basic indexing."""
    return walked(view, index_walk(key, view.shape))


def transpose(view: View, axes: Iterable[Any] | None) -> View:
    """The dimensions in the order of `axes`, reversed where that is None."""
    rank = view.ndim
    order = tuple(reversed(range(rank))) if axes is None else tuple(normalize_axis(axis, rank) for axis in axes)
    if sorted(order) != list(range(rank)):
        raise ValueError(f"axes {order} are no permutation of the {rank} axes of shape {view.shape}")
    shape = view.shape
    return walked(view, Walk((0,) * rank, tuple((axis, 1) for axis in order), tuple(shape[axis] for axis in order)))


def reshape(view: View, shape: Any) -> View:
    """The same elements in C order under another shape."""
    new = reshape_target(view.shape, (shape,) if hasattr(shape, "__index__") else tuple(shape))
    view = _before_reshapes(view)
    if new == view.shape:
        return view
    if 0 in new:
        # No element, so any walk will do; this one keeps the leaf known.
        return walked(view, Walk((0,) * view.ndim, ((-1, 0),) * len(new), new))
    core = view
    if 1 in view.shape:
        kept = [(axis, size) for axis, size in enumerate(view.shape) if size > 1]
        core = walked(
            view, Walk((0,) * view.ndim, tuple((axis, 1) for axis, _ in kept), tuple(size for _, size in kept))
        )
    groups = reshape_groups(core.shape, [size for size in new if size > 1])
    if any(len(old) > 1 for old, _ in groups):
        core = _reshape.Join(core, tuple(old for old, _ in groups))
    if any(len(parts) > 1 for _, parts in groups):
        core = _reshape.Split(core, tuple(parts for _, parts in groups))
    if 1 not in new:
        return core
    position = iter(range(core.ndim))
    maps = tuple((next(position), 1) if size > 1 else (-1, 0) for size in new)
    return walked(core, Walk((0,) * core.ndim, maps, new))


def _before_reshapes(view: View) -> View:
    """The view under a chain of reshapes: only the last of them counts."""
    while isinstance(view, _reshape.Join | _reshape.Split) or (
        isinstance(view, _nodes.Strided) and view.only_reshapes and 0 not in view.shape
    ):
        view = view.inputs[0]
    return view


def astype(view: View, dtype: Any) -> View:
    """The elements in another dtype."""
    wanted = np.dtype(dtype)
    return view if wanted == view.dtype else _cast.Cast(view, wanted)


def cast_checked(view: View, dtype: Any) -> View:
    """The elements in another dtype, checked as they are read."""
    wanted = np.dtype(dtype)
    return view if wanted == view.dtype else _cast.CheckedCast(view, wanted)


def _same_dtype(kind: str, views: Sequence[View]) -> None:
    first = views[0]
    for position, view in enumerate(views):
        if view.dtype != first.dtype:
            raise ValueError(
                f"{kind} of different dtypes: {first!r}, and as number {position} {view!r}; cast them first"
            )


def stack(views: Iterable[Any], axis: int = 0) -> View:
    """Arrays of one shape side by side on a new axis.

    Raises:
      ValueError: no array, or shapes or dtypes differ; the text names both.
    """
    inputs = tuple(as_view(view) for view in views)
    if not inputs:
        raise ValueError("stack needs at least one array")
    first = inputs[0]
    for position, view in enumerate(inputs):
        if view.shape != first.shape:
            raise ValueError(f"stack of different shapes: {first!r}, and as number {position} {view!r}")
    _same_dtype("stack", inputs)
    at = normalize_axis(axis, first.ndim + 1)
    return _assemble.Stack(inputs, at) if len(inputs) > 1 else repeat(first, 1, at)


def concatenate(views: Iterable[Any], axis: int = 0) -> View:
    """Arrays one after the other along an axis.

    Raises:
      ValueError: no array, rank 0, or shapes (other than along the axis) or dtypes differ; the text names both.
    """
    inputs = tuple(as_view(view) for view in views)
    if not inputs:
        raise ValueError("concatenate needs at least one array")
    first = inputs[0]
    if not first.ndim:
        raise ValueError("arrays of rank 0 cannot be concatenated: stack them")
    at = normalize_axis(axis, first.ndim)
    for position, view in enumerate(inputs):
        if (
            view.ndim != first.ndim
            or view.shape[:at] + view.shape[at + 1 :] != first.shape[:at] + first.shape[at + 1 :]
        ):
            raise ValueError(
                f"concatenate on axis {at} of shapes that differ elsewhere: {first!r}, as number {position} {view!r}"
            )
    _same_dtype("concatenate", inputs)
    flat: list[View] = []
    for view in inputs:
        flat.extend(view.inputs if isinstance(view, _assemble.Concat) and view.axis == at else (view,))
    return _assemble.Concat(tuple(flat), at) if len(flat) > 1 else first


def repeat(view: Any, times: int, axis: int) -> View:
    """An array several times over on a new axis: `numpy.repeat(numpy.expand_dims(a, axis), times, axis)`; read once."""
    source = as_view(view)
    at = normalize_axis(axis, source.ndim + 1)
    count = operator.index(times)
    if count < 0:
        raise ValueError(f"repeat {count} times: negative counts are not allowed")
    maps = tuple((dim, 1) for dim in range(source.ndim))
    shape = (*source.shape[:at], count, *source.shape[at:])
    return walked(source, Walk((0,) * source.ndim, (*maps[:at], (-1, 0), *maps[at:]), shape))


def broadcast_to(view: Any, shape: Sequence[int] | int) -> View:
    """An array broadcast to a shape by NumPy's rules; every element is read once.

    Raises:
      ValueError: naming both shapes where they do not fit.
    """
    source = as_view(view)
    new = tuple(operator.index(size) for size in (shape if isinstance(shape, Iterable) else (shape,)))
    lead = len(new) - source.ndim
    fits = lead >= 0 and all(old in (1, size) for old, size in zip(source.shape, new[lead:], strict=True))
    if not fits or any(size < 0 for size in new):
        raise ValueError(f"cannot broadcast an array of shape {source.shape} to shape {new}")
    maps = [(-1, 0)] * lead
    maps += [(dim, 1) if source.shape[dim] == new[lead + dim] else (-1, 0) for dim in range(source.ndim)]
    return walked(source, Walk((0,) * source.ndim, tuple(maps), new))
