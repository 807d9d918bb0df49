"""Index boxes: which elements of an array are meant, as integers."""

from __future__ import annotations

import math
from collections.abc import Sequence

Box = tuple[tuple[int, int], ...]
"""An index box: (start, stop) per dimension, 0 <= start <= stop <= size. () is the box of a rank-0 array."""


def full_box(shape: Sequence[int]) -> Box:
    """The box of a whole array."""
    return tuple((0, size) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """The shape of the array that a box cuts out."""
    return tuple([stop - start for start, stop in box])


def box_size(box: Box) -> int:
    """The number of elements in a box."""
    return math.prod([stop - start for start, stop in box])


def box_slices(box: Box) -> tuple[slice, ...]:
    """The box as a NumPy index."""
    return tuple(slice(start, stop) for start, stop in box)
