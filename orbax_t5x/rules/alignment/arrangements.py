"""The ways in which two sets of leaves may hold the same arrays: layers stacked or not, matrices transposed or not."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from orbax_t5x.rules.alignment.tree import NamedLeaf, Path, leaf_number
from orbax_t5x.rules.alignment.words import meanings, words_of

# Axes on which layers are stacked.
_AXES = (0, 1, 2, 3)
# Towers of which some may be stacked and others not.
_MOST_TOWERS = 4
_TABLES = frozenset({"shared", "wte", "wpe", "relative"})
_MATRIX, _TORCH_MATRIX = "kernel", "weight"

NamedLeaves = Sequence[NamedLeaf]


class Arrangement(NamedTuple):
    """Leaves of both sides as they would fit."""

    ours: NamedLeaves
    theirs: NamedLeaves


class _EqualLayers(NamedTuple):
    """Layers of equal shapes: the numbered leaves, and those of all layers by their path in a layer."""

    single: frozenset[NamedLeaf]
    by_rest: dict[Path, list[NamedLeaf]]
    before: Path

    def stacked(self, axis: int) -> list[NamedLeaf] | None:
        """Returns the leaves of all layers on an axis; None where a leaf has not that many dimensions."""
        result: list[NamedLeaf] = []
        for rest, items in self.by_rest.items():
            shape = items[0].shape
            if axis > len(shape):
                return None
            names = tuple([item.names[0] for item in items])
            stacked = (*shape[:axis], len(items), *shape[axis:])
            result.append(NamedLeaf(names, stacked, items[0].dtype, self.before + rest, items[0].is_turned, axis))
        return result


def arrangements(ours: NamedLeaves, theirs: NamedLeaves) -> list[Arrangement]:
    """Returns the arrangements in which both sides have the same shapes; else those in which most are."""
    straight = _with_turns(ours, theirs)
    fitting = [arrangement for arrangement in straight if _difference(*arrangement) == 0]
    if fitting:
        return fitting
    stacked = [arrangement for one in straight for arrangement in _with_stacks(one)]
    fitting = [arrangement for arrangement in stacked if _difference(*arrangement) == 0]
    if fitting:
        return fitting
    differences = [_difference(*arrangement) for arrangement in (*straight, *stacked)]
    least = min(differences)
    return [one for one, difference in zip((*straight, *stacked), differences, strict=True) if difference == least]


def _difference(ours: NamedLeaves, theirs: NamedLeaves) -> int:
    """Counts the leaves of either side for which the other has none of their shape."""
    counts = collections.Counter(map(leaf_number, ours))
    counts.subtract(map(leaf_number, theirs))
    return sum(map(abs, counts.values()))


def _with_stacks(arrangement: Arrangement) -> Iterator[Arrangement]:
    """Yields the arrangements in which layers of the side with more leaves are stacked."""
    is_ours = len(arrangement.ours) > len(arrangement.theirs)
    many, few = (arrangement.ours, arrangement.theirs) if is_ours else (arrangement.theirs, arrangement.ours)
    if len(many) == len(few):
        return
    wanted = sum(map(leaf_number, few))
    plain = sum(map(leaf_number, many))
    towers = _towers(many)
    sizes = range(1, len(towers) + 1) if len(towers) <= _MOST_TOWERS else [len(towers)]
    chosen = [some for size in reversed(sizes) for some in itertools.combinations(towers, size)]
    for axis in _AXES:
        by_tower = {id(tower): tower.stacked(axis) for tower in towers}
        bags = {key: sum(map(leaf_number, items)) for key, items in by_tower.items() if items is not None}
        singles = {id(tower): sum(map(leaf_number, tower.single)) for tower in towers}
        for at, some in enumerate(chosen):
            if any(id(tower) not in bags for tower in some):
                continue
            # The first one, of all towers, is the likeliest where none fits.
            if at and plain + sum(bags[id(tower)] - singles[id(tower)] for tower in some) != wanted:
                continue
            gone = frozenset[NamedLeaf]().union(*[tower.single for tower in some])
            items = [item for item in many if item not in gone]
            items += [item for tower in some for item in by_tower[id(tower)] or ()]
            yield Arrangement(items, few) if is_ours else Arrangement(few, items)


def _towers(items: NamedLeaves) -> list[_EqualLayers]:
    """Returns the outermost layers of which each has the same leaves as the others."""
    layers: dict[Path, dict[int, dict[Path, NamedLeaf]]] = {}
    for item in items:
        at = next((at for at, key in enumerate(item.path) if isinstance(key, int)), None)
        if at is not None:
            number = int(item.path[at])
            layers.setdefault(item.path[:at], {}).setdefault(number, {})[item.path[at + 1 :]] = item
    towers: list[_EqualLayers] = []
    for before, by_number in layers.items():
        ordered = [by_number[number] for number in sorted(by_number)]
        shapes = [{rest: leaf_number(item) for rest, item in layer.items()} for layer in ordered]
        if all(one == shapes[0] for one in shapes):
            by_rest = {rest: [layer[rest] for layer in ordered] for rest in ordered[0]}
            towers.append(
                _EqualLayers(frozenset(item for layer in ordered for item in layer.values()), by_rest, before)
            )
    return towers


def _with_turns(ours: NamedLeaves, theirs: NamedLeaves) -> list[Arrangement]:
    """Returns both sides as they are, and with PyTorch's matrices transposed where the other side has Flax's."""
    found = [Arrangement(ours, theirs)]
    mine, other = ({last_part(item) for item in side} for side in (ours, theirs))
    if _TORCH_MATRIX in mine and _MATRIX in other:
        found.append(Arrangement(_transposed(ours, theirs), theirs))
    if _MATRIX in mine and _TORCH_MATRIX in other:
        found.append(Arrangement(ours, _transposed(theirs, ours)))
    return found


def last_part(item: NamedLeaf) -> str:
    """Returns the last part of a leaf's name but for the `value` of Flax's NNX."""
    parts = [key for key in item.path if isinstance(key, str)]
    if len(parts) > 1 and parts[-1] == "value":
        parts.pop()
    return parts[-1] if parts else ""


def _transposed(torch: NamedLeaves, flax: NamedLeaves) -> list[NamedLeaf]:
    """Transposes PyTorch's matrices that are no tables of embeddings."""
    tables = {item.shape for item in flax if "embedding" in meanings(last_part(item)).get("kind", ())}
    matrices = {item.shape for item in flax if last_part(item) == _MATRIX}

    def is_table(item: NamedLeaf) -> bool:
        words = {word for key in item.path if isinstance(key, str) for word in words_of(key)}
        is_named = not words.isdisjoint(_TABLES) or any(word.startswith("embed") for word in words)
        return item.shape in tables and (is_named or item.shape[::-1] not in matrices)

    return [
        dataclasses.replace(item, shape=item.shape[::-1], is_turned=True)
        if len(item.shape) == 2 and last_part(item) == _TORCH_MATRIX and not is_table(item)
        else item
        for item in torch
    ]
