"""Turns: which matrices of two sides are transposed to each other.

Matrices that are not square show how others of their kind lie, square ones included.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

from orbax_t5x.rules.alignment.kinds import LeafKind, Sides
from orbax_t5x.rules.alignment.layers import Shape
from orbax_t5x.rules.alignment.words import meanings

UNKNOWN_TURN = "another order of its dimensions has its shape, too, and nothing shows which is meant"
Key = tuple[str, str, str]


class Turns:
    """Turns of the matrices of two sides, by pairs and by counts."""

    def __init__(self, sides: Sides):
        self._sides = sides
        self._by_counts = _turns_by_counts(sides)
        self._seen: collections.Counter[tuple[Key, bool]] = collections.Counter()

    def count(self, source: LeafKind, target: LeafKind, times: int) -> None:
        """Adds a proven pair, or removes it."""
        if source.is_matrix and target.is_matrix and not target.is_square:
            self._seen[_key(source, target), source.shape != target.shape] += times

    def forget(self, source: LeafKind, target: LeafKind) -> None:
        """Makes the kind of a pair unknown."""
        self._by_counts[_key(source, target)] = {True, False}

    def of(self, source: LeafKind, target: LeafKind) -> bool | None:
        """Tests if kinds are transposed to each other; None if unknown."""
        if source.is_ordered:
            return False
        if not (source.is_matrix and target.is_matrix):
            is_same = source.last == target.last and self._sides.is_alike
            return None if not is_same and _has_other_order(target.shape) else False
        if not target.is_square:
            return source.shape != target.shape
        if source.heads and target.heads:
            return (source.width == 2) != (target.width == 2)
        found = self._of_others(source, target)
        if found:
            return next(iter(found)) if len(found) == 1 else None
        is_same = source.last == target.last and self._sides.is_alike and not self._are_turned_elsewhere(source.last)
        return False if is_same else None

    def _of_others(self, source: LeafKind, target: LeafKind) -> set[bool]:
        """Finds how other matrices of the kind lie.

        Leaves outside of layers may be tables, which are never turned.
        """
        last, other, place = _key(source, target)
        found = self._found((last, other, place))
        if not found and place != "table":
            found = self._found((last, other, "layer" if place == "" else ""))
            are_tables = any("embedding" in meanings(word).get("kind", ()) for word in (last, other))
            found = found - {False} if are_tables and len(found) == 1 else found
        return found

    def _found(self, key: Key) -> set[bool]:
        seen = {is_turned for is_turned in (False, True) if self._seen[key, is_turned] > 0}
        return seen | self._by_counts.get(key, set())

    def _are_turned_elsewhere(self, last: str) -> bool:
        """Tests for namesakes of this kind that have the reversed shape."""
        ours, theirs = (
            {kind.words: kind.shape for kind in tree.kinds if kind.last == last and kind.is_matrix}
            for tree in (self._sides.source, self._sides.target)
        )
        return any(shape != theirs.get(words, shape) == shape[::-1] for words, shape in ours.items())

    def may_lie_so(self, source: LeafKind, target: LeafKind) -> bool:
        """Tests that other matrices of its kind lie as a pair would."""
        if source.is_matrix and target.is_matrix and not target.is_square:
            found = self._of_others(source, target)
            return len(found) != 1 or (source.shape != target.shape) in found
        return True


def _has_other_order(shape: Shape) -> bool:
    """Tests if another usual order of dimensions has this shape.

    Dimensions of 1 do not count.
    """
    sizes = tuple(size for size in shape if size != 1)
    orders = [sizes[::-1], (*sizes[:-2], *sizes[:-3:-1]), (*sizes[2:], *sizes[1::-1])]
    if len(sizes) == 3:  # heads before or after the width
        orders.append((*sizes[1::-1], sizes[2]))
    return len(sizes) > 1 and sizes in orders


def _key(source: LeafKind, target: LeafKind) -> Key:
    """Returns the common properties of matrices that lie alike."""
    place = (
        "table" if source.is_table or target.is_table else "layer" if source.is_in_layers or target.is_in_layers else ""
    )
    return _array(source.last), _array(target.last), place


def _array(last: str) -> str:
    """Returns an array's name in its module; projections may have none."""
    return "" if meanings(last).get("projection") else last


def _turns_by_counts(sides: Sides) -> dict[Key, set[bool]]:
    """Returns how matrices lie if counts of shapes decide."""
    found: dict[Key, set[bool]] = {}
    counts = [_counts(tree.kinds) for tree in (sides.source, sides.target)]
    for (last, place), ours in counts[0].items():
        for (their_last, their_place), theirs in counts[1].items():
            if place != their_place:
                continue
            straight, turned = ours == theirs, {shape[::-1]: count for shape, count in ours.items()} == theirs
            if straight != turned:
                found[last, their_last, place] = {turned}
    return found


def _counts(kinds: Iterable[LeafKind]) -> dict[tuple[str, str], dict[Shape, int]]:
    found: dict[tuple[str, str], dict[Shape, int]] = {}
    for kind in kinds:
        if kind.is_matrix and not kind.is_square:
            key = _key(kind, kind)[1:]
            shapes = found.setdefault(key, {})
            shapes[kind.shape] = shapes.get(kind.shape, 0) + 1
    return found
