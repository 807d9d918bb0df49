"""Index boxes: ranges of integers that select elements of an array."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence

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


def bounding_box(boxes: Sequence[Box]) -> Box:
    """Returns the smallest box that holds all boxes."""
    sides = zip(*boxes, strict=True)
    return tuple([(min(low for low, _ in side), max(high for _, high in side)) for side in sides])


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
