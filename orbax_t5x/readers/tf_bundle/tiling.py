"""Do boxes tile an array, every element in exactly one? Pure, on integers, and quick for any input."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from orbax_t5x.lazy.box import Box

# Filling the grid takes at most the number of boxes times its cells: a fraction of a second.
_MAX_STEPS = 200_000_000


def box_text(box: Box) -> str:
    """A box as an index expression."""
    return "[" + ", ".join(f"{low}:{high}" for low, high in box) + "]"


def tiling_problem(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """What is wrong with boxes that should tile an array, or None.

    The boxes' edges cut the array into a grid; it is enough to look at the grid's cells.

    Args:
      shape: of the array.
      boxes: inside the array.
    """
    edges = [sorted({0, size, *(edge for box in boxes for edge in box[dim])}) for dim, size in enumerate(shape)]
    cells = math.prod(len(marks) - 1 for marks in edges)
    if cells * len(boxes) > _MAX_STEPS:
        return f"its {len(boxes)} slices make a grid of {cells} cells, too many to check"
    place = [{edge: number for number, edge in enumerate(marks)} for marks in edges]
    held = np.zeros([len(marks) - 1 for marks in edges], np.uint32)
    for box in boxes:
        held[tuple(slice(place[dim][low], place[dim][high]) for dim, (low, high) in enumerate(box))] += 1
    wrong = np.argwhere(held != 1)
    if not len(wrong):
        return None
    cell = tuple((edges[dim][at], edges[dim][at + 1]) for dim, at in enumerate(wrong[0].tolist()))
    count = int(held[tuple(wrong[0])])
    return f"{box_text(cell)} of the shape {shape} is in {count or 'none'} of its slices"
