"""Index boxes, and the index arithmetic of views.

Nothing here knows views or leaves, or touches an element. The one bound, `GAP_BYTES`, decides in one place when
elements that are not wanted are read: less than that between two wanted runs is read over, as readers of byte ranges do
anyway; more never is.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, cast

from orbax_t5x.trees.narrow import is_tuple

Box = tuple[tuple[int, int], ...]
"""An index box: (start, stop) per dimension, 0 <= start <= stop <= size. () is the box of a rank-0 array."""


def full_box(shape: Sequence[int]) -> Box:
    """Returns the box of a whole array."""
    return tuple([(0, size) for size in shape])


def box_shape(box: Box) -> tuple[int, ...]:
    """Returns the shape of the array that a box cuts out."""
    return tuple([stop - start for start, stop in box])


def box_size(box: Box) -> int:
    """Returns the number of elements in a box."""
    return math.prod([stop - start for start, stop in box])


def box_slices(box: Box) -> tuple[slice, ...]:
    """Returns the box as a NumPy index."""
    return tuple([slice(start, stop) for start, stop in box])


def intersect(box: Box, other: Box) -> Box | None:
    """Intersects two boxes of the same rank."""
    shared = tuple([(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True)])
    for first, last in shared:
        if first >= last:
            return None
    return shared


def shift(box: Box, outer: Box) -> Box:
    """Returns a box in an outer box's coordinates."""
    return tuple([(first - base, last - base) for (first, last), (base, _) in zip(box, outer, strict=True)])


@functools.lru_cache(maxsize=1 << 12)
def union_size(boxes: tuple[Box, ...]) -> int:
    """Counts the elements of a union of boxes of the same rank."""
    return _union_size(set(boxes))


def _union_size(boxes: Collection[Box]) -> int:
    if len(boxes) < 2:
        return sum([box_size(box) for box in boxes])
    starting: dict[int, list[Box]] = {}
    stopping: dict[int, list[Box]] = {}
    for box in boxes:
        if box_size(box):
            (start, stop), *_ = box
            starting.setdefault(start, []).append(box)
            stopping.setdefault(stop, []).append(box)
    total, before = 0, 0
    inside: dict[Box, None] = {}
    for edge in sorted({*starting, *stopping}):
        if inside:
            total += (edge - before) * _union_size({box[1:] for box in inside})
        for box in stopping.get(edge, ()):
            del inside[box]
        inside.update(dict.fromkeys(starting.get(edge, ())))
        before = edge
    return total


def slices_within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Returns a box as a NumPy index into an outer box's array."""
    return box_slices(shift(box, outer))


# A request costs about a microsecond and a seek; 4 KiB, a page, costs less than either. Lower: more requests for small
# rows. Higher: bytes are read that readers would have skipped.
GAP_BYTES = 4096


class IndexMap(NamedTuple):
    """A map from output indices to input indices.

    Attributes:
      start: for every input dimension, the input index at output index 0.
      maps: for every output dimension (input dimension, step), or (-1, 0) for one that repeats. At most one output
        dimension belongs to an input dimension; an input dimension without one stays at its start.
      shape: of the output.
    """

    start: tuple[int, ...]
    maps: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]


def compose(inner: IndexMap, outer: IndexMap) -> IndexMap:
    """Composes two index maps."""
    start = list(inner.start)
    for dim, first in enumerate(outer.start):
        input_dim, step = inner.maps[dim]
        if input_dim >= 0:
            start[input_dim] += step * first
    maps: list[tuple[int, int]] = []
    for dim, step in outer.maps:
        input_dim, inner_step = inner.maps[dim] if dim >= 0 else (-1, 0)
        maps.append((input_dim, inner_step * step) if input_dim >= 0 else (-1, 0))
    return IndexMap(tuple(start), tuple(maps), outer.shape)


def basic_index(key: Any, shape: tuple[int, ...]) -> IndexMap:
    """Makes the index map of basic indexing."""
    keys: tuple[Any, ...] = key if is_tuple(key) else (key,)
    ellipses = sum(1 for k in keys if k is Ellipsis)
    if ellipses > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    consumed = sum(1 for k in keys if k is not None and k is not Ellipsis)
    if consumed > len(shape):
        raise IndexError(f"too many indices: {consumed} for shape {shape} of rank {len(shape)}")
    if not ellipses:
        keys = (*keys, Ellipsis)
    start: list[int] = []
    maps: list[tuple[int, int]] = []
    out: list[int] = []
    for k in keys:
        if k is None:
            maps.append((-1, 0))
            out.append(1)
        elif k is Ellipsis:
            for _ in range(len(shape) - consumed):
                maps.append((len(start), 1))
                out.append(shape[len(start)])
                start.append(0)
        elif isinstance(k, slice):
            dim = len(start)
            first, stop, step = _slice_indices(cast("slice[Any, Any, Any]", k), shape[dim])
            start.append(first)
            maps.append((dim, step))
            out.append(len(range(first, stop, step)))
        else:
            start.append(_integer(k, len(start), shape))
    return IndexMap(tuple(start), tuple(maps), tuple(out))


def _slice_indices(key: slice, size: int) -> tuple[int, int, int]:
    try:
        return key.indices(size)
    except TypeError:
        raise IndexError(f"a slice of a lazy array takes integers or None, not {key}") from None


def _integer(key: Any, dim: int, shape: tuple[int, ...]) -> int:
    """Returns an integer index, counted from the front."""
    is_bool = isinstance(key, bool) or getattr(getattr(key, "dtype", None), "kind", "") == "b"
    if is_bool or getattr(key, "ndim", 0) != 0 or not hasattr(key, "__index__"):
        raise IndexError(
            f"a lazy array takes integers, slices, None and '...' as indices, not {type(key).__name__}; "
            "indexing with arrays or booleans would read elements one by one: read the array with `.get()` first"
        )
    index = operator.index(key)
    if not -shape[dim] <= index < shape[dim]:
        raise IndexError(f"index {index} is out of bounds for axis {dim} of shape {shape}")
    return index % shape[dim]


def normalize_axis(axis: Any, rank: int) -> int:
    """Returns an axis counted from the front."""
    value = operator.index(axis)
    if not -rank <= value < rank:
        raise ValueError(f"axis {value} is out of bounds for an array of rank {rank}")
    return value % rank


def reshape_target(shape: tuple[int, ...], wanted: Sequence[Any]) -> tuple[int, ...]:
    """Returns the new shape with -1 filled in."""
    new = [operator.index(size) for size in wanted]
    size = math.prod(shape)
    holes = [i for i, extent in enumerate(new) if extent == -1]
    known = math.prod(extent for extent in new if extent != -1)
    if len(holes) == 1 and known > 0 and size % known == 0:
        new[holes[0]] = size // known
    elif holes or any(extent < 0 for extent in new) or math.prod(new) != size:
        raise ValueError(f"cannot reshape a lazy array of shape {shape} ({size} elements) into shape {tuple(new)}")
    return tuple(new)


def reshape_groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns the finest pairs (old sizes, new sizes)."""
    groups: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    i = j = 0
    while i < len(old):
        first_i, first_j = i, j
        left, right = old[i], new[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left, i = left * old[i], i + 1
            else:
                right, j = right * new[j], j + 1
        groups.append((tuple(old[first_i:i]), tuple(new[first_j:j])))
    return groups


def interval_boxes(start: int, stop: int, sizes: Sequence[int]) -> list[tuple[Box, int, int]]:
    """Cuts the flat interval [start, stop) into boxes.

    Each is (box, first, last): the box holds the flat elements [first, last) in order.
    """
    if len(sizes) == 1:
        return [(((start, stop),), start, stop)]
    inner = math.prod(sizes[1:])
    first, last = start // inner, stop // inner
    if first == (stop - 1) // inner and stop - start < inner:
        base = first * inner
        return _prefixed(first, inner, interval_boxes(start - base, stop - base, sizes[1:]))
    pieces: list[tuple[Box, int, int]] = []
    if start % inner:
        pieces += _prefixed(first, inner, interval_boxes(start % inner, inner, sizes[1:]))
        first += 1
    if first < last:
        box = ((first, last), *((0, size) for size in sizes[1:]))
        pieces.append((box, first * inner, last * inner))
    if stop % inner:
        pieces += _prefixed(last, inner, interval_boxes(0, stop % inner, sizes[1:]))
    return pieces


def _prefixed(row: int, inner: int, pieces: list[tuple[Box, int, int]]) -> list[tuple[Box, int, int]]:
    base = row * inner
    return [(((row, row + 1), *box), base + first, base + last) for box, first, last in pieces]


class FlatRun(NamedTuple):
    """A flat interval that covers a box."""

    start: int
    stop: int
    box: Box
    exact: bool


def box_runs(box: Box, sizes: Sequence[int], row_bytes: int) -> list[FlatRun]:
    """Covers a box by flat intervals."""
    if len(sizes) == 1:
        return [FlatRun(*box[0], box, True)]
    start = stop = 0
    # The distance between the first and the last element of the dimensions behind, and the widest gap within it.
    weight, span, widest, outer = 1, 1, 0, -1
    for dim in range(len(sizes) - 1, -1, -1):
        first, last = box[dim]
        start += first * weight
        stop += (last - 1) * weight
        if last - first > 1:
            widest, outer = max(widest, weight - span), dim
            span += (last - first - 1) * weight
        weight *= sizes[dim]
    if not widest or widest * row_bytes < GAP_BYTES:
        return [FlatRun(start, stop + 1, box, not widest)]
    runs: list[FlatRun] = []
    for index in range(*box[outer]):
        runs += box_runs((*box[:outer], (index, index + 1), *box[outer + 1 :]), sizes, row_bytes)
    return runs


def box_text(box: Box) -> str:
    """Writes a box as an index expression."""
    return "[" + ", ".join(f"{low}:{high}" for low, high in box) + "]"
