"""Kinds of leaves: a kind is a leaf in all layers.

Layers on an axis count as leaves of their own, if the other side has as many layers that are single leaves.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from orbax_t5x.rules.alignment.words import Path, contradict, features, is_of_module, meaning_of, meanings

# In place of a layer's number.
LAYER = "#"
# Layers have at least this share of the leaves of all.
_LEAST_ALIKE = 2 / 3
# Numbers of modules that begin with 1.
_COUNTED = ("one", "two", "three")
# Axes on which layers are stacked.
_AXES = (0, 1, 2, 3)

Shape = tuple[int, ...]
Template = tuple[str, ...]
Ranks = tuple[tuple[int, int], ...]


class NamedLeaf(NamedTuple):
    """A leaf, or a layer of it.

    Attributes:
      name: in its tree.
      shape: without the axis of layers.
      dtype: as text.
      path: of the name.
      layer: number of the layer on `axis`; None for a whole leaf.
      axis: of the layers.
    """

    name: str
    shape: Shape
    dtype: str
    path: Path
    layer: int | None = None
    axis: int | None = None


@dataclasses.dataclass(eq=False)
class LeafKind:
    """The leaf of a name in all layers.

    Attributes:
      template: parts of the name, with a mark for a layer's number.
      parts: the words of the name.
      shape: of each.
      bag: shape and dtype, equal for kinds that may be one, transposed or not.
      members: leaves by their places in lists of layers, with the lengths of these.
    """

    template: Template
    parts: Template
    shape: Shape
    bag: tuple[Any, ...]
    members: dict[Ranks, NamedLeaf] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def words(self) -> frozenset[str]:
        """Parts by their meanings, and single words of them."""
        return features(self.parts, 1) | {f" {word}" for word in features(self.parts, 2)}

    @functools.cached_property
    def module_parts(self) -> Template:
        """The parts that name modules; a last `b` names an array."""
        last = len(self.parts) - 1
        return tuple(
            part
            for at, part in enumerate(self.parts)
            if is_of_module(part) or (at < last and meaning_of(part).startswith("kind:"))
        )

    @functools.cached_property
    def modules(self) -> frozenset[str]:
        """The meanings of the parts that name modules."""
        return frozenset(map(meaning_of, self.module_parts))

    @functools.cached_property
    def meanings(self) -> Template:
        """The parts of the template by their meanings."""
        return tuple(map(meaning_of, self.template))

    @property
    def last(self) -> str:
        """The last part, which names the array in its module."""
        return self.parts[-1] if self.parts else ""

    @property
    def is_in_layers(self) -> bool:
        """True where its name has a mark."""
        return LAYER in self.template

    @property
    def is_matrix(self) -> bool:
        """True for two dimensions."""
        return len(self.shape) == 2

    @property
    def is_square(self) -> bool:
        """True for a matrix whose shape does not show how it lies."""
        return self.is_matrix and self.shape[0] == self.shape[1]

    @functools.cached_property
    def places(self) -> frozenset[Ranks]:
        """The places of its members."""
        return frozenset(self.members)


class Tree:
    """Kinds of a side by the modules around them.

    Modules with a single child count as the child.
    """

    def __init__(self, kinds: Sequence[LeafKind]):
        self._below: dict[Template, dict[str, None]] = {}
        self._at: dict[Template, list[LeafKind]] = {}
        self._numbers: dict[Template, int] = {}
        self._bags: dict[Template, collections.Counter[tuple[Any, ...]]] = {}
        self._chains: dict[LeafKind, list[tuple[Template, int]]] = {}
        self._twins: dict[LeafKind, list[Template]] = {}
        self._tails_of: dict[Template, frozenset[Template]] = {}
        self.kinds = kinds
        self.by_bag: dict[tuple[Any, ...], list[LeafKind]] = {}
        self.by_template: dict[tuple[Template, Any], LeafKind] = {}
        self.kind_of: dict[tuple[str, int | None], LeafKind] = {}
        for kind in kinds:
            self._at.setdefault(kind.template, []).append(kind)
            self.by_bag.setdefault(kind.bag, []).append(kind)
            self.by_template[kind.template, kind.bag] = kind
            self.kind_of.update(((leaf.name, leaf.layer), kind) for leaf in kind.members.values())
            for at in range(1, len(kind.template) + 1):
                self._below.setdefault(kind.template[: at - 1], {})[kind.template[at - 1]] = None

    @functools.cached_property
    def root(self) -> Template:
        """The parts that all names begin with."""
        found: Template = ()
        while len(self._below.get(found, ())) == 1 and found not in self._at and LAYER not in self._below[found]:
            found = (*found, next(iter(self._below[found])))
        return found

    def bags(self, node: Template) -> collections.Counter[tuple[Any, ...]]:
        """Counts the kinds of a shape in a module."""
        if node not in self._bags:
            inside = [kind.bag for kind in self.kinds if kind.template[: len(node)] == node]
            self._bags[node] = collections.Counter(inside)
        return self._bags[node]

    def chain(self, kind: LeafKind) -> list[tuple[Template, int]]:
        """Returns the modules around a leaf with the leaf's places, innermost first."""
        if kind not in self._chains:
            number = hash(("leaf", kind.bag))
            chain = [(kind.template, number)]
            for at in range(len(kind.template) - 1, -1, -1):
                node = kind.template[:at]
                if len(self._below[node]) + len(self._at.get(node, ())) > 1:
                    number = hash((self._number(node), number))
                    chain.append((node, number))
            self._chains[kind] = chain
        return self._chains[kind]

    def twin_towers(self, kind: LeafKind) -> list[Template]:
        """Returns alike modules beside a leaf's that have its namesake."""
        if kind not in self._twins:
            found: list[Template] = []
            for at in range(len(kind.template) - 2):
                tails = self._tails(kind.template[: at + 1])
                for part in self._below[kind.template[:at]]:
                    other = self._tails((*kind.template[:at], part)) if part != kind.template[at] else frozenset()
                    is_alike = 2 * len(tails & other) >= max(len(tails), len(other))
                    if is_alike and kind.meanings[at + 1 :] in other:
                        found.append((*kind.template[:at], part))
            self._twins[kind] = found
        return self._twins[kind]

    def _tails(self, node: Template) -> frozenset[Template]:
        """Returns the meanings of all names in a module, from there."""
        if node not in self._tails_of:
            size = len(node)
            inside = (kind.meanings[size:] for kind in self.kinds if kind.template[:size] == node)
            self._tails_of[node] = frozenset(inside)
        return self._tails_of[node]

    def _number(self, node: Template) -> int:
        """Numbers modules by their structure."""
        if node not in self._numbers:
            found = sorted(
                [self._number((*node, part)) for part in self._below.get(node, ())]
                + [hash(("leaf", kind.bag)) for kind in self._at.get(node, ())]
            )
            self._numbers[node] = found[0] if len(found) == 1 else hash(tuple(found))
        return self._numbers[node]


class Sides:
    """Kinds of a source and a target, and their similarities."""

    def __init__(self, ours: Sequence[NamedLeaf], theirs: Sequence[NamedLeaf]):
        sides, lists = _unrolled(ours, theirs)
        layers = _agreeing([_layers(side, forced) for side, forced in zip(sides, lists, strict=True)], sides, lists)
        # Without dimensions of 1 where the other side has none of the shape.
        bags = [{_bag(leaf.shape, leaf.dtype) for leaf in side} for side in sides]
        self.source, self.target = (
            Tree(_kinds(side, its, other)) for side, its, other in zip(sides, layers, reversed(bags), strict=True)
        )
        lasts = [{kind.last for kind in tree.kinds} for tree in (self.source, self.target)]
        self.is_alike = _has_dots(ours) == _has_dots(theirs) and (lasts[0] <= lasts[1] or lasts[1] <= lasts[0])
        self._words: dict[tuple[LeafKind, LeafKind], frozenset[str]] = {}
        self._contradictions: dict[tuple[Template, Template], bool] = {}

    def common(self, one: LeafKind, other: LeafKind) -> frozenset[str]:
        """Returns the words of both names."""
        if (one, other) not in self._words:
            self._words[one, other] = one.words & other.words
        return self._words[one, other]

    def contradict(self, one: LeafKind, other: LeafKind) -> bool:
        """Tests for words that are known to name different modules."""
        key = one.parts, other.parts
        if key not in self._contradictions:
            self._contradictions[key] = contradict(*key)
        return self._contradictions[key]

    def may_be_one(self, one: LeafKind, other: LeafKind) -> bool:
        """Tests layers and dimensions of two kinds of a bag."""
        if one.is_matrix and other.is_matrix:
            return not one.places.isdisjoint(other.places)
        straight = [tuple(size for size in kind.shape if size != 1) for kind in (one, other)]
        return straight[0] == straight[1] and not one.places.isdisjoint(other.places)


def _has_dots(leaves: Iterable[NamedLeaf]) -> bool:
    return any("." in leaf.name for leaf in leaves)


def _bag(shape: Shape, dtype: str) -> tuple[Any, ...]:
    return tuple(sorted(shape)) if len(shape) == 2 else shape, dtype


def _kinds(
    leaves: Sequence[NamedLeaf], layers: Mapping[Path, Sequence[int]], other: set[tuple[Any, ...]]
) -> list[LeafKind]:
    lists = _lists(leaves)
    numbers = {before: sorted(found) for before, found in lists.items()}
    ordered = {before for before, modules in lists.items() if _are_ordered(modules)}
    for leaf in leaves:
        for at, key in enumerate(leaf.path):
            if isinstance(key, str) and leaf.path[:at] in numbers and numbers[leaf.path[:at]][0] > 0:
                numbers[leaf.path[:at]].insert(0, 0)  # `linear` beside `linear_1`
    found: dict[Any, LeafKind] = {}
    for leaf in leaves:
        template, parts, ranks = _template(leaf.path, layers, numbers, ordered)
        bag = _bag(leaf.shape, leaf.dtype)
        if bag not in other and 1 in leaf.shape:
            bag = _bag(tuple(size for size in leaf.shape if size != 1), leaf.dtype)
        kind = found.setdefault((template, leaf.shape, bag), LeafKind(template, parts, leaf.shape, bag))
        kind.members[ranks] = leaf
    return list(found.values())


def _lists(leaves: Iterable[NamedLeaf]) -> dict[Path, dict[int, dict[Path, Shape]]]:
    """Returns numbered modules by the path before the number."""
    lists: dict[Path, dict[int, dict[Path, Shape]]] = {}
    for leaf in leaves:
        for at, key in enumerate(leaf.path):
            if isinstance(key, int):
                lists.setdefault(leaf.path[:at], {}).setdefault(key, {})[leaf.path[at + 1 :]] = leaf.shape
    return lists


def _layers(leaves: Sequence[NamedLeaf], forced: set[Path]) -> dict[Path, list[int]]:
    """Returns numbers of layers with equal leaves, by path."""
    beside: dict[Path, set[Any]] = {}
    lists = _lists(leaves)
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
        {before: tuple(key for key in before[root:] if isinstance(key, str)) for before in _lists(leaves)}
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


def _are_ordered(modules: Mapping[int, Mapping[Path, Shape]]) -> bool:
    """Tests if the shapes of numbered modules show an order."""
    matrices = [[shape for shape in modules[number].values() if len(shape) == 2] for number in sorted(modules)]
    if not any(matrices):
        return True
    if len(matrices) not in (2, 3) or any(len(one) != 1 for one in matrices):
        return False
    first, second, last = matrices[0][0], matrices[1][0], matrices[-1][0]
    return first[0] != first[1] and first == second[::-1] and (len(matrices) == 2 or first == last)


def _are_alike(modules: Mapping[int, Mapping[Path, Shape]]) -> bool:
    every = set(itertools.chain.from_iterable(modules.values()))
    return all(len(one) >= _LEAST_ALIKE * len(every) for one in modules.values())


def _are_layers(before: Path, modules: Mapping[int, Mapping[Path, Shape]], is_alone: bool) -> bool:
    if not _are_alike(modules):
        return False
    every = set(itertools.chain.from_iterable(modules.values()))
    is_named = bool(before) and isinstance(before[-1], str) and meaning_of(before[-1]) == meaning_of("layers")
    # A kernel and its bias are a module, of which numbers show no order.
    is_deep = any(len(rest) > 1 or not meanings(str(next(iter(rest)))).get("kind") for rest in every if rest)
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


def _template(
    path: Path, layers: Mapping[Path, Sequence[int]], numbers: Mapping[Path, Sequence[int]], ordered: Collection[Path]
) -> tuple[Template, Template, Ranks]:
    """Returns the template of a name, its words, and its places."""
    parts: list[str] = []
    words: list[str] = []
    ranks: list[tuple[int, int]] = []
    for at, key in enumerate(path):
        if isinstance(key, str):
            parts.append(key)
            words.append(key)
        elif path[:at] in layers:
            places = layers[path[:at]]
            parts.append(LAYER)
            if len(places) > 1:
                ranks.append((places.index(key), len(places)))
        elif parts and parts[-1] != LAYER:
            stem, parts[-1] = parts[-1], f"{parts[-1]}_{key}"
            beside = numbers[path[:at]]
            # Of one module the number says nothing, and of several those beside it are part of what it says.
            # Flax numbers its classes from 0: of these the first is lacking.
            is_counted = path[:at] in ordered and beside[0] == 1 and key <= len(_COUNTED) and stem.islower()
            counted = [f"{stem}_{_COUNTED[key - 1]}"] if is_counted else []
            known = [text for text in (parts[-1], *counted) if meanings(text)]
            if known:
                words[-1] = known[0]
            elif beside != [0]:
                words[-1] = f"{parts[-1]} of {beside}"
        else:
            parts.append(str(key))
            words.append(f"{key} of {numbers[path[:at]]}")
    return tuple(parts), tuple(words), tuple(ranks)


# -- layers on an axis


def _unrolled(ours: Sequence[NamedLeaf], theirs: Sequence[NamedLeaf]) -> tuple[list[list[NamedLeaf]], list[set[Path]]]:
    """Returns both sides with layers on an axis as leaves."""
    sides, forced = [list(ours), list(theirs)], [set[Path](), set[Path]()]
    for one in (0, 1):
        many, few = sides[1 - one], sides[one]
        lists = {before: found for before, found in _lists(many).items() if len(found) > 1 and _are_alike(found)}
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
    def bags(self) -> collections.Counter[Any]:
        """Shapes of the layers' leaves, with how many there are."""
        return collections.Counter(_bag(_without(leaf.shape, self.axis), "") for leaf in self.leaves)

    def fits(self, modules: Mapping[int, Mapping[Path, Shape]]) -> int:
        """Counts the leaves with layers of a list of modules."""
        bags = {_bag(shape, "") for one in modules.values() for shape in one.values()}
        return sum(_bag(_without(leaf.shape, self.axis), "") in bags for leaf in self.leaves)


def _common_stacks(sides: Sequence[Sequence[NamedLeaf]]) -> list[list[_Stack]]:
    """Returns modules with equal stacked layers on both sides."""
    every = [list(_possible_stacks(leaves)) for leaves in sides]
    found: list[list[_Stack]] = []
    for mine, others in (every, every[::-1]):
        bags = {(stack.count, frozenset(stack.bags.items())) for stack in others}
        fitting: dict[Path, list[_Stack]] = {}
        for stack in mine:
            if (stack.count, frozenset(stack.bags.items())) in bags:
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
        if len(ranks) < 2 or min(ranks) < 2:
            continue
        for axis in _AXES[: min(ranks)]:
            counts = {leaf.shape[axis] for leaf in some}
            if len(counts) == 1 and counts != {1}:
                yield _Stack(before, some, axis, counts.pop())


def _without(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])


def _stacks(
    few: Sequence[NamedLeaf], many: Sequence[NamedLeaf], lists: Mapping[Path, Mapping[int, Mapping[Path, Shape]]]
) -> Iterator[_Stack]:
    """Yields the largest modules with a dimension for the other side's layers."""
    if not lists:
        return
    whole = {_bag(leaf.shape, "") for leaf in many}
    bags: dict[int, set[Any]] = collections.defaultdict(set)
    for found in lists.values():
        bags[len(found)] |= {_bag(shape, "") for one in found.values() for shape in one.values()}
    below: dict[Path, list[NamedLeaf]] = {}
    for leaf in few:
        for at in range(len(leaf.path)):
            below.setdefault(leaf.path[:at], []).append(leaf)
    taken: set[str] = set()
    own = {before: found for before, found in _lists(few).items() if _are_alike(found)}
    for before, found in sorted(own.items(), key=lambda one: len(one[0])):
        for stack in _blocks(before, found, below[before], bags, own, below):
            if taken.isdisjoint(leaf.name for leaf in stack.leaves):
                taken |= {leaf.name for leaf in stack.leaves}
                yield stack
                break
    for before in sorted(below, key=len):
        leaves = below[before]
        is_before_number = all(isinstance(leaf.path[len(before)], int) for leaf in leaves)
        if is_before_number or any(leaf.name in taken for leaf in leaves):
            continue
        ways: list[tuple[int, int, int]] = []
        for count, layers in bags.items():
            for axis in _AXES:
                if all(len(leaf.shape) > axis and leaf.shape[axis] == count for leaf in leaves):
                    good = sum(
                        _bag(_without(leaf.shape, axis), "") in layers and _bag(leaf.shape, "") not in whole
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
    bags: Mapping[int, set[Any]],
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
        shapes = {_bag(_without(leaf.shape, axis), "") for leaf in leaves}
        for count, layers in bags.items():
            if count < 2 * size or count // size != next(iter(counts)) or not shapes <= layers:
                continue
            left = count % size
            rests = [
                other
                for other, found in lists.items()
                if other != before and set(found) == set(range(left))
                and {_bag(shape, "") for one in found.values() for shape in one.values()} <= shapes
            ]  # fmt: skip
            if not left:
                yield _Stack(before, leaves, axis, count, size)
            elif len(rests) == 1:
                yield _Stack(before, [*leaves, *below[rests[0]]], axis, count, size, rests[0])
