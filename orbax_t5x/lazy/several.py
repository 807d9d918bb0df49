"""Views made of several arrays; nothing is read.

Stack, concatenate, average, pad, scale, add a product, require equality.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from orbax_t5x.lazy.assemble import ConcatNode, concatenated, padded, stacked
from orbax_t5x.lazy.box import normalize_axis
from orbax_t5x.lazy.combine import AllEqualNode, average_node, low_rank_node, scaled_node
from orbax_t5x.lazy.node import Node
from orbax_t5x.lazy.view import View, as_view, repeat


def stack(views: Iterable[Any], axis: int = 0) -> View:
    """Stacks arrays of the same shape on a new axis.

    Raises:
      ValueError: no array, or shapes or dtypes differ; the text names both.

    Example:
      >>> ot.stack([np.zeros(2), np.ones(2)], axis=1).get()
      array([[0., 1.],
             [0., 1.]])
    """
    inputs = _inputs("stack", views)
    _check_shapes("stack", inputs)
    _check_dtypes("stack", inputs)
    first = inputs[0]
    at = normalize_axis(axis, first.ndim + 1)
    return View(stacked(_nodes(inputs), at)) if len(inputs) > 1 else repeat(first, 1, at)


def concatenate(views: Iterable[Any], axis: int = 0) -> View:
    """Concatenates arrays along an axis.

    Raises:
      ValueError: no array, rank 0, or shapes (other than along the axis) or dtypes differ; the text names both.

    Example:
      >>> ot.concatenate([np.zeros((1, 2)), np.ones((2, 2))]).get()
      array([[0., 0.],
             [1., 1.],
             [1., 1.]])
    """
    inputs = _inputs("concatenate", views)
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
    _check_dtypes("concatenate", inputs)
    flat: list[Node] = []
    for view in inputs:
        node = view.node
        flat.extend(node.inputs if isinstance(node, ConcatNode) and node.axis == at else (node,))
    return View(concatenated(tuple(flat), at)) if len(flat) > 1 else first


def average(views: Iterable[Any], weights: Sequence[float]) -> View:
    """Averages arrays with weights, as `numpy.average` does.

    They have the same shape; computed box by box. Weights are divided by their sum. The result has the arrays' common
    dtype by JAX's promotion and is computed in float32 or wider; integers are rounded to the nearest even, and one that
    would leave its range raises `LeafMismatchError` when it is read.

    Raises:
      ValueError: no array, shapes that differ, weights that do not fit, or dtypes without a common one.
      TypeError: what holds no numbers.
    """
    inputs = _inputs("average", views)
    _check_shapes("average", inputs)
    return View(average_node(_nodes(inputs), weights))


def pad(view: Any, filler: Any, filling: str) -> View:
    """Places an array at the origin of a larger array."""
    old, new = _inputs("pad", [view, filler])
    _check_dtypes("pad", [old, new])
    if old.ndim != new.ndim or any(size > wanted for size, wanted in zip(old.shape, new.shape, strict=True)):
        raise ValueError(f"cannot pad an array of shape {old.shape} to shape {new.shape}")
    return View(padded(old.node, new.node, filling))


def add_low_rank(kernel: Any, down: Any, up: Any, scale: float) -> View:
    """Computes `kernel + scale * tensordot(down, up, 1)`, rounded once."""
    return View(low_rank_node(as_view(kernel).node, as_view(down).node, as_view(up).node, scale))


def scaled(view: Any, scale: Any) -> View:
    """Multiplies an array by a number, or rows by numbers."""
    return View(scaled_node(as_view(view).node, as_view(scale).node))


def all_equal(views: Iterable[Any], *, advice: str = "") -> View:
    """Returns the first of arrays that must be equal.

    They are compared bit for bit; if they differ, reading raises `LeafMismatchError`.
    """
    inputs = _inputs("all_equal", views)
    _check_shapes("all_equal", inputs)
    _check_dtypes("all_equal", inputs)
    return View(AllEqualNode(inputs[0].shape, inputs[0].dtype, _nodes(inputs), advice))


def _inputs(function: str, views: Iterable[Any]) -> tuple[View, ...]:
    inputs = tuple(as_view(view) for view in views)
    if not inputs:
        raise ValueError(f"{function} needs at least one array")
    return inputs


def _nodes(views: Sequence[View]) -> tuple[Node, ...]:
    return tuple(view.node for view in views)


def _check_shapes(function: str, views: Sequence[View]) -> None:
    first = views[0]
    for position, view in enumerate(views):
        if view.shape != first.shape:
            raise ValueError(f"{function} of different shapes: {first!r}, and as number {position} {view!r}")


def _check_dtypes(function: str, views: Sequence[View]) -> None:
    first = views[0]
    for position, view in enumerate(views):
        if view.dtype != first.dtype:
            raise ValueError(
                f"{function} of different dtypes: {first!r}, and as number {position} {view!r}; cast them first"
            )
