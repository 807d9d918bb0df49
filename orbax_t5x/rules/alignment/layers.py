"""Layers of two sides: numbered modules, and axes of stacked leaves.

Layers on an axis count as leaves of their own, if the other side has as many layers that are single leaves.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from orbax_t5x.rules.alignment.words import Path, is_of_attention, meaning_of, meanings

# In place of a layer's number.
LAYER = "#"
# Layers have at least this share of the leaves of all.
_LEAST_ALIKE = 2 / 3
# Axes on which layers are stacked.
_AXES = (0, 1, 2, 3)

Shape = tuple[int, ...]


class NamedLeaf(NamedTuple):
    """A leaf, or a layer of it.

    Attributes:
      name: in its tree.
      shape: without the axis of layers.
      dtype: as text.
      path: of the name.
      layer: number of the layer on `axis`; None for a whole leaf.
      axis: of the layers.
      full: the shape with heads of an array whose `shape` joins these; empty for other arrays.
      width: the dimension of `full` that is the model's width.
      order: of the array's dimensions in `shape`; empty for their own.
    """

    name: str
    shape: Shape
    dtype: str
    path: Path
    layer: int | None = None
    axis: int | None = None
    full: Shape = ()
    width: int | None = None
    order: Shape = ()


def bag_of(shape: Shape, dtype: str) -> tuple[Any, ...]:
    """Returns a key that a matrix shares with its transpose."""
    return tuple(sorted(shape)) if len(shape) == 2 else shape, dtype


def _size_of(shape: Shape) -> int:
    """Returns the number of entries, equal in all layouts."""
    return math.prod(shape)


def lists_of(leaves: Iterable[NamedLeaf]) -> dict[Path, dict[int, dict[Path, Shape]]]:
    """Returns numbered modules by the path before the number."""
    lists: dict[Path, dict[int, dict[Path, Shape]]] = {}
    for leaf in leaves:
        for at, key in enumerate(leaf.path):
            if isinstance(key, int):
                lists.setdefault(leaf.path[:at], {}).setdefault(key, {})[leaf.path[at + 1 :]] = leaf.shape
    return lists


def leaves_and_layers(
    ours: Sequence[NamedLeaf], theirs: Sequence[NamedLeaf]
) -> tuple[list[list[NamedLeaf]], list[dict[Path, list[int]]]]:
    """Returns each side's leaves by layers, and numbers of layers by path."""
    sides, forced = _unrolled(ours, theirs)
    layers = [_layers(side, its) for side, its in zip(sides, forced, strict=True)]
    return sides, _agreeing(layers, sides, forced)


def _layers(leaves: Sequence[NamedLeaf], forced: set[Path]) -> dict[Path, list[int]]:
    """Returns numbers of layers with equal leaves, by path."""
    beside: dict[Path, set[Any]] = {}
    lists = lists_of(leaves)
    parents = {before[:-1] for before in lists if before}
    for leaf in leaves:
        for at in range(len(leaf.path)):
            if leaf.path[:at] in parents:
                beside.setdefault(leaf.path[:at], set()).add(leaf.path[at])
    return {
        before: sorted(modules)
        for before, modules in lists.items()
        if before in forced or _are_layers(before, modules, len(beside.get(before[:-1], ())) == 1)
    }


def _agreeing(
    layers: Sequence[dict[Path, list[int]]], sides: Sequence[Sequence[NamedLeaf]], forced: Sequence[set[Path]]
) -> list[dict[Path, list[int]]]:
    """Leaves out lists that are layers on one side only."""
    roots = [_root_of(leaves) for leaves in sides]
    places = [
        {before: tuple(key for key in before[root:] if isinstance(key, str)) for before in lists_of(leaves)}
        for leaves, root in zip(sides, roots, strict=True)
    ]
    unlike = {
        place for its, found in zip(layers, places, strict=True) for before, place in found.items() if before not in its
    }
    return [
        {before: numbers for before, numbers in its.items() if before in kept or found[before] not in unlike}
        for its, found, kept in zip(layers, places, forced, strict=True)
    ]


def _root_of(leaves: Sequence[NamedLeaf]) -> int:
    """Counts the words before the first difference of paths."""
    at = 0
    while True:
        found = {leaf.path[at] if at < len(leaf.path) else None for leaf in leaves}
        if len(found) != 1 or not isinstance(next(iter(found)), str):
            return at - 1 if at and all(isinstance(key, int) for key in found) else at
        at += 1


def _are_alike(modules: Mapping[int, Mapping[Path, Shape]]) -> bool:
    every = set(itertools.chain.from_iterable(modules.values()))
    return all(len(one) >= _LEAST_ALIKE * len(every) for one in modules.values())


def _are_layers(before: Path, modules: Mapping[int, Mapping[Path, Shape]], is_alone: bool) -> bool:
    if not _are_alike(modules):
        return False
    every = set(itertools.chain.from_iterable(modules.values()))
    is_named = bool(before) and isinstance(before[-1], str) and meaning_of(before[-1]) == meaning_of("layers")
    # A kernel and its bias are a module, of which numbers show no order.
    named = [[key for key in rest if isinstance(key, str)] for rest in every]
    is_deep = any(len(rest) > 1 or not meanings(rest[0]).get("kind") for rest in named if rest)
    numbers = sorted(modules)
    if len(numbers) == 1 and not is_named:
        return False
    if (len(every) > 1 and is_deep) or (is_named and numbers == [*range(numbers[0], numbers[0] + len(numbers))]):
        return True
    # Unlike modules in a layer have no order that shows what they are.
    is_alone &= not any(isinstance(key, int) for key in before)
    return is_alone and _is_chain([modules[number] for number in numbers])


def _is_chain(modules: Sequence[Mapping[Path, Shape]]) -> bool:
    """Tests that unlike modules take each other's outputs."""
    matrices = [[shape for shape in one.values() if len(shape) == 2] for one in modules]
    if any(len(one) != 1 for one in matrices) or len({one[0] for one in matrices}) < 2:
        return False
    pairs = [(one[0], other[0]) for one, other in itertools.pairwise(matrices)]
    return any(all(one[side] == other[1 - side] for one, other in pairs) for side in (0, 1))


# -- layers on an axis


def _unrolled(ours: Sequence[NamedLeaf], theirs: Sequence[NamedLeaf]) -> tuple[list[list[NamedLeaf]], list[set[Path]]]:
    """Returns both sides with layers on an axis as leaves."""
    sides, forced = [list(ours), list(theirs)], [set[Path](), set[Path]()]
    for one in (0, 1):
        many, few = sides[1 - one], sides[one]
        lists = {before: found for before, found in lists_of(many).items() if len(found) > 1 and _are_alike(found)}
        changed: dict[str, list[NamedLeaf]] = {}
        for stack in _stacks(few, many, lists):
            changed.update((leaf.name, stack.layers(leaf)) for leaf in stack.leaves)
            forced[one].add(stack.before)
            fits = {before: stack.fits(found) for before, found in lists.items() if len(found) == stack.count}
            forced[1 - one] |= {before for before, count in fits.items() if count == max(fits.values())}
        sides[one] = [layer for leaf in few for layer in changed.get(leaf.name, [leaf])]
    for one, stacks in enumerate(_common_stacks(sides)):
        changed = {leaf.name: stack.layers(leaf) for stack in stacks for leaf in stack.leaves}
        forced[one] |= {stack.before for stack in stacks}
        sides[one] = [layer for leaf in sides[one] for layer in changed.get(leaf.name, [leaf])]
    return sides, forced


@dataclasses.dataclass(frozen=True)
class _Stack:
    """Leaves with a dimension for layers or for blocks of layers.

    Attributes:
      before: path before the layer's number.
      leaves: all below it.
      axis: of the layers.
      count: of the other side's layers.
      block: layers in a block; 0 without blocks.
      rest: path before the numbers of the layers after all blocks.
    """

    before: Path
    leaves: Sequence[NamedLeaf]
    axis: int
    count: int
    block: int = 0
    rest: Path | None = None

    def layers(self, leaf: NamedLeaf) -> list[NamedLeaf]:
        at = len(self.before)
        if self.rest is not None and leaf.path[: len(self.rest)] == self.rest:
            at = len(self.rest)
            number = self.count - self.count % self.block + int(leaf.path[at])
            return [leaf._replace(path=(*self.before, number, *leaf.path[at + 1 :]))]
        first, step, rest = (
            (int(leaf.path[at]), self.block, leaf.path[at + 1 :]) if self.block else (0, 1, leaf.path[at:])
        )
        return [
            NamedLeaf(
                leaf.name,
                _without(leaf.shape, self.axis),
                leaf.dtype,
                (*self.before, first + step * layer, *rest),
                layer,
                self.axis,
            )
            for layer in range(leaf.shape[self.axis])
        ]

    @property
    def sizes(self) -> collections.Counter[Any]:
        """Sizes of the layers' leaves, with how many there are."""
        return collections.Counter(_size_of(_without(leaf.shape, self.axis)) for leaf in self.leaves)

    def fits(self, modules: Mapping[int, Mapping[Path, Shape]]) -> int:
        """Counts the leaves with layers of a list of modules."""
        bags = {_size_of(shape) for one in modules.values() for shape in one.values()}
        return sum(_size_of(_without(leaf.shape, self.axis)) in bags for leaf in self.leaves)


def _common_stacks(sides: Sequence[Sequence[NamedLeaf]]) -> list[list[_Stack]]:
    """Returns modules with equal stacked layers on both sides."""
    every = [list(_possible_stacks(leaves)) for leaves in sides]
    found: list[list[_Stack]] = []
    for mine, others in (every, every[::-1]):
        bags = {(stack.count, frozenset(stack.sizes.items())) for stack in others}
        fitting: dict[Path, list[_Stack]] = {}
        for stack in mine:
            if (stack.count, frozenset(stack.sizes.items())) in bags:
                fitting.setdefault(stack.before, []).append(stack)
        found.append([])
        for before, some in sorted(fitting.items(), key=lambda item: len(item[0])):
            if len(some) == 1 and not any(stack.before == before[: len(stack.before)] for stack in found[-1]):
                found[-1].append(some[0])
    return found


def _possible_stacks(leaves: Sequence[NamedLeaf]) -> Iterator[_Stack]:
    """Yields modules of leaves with the same size on an axis."""
    below: dict[Path, list[NamedLeaf]] = {}
    for leaf in leaves:
        for at in range(len(leaf.path)) if leaf.layer is None else ():
            below.setdefault(leaf.path[:at], []).append(leaf)
    for before, some in below.items():
        ranks = {len(leaf.shape) for leaf in some}
        if len(ranks) < 2 or min(ranks) < 2 or is_of_attention(before):
            continue
        for axis in _AXES[: min(ranks)]:
            counts = {leaf.shape[axis] for leaf in some}
            if len(counts) == 1 and counts != {1}:
                yield _Stack(before, some, axis, counts.pop())


def _depth(path: Path, lists: Mapping[Path, Mapping[int, Mapping[Path, Shape]]]) -> int:
    """Counts the lists of several modules around a path."""
    around = [lists.get(path[:at], {}) for at, key in enumerate(path) if isinstance(key, int)]
    return sum(len(found) > 1 and any(any(one) for one in found.values()) for found in around)


def _without(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])


def _stacks(
    few: Sequence[NamedLeaf], many: Sequence[NamedLeaf], lists: Mapping[Path, Mapping[int, Mapping[Path, Shape]]]
) -> Iterator[_Stack]:
    """Yields the largest modules with a dimension for the other side's layers."""
    if not lists:
        return
    whole = {bag_of(leaf.shape, "") for leaf in many}
    # By the number of layers, in all and for each depth of lists.
    bags: dict[int, set[int]] = collections.defaultdict(set)
    deep: dict[tuple[int, int], set[int]] = collections.defaultdict(set)
    for before, found in lists.items():
        sizes = {_size_of(shape) for one in found.values() for shape in one.values()}
        bags[len(found)] |= sizes
        deep[len(found), _depth(before, lists)] |= sizes
    below: dict[Path, list[NamedLeaf]] = {}
    for leaf in few:
        for at in range(len(leaf.path) + 1):
            below.setdefault(leaf.path[:at], []).append(leaf)
    taken: set[str] = set()
    own = {before: found for before, found in lists_of(few).items() if _are_alike(found)}
    for before, found in sorted(own.items(), key=lambda one: len(one[0])):
        for stack in _blocks(before, found, below[before], bags, own, below):
            if taken.isdisjoint(leaf.name for leaf in stack.leaves):
                taken |= {leaf.name for leaf in stack.leaves}
                yield stack
                break
    for before in sorted(below, key=len):
        leaves = below[before]
        is_before_number = {type(key) for leaf in leaves for key in leaf.path[len(before) :][:1]} == {int}
        if is_before_number or any(leaf.name in taken for leaf in leaves) or is_of_attention(before):
            continue
        ways: list[tuple[int, int, int]] = []
        depth = _depth(before, own)
        for (count, around), layers in deep.items():
            for axis in _AXES if around == depth else ():
                if not all(len(leaf.shape) > axis and leaf.shape[axis] == count for leaf in leaves):
                    continue
                # What has no other dimension may be one without layers.
                if all(len(leaf.shape) > 1 or 1 in layers for leaf in leaves):
                    good = sum(
                        _size_of(_without(leaf.shape, axis)) in layers and bag_of(leaf.shape, "") not in whole
                        for leaf in leaves
                    )
                    if 2 * good >= len(leaves) and good:
                        ways.append((good, axis, count))
        ways.sort(reverse=True)
        if ways and (len(ways) == 1 or ways[0][0] > ways[1][0]):
            taken |= {leaf.name for leaf in leaves}
            yield _Stack(before, leaves, *ways[0][1:])


def _blocks(
    before: Path,
    modules: Mapping[int, Mapping[Path, Shape]],
    leaves: Sequence[NamedLeaf],
    bags: Mapping[int, set[int]],
    lists: Mapping[Path, Mapping[int, Mapping[Path, Shape]]],
    below: Mapping[Path, Sequence[NamedLeaf]],
) -> Iterator[_Stack]:
    """Yields the blocks that a list of stacked layers can be."""
    size = len(modules)
    if size < 2 or set(modules) != set(range(size)):
        return
    for axis in _AXES:
        counts = {leaf.shape[axis] if len(leaf.shape) > axis else 0 for leaf in leaves}
        if len(counts) != 1:
            continue
        shapes = {_size_of(_without(leaf.shape, axis)) for leaf in leaves}
        for count, layers in bags.items():
            if count < 2 * size or count // size != next(iter(counts)) or not shapes <= layers:
                continue
            left = count % size
            rests = [
                other
                for other, found in lists.items()
                if other != before and set(found) == set(range(left))
                and {_size_of(shape) for one in found.values() for shape in one.values()} <= shapes
            ]  # fmt: skip
            if not left:
                yield _Stack(before, leaves, axis, count, size)
            elif len(rests) == 1:
                yield _Stack(before, [*leaves, *below[rests[0]]], axis, count, size, rests[0])
