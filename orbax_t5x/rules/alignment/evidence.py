"""Proofs of moves by names and structure, whatever the search went by.

Leaves of all layers are judged as one kind. A move stands where its names are equal, or where words and structure rule
out every other leaf of its shape, on both sides. Nothing here knows how moves are found: a mistake of the search opens
leaves, and gives no leaf the values of another.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from orbax_t5x.rules.alignment.tree import NamedLeaf, Path
from orbax_t5x.rules.alignment.words import features, is_of_module, meaning_of, meanings

GIVEN = "given"
UNKNOWN_TURN = "a square matrix, and nothing shows whether it is transposed"
NAME, RENAMING, STRUCTURE = "by its name", "by its name after a renaming", "by structure"
# In place of a layer's number.
_LAYER = "#"
# A module of fewer leaves may be another of the same shapes, where the modules beside it kept their names.
_LEAST_TELLING = 4
# More kinds of one shape are compared by whole names alone.
_MOST_RIVALS = 128
# Layers have at least this share of the leaves of all.
_LEAST_ALIKE = 2 / 3

Shape = tuple[int, ...]
Template = tuple[str, ...]
Ranks = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Move:
    """Move of one leaf, or of the leaves of all layers.

    Attributes:
      sources: names of a leaf, or of each layer's.
      targets: the same on the other side; one side has one name.
      axis: of the layers on the side that has one name for all; None where they are single leaves.
      stacks: whether it is the target's side that has one name for all.
      turns_source, turns_target: whether the matrix is transposed, by the side that is PyTorch's.
      is_named: whether names or numbers distinguish it from other leaves of its shape.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    axis: int | None = None
    stacks: bool = False
    turns_source: bool = False
    turns_target: bool = False
    is_named: bool = dataclasses.field(default=False, compare=False)

    def reversed(self) -> Move:
        """Returns the way back."""
        return Move(
            self.targets,
            self.sources,
            self.axis,
            self.axis is not None and not self.stacks,
            self.turns_target,
            self.turns_source,
            self.is_named,
        )


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Judgement of a move.

    Attributes:
      proof: why it stands; empty where it does not.
      reason: why it does not.
      candidates: kinds of leaves that it may be.
    """

    proof: str
    reason: str = ""
    candidates: tuple[_LeafKind, ...] = ()

    def names(self, ranks: Ranks) -> tuple[str, ...]:
        """Returns the names of candidates, of one layer where they have it."""
        found: list[str] = []
        for kind in self.candidates:
            here = [name for name, its in kind.members.items() if its == ranks]
            found += here or kind.members
        return tuple(found)


@dataclasses.dataclass(eq=False)
class _LeafKind:
    """The leaf of one name in all layers.

    Attributes:
      template: parts of the name, with a mark for a layer's number.
      shape: of each, without the axis of layers.
      dtype: as text.
      members: names, with the place of each in its lists of layers and the lengths of these.
    """

    template: Template
    shape: Shape
    dtype: str
    members: dict[str, Ranks] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def words(self) -> frozenset[str]:
        return features([part for part in self.template if part != _LAYER], 1)

    @functools.cached_property
    def modules(self) -> frozenset[str]:
        """The meanings of the parts that name modules; `b` is one but at the end."""
        parts = [part for part in self.template if part != _LAYER]
        return frozenset(
            meaning_of(part)
            for at, part in enumerate(parts)
            if is_of_module(part) or (at < len(parts) - 1 and meaning_of(part).startswith("kind:"))
        )

    @property
    def last(self) -> str:
        return next((part for part in reversed(self.template) if part != _LAYER), "")

    @property
    def is_square(self) -> bool:
        return len(self.shape) == 2 and self.shape[0] == self.shape[1]

    @property
    def is_in_layers(self) -> bool:
        return _LAYER in self.template


class _Pair(NamedTuple):
    ours: _LeafKind
    theirs: _LeafKind


def judge(
    moves: Iterable[Move], ours: Sequence[NamedLeaf], theirs: Sequence[NamedLeaf], given: Container[str] = ()
) -> dict[str, tuple[str, str, tuple[str, ...]]]:
    """Judges moves between two sides; to those of `given` leaves of the target names and structure need not agree.

    Returns:
      For each leaf of the target what proves its move, or nothing, why it does not stand, and what it may be.
    """
    every = list(dict.fromkeys(moves))
    axes: list[dict[str, int]] = [{}, {}]
    for move in every:
        if move.axis is not None:
            (name,) = move.targets if move.stacks else move.sources
            axes[move.stacks][name] = move.axis
    sides = tuple(_kinds(items, axis) for items, axis in zip((ours, theirs), axes, strict=True))
    links: dict[_LeafKind, dict[_LeafKind, list[Move]]] = {}
    for move in every:
        one, other = sides[0][move.sources[0]], sides[1][move.targets[0]]
        links.setdefault(other, {}).setdefault(one, []).append(move)
    taken = collections.Counter(one for found in links.values() for one in found)
    pairs: list[_Pair] = []
    refused: dict[_LeafKind, str] = {}
    for other, found in links.items():
        one = next(iter(found))
        if len(found) > 1 or taken[one] > 1:
            refused[other] = "its layers would come from different leaves"
        elif not all(_are_in_order(move, one, other) for move in found[one]):
            refused[other] = "its numbers are not those of layers on both sides"
        else:
            pairs.append(_Pair(one, other))
    turned = {
        other: any(m.turns_source or m.turns_target for m in found[next(iter(found))]) for other, found in links.items()
    }
    kinds = tuple(list(dict.fromkeys(side.values())) for side in sides)
    court = _Court(
        kinds[0],
        kinds[1],
        pairs,
        turned,
        _has_dots(ours) == _has_dots(theirs),
        frozenset(kind for name, kind in sides[1].items() if name in given),
    )
    verdicts = {other: Verdict("", reason) for other, reason in refused.items()}
    verdicts.update(court.verdicts())
    return {
        name: (verdict.proof, verdict.reason, verdict.names(other.members.get(name, ())) or move.sources)
        for other, verdict in verdicts.items()
        for found in links[other].values()
        for move in found
        for name in move.targets
    }


def counterparts(
    old: str, new: str, ours: Sequence[NamedLeaf], theirs: Sequence[NamedLeaf]
) -> Iterator[tuple[str, str]]:
    """Yields the leaves of other layers, and of the same module, that two leaves being one makes one."""
    mine, other = _kinds(ours, {}), _kinds(theirs, {})
    pair = _Pair(mine[old], other[new])
    around = [
        [kind for kind in dict.fromkeys(side.values()) if kind is not me and kind.template[:-1] == me.template[:-1]]
        for side, me in zip((mine, other), pair, strict=True)
    ]
    alike = [(one, [kind for kind in around[1] if _last_words(one) & _last_words(kind)]) for one in around[0]]
    for one, its in ((pair.ours, pair.theirs), *((one, found[0]) for one, found in alike if len(found) == 1)):
        by_ranks = {ranks: name for name, ranks in its.members.items()}
        for name, ranks in one.members.items():
            if ranks in by_ranks:
                yield name, by_ranks[ranks]


def _last_words(kind: _LeafKind) -> frozenset[str]:
    return features([kind.last], 1)


class _Court:
    """Both sides by kinds, with the pairs that were found.

    Attributes:
      votes: whether matrices are turned, by the last parts of names on both sides and whether they are in layers.
    """

    def __init__(
        self,
        ours: list[_LeafKind],
        theirs: list[_LeafKind],
        pairs: list[_Pair],
        turned: dict[_LeafKind, bool],
        is_alike: bool,
        given: frozenset[_LeafKind],
    ):
        self._given = given
        self._sides = ours, theirs
        self._pairs = pairs
        self._turned = turned
        self._is_alike = is_alike
        self._target_of = {pair.ours: pair.theirs for pair in pairs}
        self._source_of = {pair.theirs: pair.ours for pair in pairs}
        self._trees = _Tree(ours), _Tree(theirs)
        self._classes = tuple(_by_class(side) for side in self._sides)
        self.votes: dict[tuple[Any, ...], set[bool]] = {}
        names = [{kind.template for kind in side} for side in self._sides]
        self._same = names[0] & names[1]
        self._keeps_names = any(self._common(*pair) - _words_of_all(ours) for pair in pairs)

    def verdicts(self) -> dict[_LeafKind, Verdict]:
        """Judges each pair by its target's kind; what is proven of other shapes tells how matrices lie."""
        blocked = [pair for pair in self._pairs if pair.theirs not in self._given and self._is_blocked(pair)]
        for pair in blocked:
            for tree, kind in zip(self._trees, pair, strict=True):
                tree.taint(kind)
        found: dict[_LeafKind, Verdict] = {}
        for _ in range(2):
            found = {pair.theirs: self._judged(pair) for pair in self._pairs}
            self._vote(found)
        for pair in blocked:
            rivals = self._better(pair) or [pair.ours]
            found[pair.theirs] = Verdict("", "another leaf has more of its name", tuple(rivals))
        return {kind: self._with_orientation(kind, verdict) for kind, verdict in found.items()}

    def _vote(self, found: Mapping[_LeafKind, Verdict]) -> None:
        self.votes = {}
        for pair in self._pairs:
            one, other = pair
            if len(other.shape) == 2 and not other.is_square and found[other].proof:
                for key in self._keys(pair):
                    self.votes.setdefault(key, set()).add(one.shape != other.shape)

    @staticmethod
    def _keys(pair: _Pair) -> tuple[tuple[Any, ...], ...]:
        last = pair.ours.last, pair.theirs.last
        return (*last, pair.ours.is_in_layers or pair.theirs.is_in_layers), last

    def _turns(self, one: _LeafKind, other: _LeafKind) -> bool | None:
        """Returns how matrices of two kinds lie to each other; None without evidence or with both."""
        for key in self._keys(_Pair(one, other)):
            if found := self.votes.get(key):
                return next(iter(found)) if len(found) == 1 else None
        return None

    def _with_orientation(self, kind: _LeafKind, verdict: Verdict) -> Verdict:
        one = self._source_of[kind]
        if not verdict.proof or not kind.is_square:
            return verdict
        turns = self._turns(one, kind)
        if turns is None and not any(key in self.votes for key in self._keys(_Pair(one, kind))):
            is_same = one.last == kind.last and self._is_alike and not self._are_turned_elsewhere(one.last)
            turns = False if is_same else None
        if turns == self._turned[kind]:
            return verdict
        return Verdict("", UNKNOWN_TURN, (one,))

    def _are_turned_elsewhere(self, last: str) -> bool:
        """Tests for namesakes of this kind that have the transposed shape."""
        ours, theirs = (
            {kind.words: kind.shape for kind in side if kind.last == last and len(kind.shape) == 2}
            for side in self._sides
        )
        return any(shape != theirs.get(words, shape) == shape[::-1] for words, shape in ours.items())

    def _common(self, one: _LeafKind, other: _LeafKind) -> frozenset[str]:
        return one.words & other.words

    def _is_better(self, one: _Pair, other: _Pair) -> bool:
        """Tests that names of a pair have more in common than those of another."""
        if _is_equal(*other):
            return False
        return _is_equal(*one) or self._common(*one) > self._common(*other)

    def _rivals(self, pair: _Pair) -> tuple[list[_LeafKind], list[_LeafKind]]:
        """Returns the other kinds of the shape on both sides."""
        found = [
            [kind for kind in classes.get(_class_of(me), ()) if kind is not me]
            for classes, me in zip(self._classes, pair, strict=True)
        ]
        one, other = pair
        return (
            [kind for kind in found[0] if self._fits(kind, other)],
            [kind for kind in found[1] if self._fits(one, kind)],
        )

    def _fits(self, one: _LeafKind, other: _LeafKind) -> bool:
        if len(one.shape) != 2 or one.is_square:
            return True
        turns = self._turns(one, other)
        return turns is None or (one.shape != other.shape) == turns

    def _better(self, pair: _Pair) -> list[_LeafKind]:
        """Returns sources that the target's names prefer, and whose own are no better elsewhere."""
        found: list[_LeafKind] = []
        for rival in self._classes[0].get(_class_of(pair.ours), ()):
            if rival is pair.ours or not self._is_better(_Pair(rival, pair.theirs), pair):
                continue
            its = self._target_of.get(rival)
            if its in self._given:
                continue
            if its is None or self._is_better(_Pair(rival, pair.theirs), _Pair(rival, its)):
                found.append(rival)
        return found

    def _is_blocked(self, pair: _Pair) -> bool:
        """Tests for a pair of leaves that would both rather have each other by their names."""
        if _is_equal(*pair):
            return False
        if self._better(pair):
            return True
        for rival in self._classes[1].get(_class_of(pair.theirs), ()):
            if rival is pair.theirs or not self._is_better(_Pair(pair.ours, rival), pair):
                continue
            its = self._source_of.get(rival)
            if rival in self._given:
                continue
            if its is None or self._is_better(_Pair(pair.ours, rival), _Pair(its, rival)):
                return True
        return False

    def _judged(self, pair: _Pair) -> Verdict:
        one, other = pair
        if other in self._given:
            return Verdict(GIVEN)
        if _is_equal(one, other):
            return Verdict(NAME)
        ours, theirs = self._rivals(pair)
        if max(len(ours), len(theirs)) > _MOST_RIVALS:
            return Verdict("", "too many leaves have its shape", (one,))
        left = [kind for kind in ours if not self._is_ruled_out(pair, _Pair(kind, other), 0)]
        takers = [kind for kind in theirs if not self._is_ruled_out(pair, _Pair(one, kind), 1)]
        if left:
            return Verdict("", "several leaves of its shape are alike", (one, *left))
        if takers:
            return Verdict("", "another leaf of the target may be it", (one,))
        if not self._is_supported(pair):
            return Verdict("", "only its shape speaks for it", (one,))
        return Verdict(RENAMING if self._telling(pair) else STRUCTURE)

    def _is_ruled_out(self, pair: _Pair, rival: _Pair, side: int) -> bool:
        """Tests that names or structure rule out a rival, which has another kind on one side."""
        if self._is_better(pair, rival):
            return True
        kind = rival[side]
        its = (self._target_of, self._source_of)[side].get(kind)
        if its in self._given or kind in self._given:
            return True
        if its is not None:
            own = _Pair(kind, its) if side == 0 else _Pair(its, kind)
            if self._is_better(own, rival):
                return True
        return self._trees[side].are_told_apart(pair[side], kind, self._trees[1 - side], pair[1 - side])

    def _telling(self, pair: _Pair) -> frozenset[str]:
        """Returns words in common that name a module of a few; names that differ in the root have all of them."""
        one, other = pair
        cores = [
            tuple(map(meaning_of, kind.template[len(tree.root) :]))
            for tree, kind in zip(self._trees, pair, strict=True)
        ]
        if cores[0] and cores[0] == cores[1]:
            return frozenset(cores[0])
        return (one.modules & other.modules) - self._words_of_roots

    @functools.cached_property
    def _words_of_roots(self) -> frozenset[str]:
        return frozenset(meaning_of(part) for tree in self._trees for part in tree.root)

    def _is_supported(self, pair: _Pair) -> bool:
        """Tests that more speaks for a pair than its shape: a word, or other leaves of the module around it."""
        if self._telling(pair) or not self._keeps_names:
            return True
        nodes = [tree.module(kind) for tree, kind in zip(self._trees, pair, strict=True)]
        if any(node is None for node in nodes):
            return False
        beside = [
            [_is_below(kind, node) for kind, node in zip(one, nodes, strict=True) if node is not None]
            for one in self._pairs
            if one != pair
        ]
        both = beside.count([True, True])
        return both > beside.count([True, False]) and both > beside.count([False, True])


class _Tree:
    """Kinds of one side by the modules around them; modules with a single child count as the child."""

    def __init__(self, kinds: Sequence[_LeafKind]):
        self._below: dict[Template, dict[str, None]] = {}
        self._at: dict[Template, list[_LeafKind]] = {}
        self._sizes: dict[Template, int] = {}
        self._tainted: set[Template] = set()
        for kind in kinds:
            self._at.setdefault(kind.template, []).append(kind)
            for at in range(len(kind.template) + 1):
                self._sizes[kind.template[:at]] = self._sizes.get(kind.template[:at], 0) + 1
                if at:
                    self._below.setdefault(kind.template[: at - 1], {})[kind.template[at - 1]] = None
        self._numbers: dict[Template, int] = {}
        self._chains: dict[_LeafKind, list[tuple[Template, int]]] = {}

    @functools.cached_property
    def root(self) -> Template:
        """The parts that all names begin with."""
        found: Template = ()
        while len(self._below.get(found, ())) == 1 and found not in self._at:
            found = (*found, next(iter(self._below[found])))
        return found

    def taint(self, kind: _LeafKind) -> None:
        """Notes that a leaf is placed against its name: the structure around it says nothing."""
        self._tainted.update(kind.template[:at] for at in range(len(kind.template) + 1))

    def module(self, kind: _LeafKind) -> Template | None:
        """Returns the module around a leaf; None for the whole model, or for few leaves just below it."""
        chain = self.chain(kind)
        node = chain[1][0] if len(chain) > 1 else ()
        depth = len(node) - len(self.root)
        return node if depth > 1 or _LAYER in node or (depth == 1 and self._sizes[node] >= _LEAST_TELLING) else None

    def chain(self, kind: _LeafKind) -> list[tuple[Template, int]]:
        """Returns the modules around a leaf, innermost first, with a number for the leaf's place in each."""
        if kind not in self._chains:
            number = hash(("leaf", _class_of(kind)))
            chain = [(kind.template, number)]
            for at in range(len(kind.template) - 1, -1, -1):
                node = kind.template[:at]
                if len(self._below[node]) + len(self._at.get(node, ())) > 1:
                    number = hash((self._number(node), number))
                    chain.append((node, number))
            self._chains[kind] = chain
        return self._chains[kind]

    def _number(self, node: Template) -> int:
        """Returns what is equal for modules of one structure."""
        if node not in self._numbers:
            found = sorted(
                [self._number((*node, part)) for part in self._below.get(node, ())]
                + [hash(("leaf", _class_of(kind))) for kind in self._at.get(node, ())]
            )
            self._numbers[node] = found[0] if len(found) == 1 else hash(tuple(found))
        return self._numbers[node]

    def are_told_apart(self, kind: _LeafKind, rival: _LeafKind, other: _Tree, counterpart: _LeafKind) -> bool:
        """Tests that two kinds have different places in a module of both sides."""
        mine, theirs = self.chain(kind), other.chain(counterpart)
        places = dict(self.chain(rival))
        for at, (node, place) in enumerate(mine):
            if node in places and len(node) < len(kind.template):
                same = at < len(theirs) and theirs[at][1] == place
                is_clean = node not in self._tainted and theirs[min(at, len(theirs) - 1)][0] not in other._tainted
                return same and is_clean and places[node] != place
        return False


def _kinds(items: Sequence[NamedLeaf], axes: Mapping[str, int]) -> dict[str, _LeafKind]:
    """Returns the kinds of leaves by names; `axes` of layers of those that are stacked."""
    paths = {item.names[0]: _path(item) for item in items}
    layers = _layers(paths, {item.names[0]: item.shape for item in items})
    found: dict[tuple[Template, Shape], _LeafKind] = {}
    by_name: dict[str, _LeafKind] = {}
    for item in items:
        name = item.names[0]
        template, ranks = _template(paths[name], layers)
        shape = item.shape
        if (axis := axes.get(name)) is not None:
            shape = (*shape[:axis], *shape[axis + 1 :])
        kind = found.setdefault((template, shape), _LeafKind(template, shape, item.dtype))
        kind.members[name] = ranks
        by_name[name] = kind
    return by_name


def _path(item: NamedLeaf) -> Path:
    return item.path[:-1] if len(item.path) > 1 and item.path[-1] == "value" else item.path


def _layers(paths: Mapping[str, Path], shapes: Mapping[str, Shape]) -> dict[Path, list[int]]:
    """Returns the numbers of layers by the path before them: modules beside each other with the same leaves."""
    lists: dict[Path, dict[int, dict[Path, Shape]]] = {}
    beside: dict[Path, set[Any]] = {}
    for name, path in paths.items():
        for at, key in enumerate(path):
            if isinstance(key, int):
                lists.setdefault(path[:at], {}).setdefault(key, {})[path[at + 1 :]] = shapes[name]
                if at:
                    beside.setdefault(path[: at - 1], set())
    for path in paths.values():
        for at in range(len(path)):
            if path[:at] in beside:
                beside[path[:at]].add(path[at])
    return {
        before: sorted(modules)
        for before, modules in lists.items()
        if _are_layers(before, modules, len(beside.get(before[:-1], ())) == 1)
    }


def _are_layers(before: Path, modules: Mapping[int, Mapping[Path, Shape]], is_alone: bool) -> bool:
    every = set(itertools.chain.from_iterable(modules.values()))
    if any(len(one) < _LEAST_ALIKE * len(every) for one in modules.values()):
        return False
    is_named = bool(before) and isinstance(before[-1], str) and meaning_of(before[-1]) == meaning_of("layers")
    # A kernel and its bias are a module, of which numbers show no order.
    is_deep = any(len(rest) > 1 or not meanings(str(next(iter(rest)))).get("kind") for rest in every if rest)
    if is_named or (len(every) > 1 and is_deep):
        return True
    return is_alone and _is_chain([modules[number] for number in sorted(modules)])


def _is_chain(modules: Sequence[Mapping[Path, Shape]]) -> bool:
    """Tests that each module takes what the one before gives, and that they are not all alike."""
    matrices = [[shape for shape in one.values() if len(shape) == 2] for one in modules]
    if any(len(one) != 1 for one in matrices) or len({one[0] for one in matrices}) < 2:
        return False
    pairs = [(one[0], other[0]) for one, other in itertools.pairwise(matrices)]
    return any(all(one[side] == other[1 - side] for one, other in pairs) for side in (0, 1))


def _template(path: Path, layers: Mapping[Path, Sequence[int]]) -> tuple[Template, Ranks]:
    """Returns the parts of a name with marks for layers, and the layer's places."""
    parts: list[str] = []
    ranks: list[tuple[int, int]] = []
    for at, key in enumerate(path):
        if isinstance(key, str):
            parts.append(key)
        elif path[:at] in layers:
            numbers = layers[path[:at]]
            parts.append(_LAYER)
            ranks.append((numbers.index(key), len(numbers)))
        elif parts and parts[-1] != _LAYER:
            parts[-1] = f"{parts[-1]}_{key}"
        else:
            parts.append(str(key))
    return tuple(parts), tuple(ranks)


def _are_in_order(move: Move, one: _LeafKind, other: _LeafKind) -> bool:
    """Tests that layers are the same ones on both sides."""
    sources, targets = (
        [kind.members[name] for name in names] for kind, names in ((one, move.sources), (other, move.targets))
    )
    if move.axis is None:
        (mine,), (theirs,) = sources, targets
        alike = [tuple(rank for rank in ranks if rank[1] > 1) for ranks in (mine, theirs)]
        return alike[0] == alike[1]
    many = sources if move.stacks else targets
    varying = [at for at in range(len(many[0])) if len({ranks[at] for ranks in many}) > 1]
    if not varying:
        return len(many) == 1
    return len(varying) == 1 and [ranks[varying[0]] for ranks in many] == [(at, len(many)) for at in range(len(many))]


def _class_of(kind: _LeafKind) -> tuple[Shape, str]:
    """Returns what two kinds have in common that may be one, transposed or not."""
    return tuple(sorted(kind.shape)) if len(kind.shape) == 2 else kind.shape, kind.dtype


def _by_class(kinds: Iterable[_LeafKind]) -> dict[tuple[Shape, str], list[_LeafKind]]:
    found: dict[tuple[Shape, str], list[_LeafKind]] = {}
    for kind in kinds:
        found.setdefault(_class_of(kind), []).append(kind)
    return found


def _is_equal(one: _LeafKind, other: _LeafKind) -> bool:
    return one.template == other.template


def _is_below(kind: _LeafKind, node: Template) -> bool:
    return kind.template[: len(node)] == node


def _words_of_all(kinds: Sequence[_LeafKind]) -> frozenset[str]:
    return frozenset.intersection(*[kind.words for kind in kinds]) if kinds else frozenset()


def _has_dots(items: Iterable[NamedLeaf]) -> bool:
    return any("." in name for item in items for name in item.names)
