"""Checks that boxes tile an array.

Every element is in exactly one box. Pure, on integers, and quick for any input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from orbax_t5x.lazy.box import Box

# Filling a grid takes at most the number of boxes times its cells; this many steps are a fraction of a second.
MAX_TILING_STEPS = 200_000_000


def box_text(box: Box) -> str:
    """Writes a box as an index expression."""
    return "[" + ", ".join(f"{low}:{high}" for low, high in box) + "]"


class Tiling(NamedTuple):
    """The boxes' fault or None, and the extra steps."""

    problem: str | None
    steps: int = 0


def check_tiling(shape: tuple[int, ...], boxes: Sequence[Box], max_steps: int) -> Tiling:
    """Checks that boxes tile an array, in bounded steps."""
    edges = [sorted({0, size, *(edge for box in boxes for edge in box[dim])}) for dim, size in enumerate(shape)]
    cells = math.prod(len(marks) - 1 for marks in edges)
    place = [{edge: number for number, edge in enumerate(marks)} for marks in edges]
    if cells == len(set(boxes)) == len(boxes) and all(_is_cell(box, place) for box in boxes):
        return Tiling(None)
    steps = cells * len(boxes)
    if steps > max_steps:
        return Tiling(f"its {len(boxes)} slices make a grid of {cells} cells, too many to check")
    held = np.zeros([len(marks) - 1 for marks in edges], np.uint32)
    for box in boxes:
        held[tuple(slice(place[dim][low], place[dim][high]) for dim, (low, high) in enumerate(box))] += 1
    wrong = np.argwhere(held != 1)
    if not len(wrong):
        return Tiling(None, steps)
    cell = tuple((edges[dim][at], edges[dim][at + 1]) for dim, at in enumerate(wrong[0].tolist()))
    count = int(held[tuple(wrong[0])])
    return Tiling(f"{box_text(cell)} of the shape {shape} is in {count or 'none'} of its slices", steps)


def _is_cell(box: Box, place: Sequence[Mapping[int, int]]) -> bool:
    """Reports whether a box spans neighbouring edges in each dimension."""
    return all(places[low] + 1 == places[high] for (low, high), places in zip(box, place, strict=True))
