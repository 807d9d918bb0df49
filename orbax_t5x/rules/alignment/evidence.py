"""Proofs that leaves of a source and a target correspond.

A pair stands where names are equal, or where every other leaf that either may be is ruled out: by better names, by its
own proven pair, by its layers, by how matrices lie, by the module around, or by its place in a module of one structure.
Each proof rests on earlier ones alone.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Mapping
from typing import Final, Literal

from orbax_t5x.rules.alignment.kinds import LeafKind, Sides, Template, Tree, layer_of
from orbax_t5x.rules.alignment.turns import Turns
from orbax_t5x.rules.alignment.words import features, meaning_of

Proof = Literal["given", "name", "renaming", "structure"]
GIVEN: Final = "given"
NAME: Final = "name"
RENAMING: Final = "renaming"
STRUCTURE: Final = "structure"
_REVERSED = "its namesake has the reversed shape: ot.transforms.Transpose, if it is the same array"

Pairs = Mapping[LeafKind, LeafKind]


class Evidence:
    """Pairs that are proven of two sides.

    Args:
      sides: with all kinds.
      given: pairs of source and target that need no proof.
      may_contradict: whether known words for different modules are no contradiction.

    Attributes:
      proven: sources by targets.
      target_of: targets by sources.
      why: what proves a target's pair, or why it has none.
      rivals: sources that a target without a pair may be.
    """

    def __init__(self, sides: Sides, given: Pairs, *, may_contradict: bool = False):
        self.proven: dict[LeafKind, LeafKind] = {}
        self.target_of: dict[LeafKind, LeafKind] = {}
        self.why: dict[LeafKind, str] = {}
        self.rivals: dict[LeafKind, list[LeafKind]] = {}
        self._sides = sides
        self._may_contradict = may_contradict
        self._pairs: Pairs = given
        self._sources: dict[LeafKind, LeafKind] = {}
        self.turns = Turns(sides)
        self._below: tuple[dict[Template, dict[LeafKind, None]], ...] = ({}, {})
        self._kept: collections.Counter[str] = collections.Counter()
        self._tainted: tuple[set[Template], ...] = (set(), set())
        for target, source in given.items():
            self._add(source, target, GIVEN)

    # -- what is proven so far

    def _add(self, source: LeafKind, target: LeafKind, why: str) -> None:
        self.proven[target], self.target_of[source], self.why[target] = source, target, why
        self.rivals.pop(target, None)
        self._count(source, target, 1)
        for below, kind in zip(self._below, (source, target), strict=True):
            for at in range(len(kind.template)):
                below.setdefault(kind.template[:at], {})[kind] = None

    def _remove(self, source: LeafKind, target: LeafKind) -> None:
        del self.proven[target], self.target_of[source]
        self._count(source, target, -1)
        for below, kind in zip(self._below, (source, target), strict=True):
            for at in range(len(kind.template)):
                del below[kind.template[:at]][kind]

    def _count(self, source: LeafKind, target: LeafKind, times: int) -> None:
        for word in self._sides.common(source, target):
            self._kept[word] += times
        self.turns.count(source, target, times)

    def _is_given_turned(self, last: str) -> bool:
        """Tests for an answer that turns a namesake."""
        return any(
            self.why[target] == GIVEN and source.last == target.last == last and source.shape != target.shape
            for target, source in self.proven.items()
            if source.is_matrix
        )

    def is_possible(self, source: LeafKind, target: LeafKind) -> bool:
        """Tests layers, known words, and how other matrices lie."""
        if not self._sides.may_be_one(source, target):
            return False
        if not self._may_contradict and self._sides.contradict(source, target):
            return False
        return self.turns.may_lie_so(source, target)

    def nearness(self, source: LeafKind, target: LeafKind) -> float:
        """Returns the shared part of the innermost proven modules."""
        found = 0.0
        for side, (mine, their) in enumerate(((source, target), (target, source))):
            _, partners = self._around(mine, side)
            depth = max((_shared(one, their) for one in partners), default=0)
            found += depth / max(len(their.template), 1)  # a tree may be one array, without a name
        return found

    def _around(self, kind: LeafKind, side: int) -> tuple[Template, list[LeafKind]]:
        """Returns the innermost module with proven leaves, and their partners."""
        other = self.target_of if side == 0 else self.proven
        for at in range(len(kind.template) - 1, len(self._tree(side).root), -1):
            found = [other[one] for one in self._below[side].get(kind.template[:at], ()) if one is not kind]
            if found:
                return kind.template[:at], found
        return (), []

    def _tree(self, side: int) -> Tree:
        return self._sides.target if side else self._sides.source

    # -- proofs

    def prove(self, pairs: Pairs) -> bool:
        """Proves pairs in turn; returns True if any was proven."""
        self._pairs = pairs
        self._sources = {source: target for target, source in pairs.items()}
        for tainted in self._tainted:
            tainted.clear()
        for target, source in pairs.items():
            if self._better_rival(source, target) and self.why.get(target) != GIVEN:
                for tainted, kind in zip(self._tainted, (source, target), strict=True):
                    tainted.update(kind.template[:at] for at in range(len(kind.template) + 1))
        before = len(self.proven)
        # Structure is judged when all that names prove is known.
        for proofs in ((NAME,), (NAME, RENAMING), (NAME, RENAMING, STRUCTURE)):
            count = -1
            while count != len(self.proven):
                count = len(self.proven)
                for target, source in pairs.items():
                    if target not in self.proven:
                        proof, reason, rivals = self._judged(source, target)
                        if proof in proofs:
                            self._add(source, target, proof)
                        else:
                            self.why[target], self.rivals[target] = reason, rivals
        while self._withdraw():
            pass
        return len(self.proven) > before

    def _withdraw(self) -> bool:
        """Removes pairs that later evidence contradicts."""
        wrong: list[LeafKind] = []
        for target, source in list(self.proven.items()):
            proof = self.why[target]
            if proof == GIVEN:
                continue
            self._remove(source, target)
            found, reason, rivals = self._judged(source, target)
            self._add(source, target, found or proof)
            if not found:
                wrong.append(target)
                self.why[target], self.rivals[target] = reason, rivals
        for target in wrong:
            self._remove(self.proven[target], target)
        return bool(wrong)

    def _judged(self, source: LeafKind, target: LeafKind) -> tuple[str, str, list[LeafKind]]:
        """Returns the proof of a pair, or the reason and rivals."""
        is_turned = source.is_matrix and target.is_matrix and not target.is_square and source.shape != target.shape
        if is_turned and source.last == target.last and self._sides.is_alike and not self._is_given_turned(source.last):
            self.turns.forget(source, target)
            return "", _REVERSED, [source]
        if source.template == target.template:
            return NAME, "", []
        rival = self._better_rival(source, target)
        if rival is not None:
            return "", "another leaf has more of its name", [rival, source]
        if self._is_moved(source, target):
            return "", "its name is that of another module, which is there, too", [source]
        if self._is_beside_another(source, target):
            return "", "the leaves beside it are another module's", [source]
        if self._is_of_other_make(source, target):
            return "", "its module has other arrays", [source]
        if self._lacks_twin(source, target, 0) or self._lacks_twin(target, source, 1):
            return "", "an alike tower has no such pair, though other leaves that may be its", [source]
        left = [one for one in self._rivals(source, target, 0) if not self._is_ruled_out(source, target, one, 0)]
        if left:
            return "", "several leaves of its shape are alike", [source, *left]
        takers = [one for one in self._rivals(target, source, 1) if not self._is_ruled_out(target, source, one, 1)]
        if takers:
            return "", "another leaf of the target may be it", [source]
        is_named = bool(self._telling(source, target)) or self._is_renamed_alike(source, target)
        if not is_named and not _has_words_of(source, target) and not self._is_supported(source, target):
            return "", "only its shape speaks for it", [source]
        if not _is_called_the_same(source, target) and self._is_uneven(source, target):
            return "", "one side has more leaves of its shape there: which are lacking, nothing shows", [source]
        return RENAMING if is_named else STRUCTURE, "", []

    def _is_uneven(self, source: LeafKind, target: LeafKind) -> bool:
        """Tests for another number of such leaves in the layer."""
        counts = [
            sum(
                layer_of(one.template) == layer_of(kind.template) and one.places == kind.places
                for one in tree.by_bag[kind.bag]
            )
            for tree, kind in ((self._sides.source, source), (self._sides.target, target))
        ]
        return counts[0] != counts[1]

    def _rivals(self, kind: LeafKind, other: LeafKind, side: int) -> Iterator[LeafKind]:
        for one in self._tree(side).by_bag[kind.bag]:
            if one is not kind and self.is_possible(*_ordered(one, other, side)):
                yield one

    def _is_better(self, one: tuple[LeafKind, LeafKind], other: tuple[LeafKind, LeafKind]) -> bool:
        """Tests that names of a pair have more in common."""
        if other[0].template == other[1].template:
            return False
        return one[0].template == one[1].template or self._sides.common(*one) > self._sides.common(*other)

    def _is_better_named(self, one: tuple[LeafKind, LeafKind], other: tuple[LeafKind, LeafKind]) -> bool:
        """Tests the same of names as they stand."""
        if self._sides.contradict(*one):
            return False
        return one[0].own_words & one[1].own_words > other[0].own_words & other[1].own_words

    def _partner(self, kind: LeafKind, side: int) -> LeafKind | None:
        return (self._pairs if side else self._sources).get(kind)

    def _better_rival(self, source: LeafKind, target: LeafKind) -> LeafKind | None:
        """Finds a leaf with a better name and no better partner.

        Layers do not count.
        """
        pair = source, target
        for side, (kind, other) in enumerate((pair, pair[::-1])):
            for one in self._tree(side).by_bag[kind.bag]:
                rival = _ordered(one, other, side)
                if one is kind or not (self._is_better(rival, pair) or self._is_better_named(rival, pair)):
                    continue
                if rival[0].template != rival[1].template and not self.turns.may_lie_so(*rival):
                    continue
                its = self._partner(one, side)
                settled = self.target_of if side == 0 else self.proven
                if one in settled or (its is not None and self._is_better(_ordered(one, its, side), rival)):
                    continue
                return rival[0]
        return None

    def _is_moved(self, source: LeafKind, target: LeafKind) -> bool:
        """Tests for words that other pairs keep and this pair loses."""
        ours, theirs = source.modules - target.modules, target.modules - source.modules
        return any(self._keeps(one, other) and self._keeps(other, one) for one in ours for other in theirs)

    def _keeps(self, word: str, other: str) -> bool:
        """Tests for a proven pair that keeps the only shared word."""
        return self._kept[word] > 0 and any(
            word in one.words and word in its.words and other not in one.words and other not in its.words
            for its, one in self.proven.items()
        )

    def _is_beside_another(self, source: LeafKind, target: LeafKind) -> bool:
        """Tests that both innermost modules have other partners."""
        ours, theirs = (
            [one for one in below.get(kind.template[:-1], ()) if one.template[:-1] == kind.template[:-1]]
            for below, kind in zip(self._below, (source, target), strict=True)
        )
        forth = any(self.target_of[one].template[:-1] == target.template[:-1] for one in ours)
        back = any(self.proven[one].template[:-1] == source.template[:-1] for one in theirs)
        return bool(ours and theirs) and not forth and not back

    def _is_of_other_make(self, source: LeafKind, target: LeafKind) -> bool:
        """Tests that each module has an array without a counterpart."""
        ours, theirs = (
            collections.Counter(math.prod(one.shape) for one in tree.beside(kind))
            for tree, kind in ((self._sides.source, source), (self._sides.target, target))
        )
        return not ours <= theirs and not theirs <= ours

    def _lacks_twin(self, kind: LeafKind, other: LeafKind, side: int) -> bool:
        """Tests that an alike tower has no such pair of other words.

        New and moved modules share words with modules that are left out.
        """
        if kind.module_parts[-1:] == other.module_parts[-1:]:
            return False
        settled = self.proven if side == 0 else self.target_of
        others = [one for one in self._tree(1 - side).by_bag[other.bag] if one is not other]
        # Numbered towers are layers; there a twin is the same kind.
        lacking, layer = kind.places - other.places, layer_of(other.template)
        if any(one not in settled and layer_of(one.template) == layer and one.places & lacking for one in others):
            return True
        for tower in self._tree(side).twin_towers(kind):
            tail = kind.below(len(tower))
            for its in self._towers_of(tower, kind, other, side):
                size = len(its)
                there = {one.below(size): one for one in others if one.template[:size] == its}
                if other.below(size) in there:
                    continue
                beside = {one.below(size) for one in others if one.template[:size] == other.template[:size]}
                for name, one in there.items():
                    partner = settled.get(one)
                    # The twin's partner is here, too, and is as good.
                    is_twins = partner is not None and partner.below(len(tower)) == tail and name in beside
                    if partner is None or is_twins:
                        return True
        return False

    def _towers_of(self, tower: Template, kind: LeafKind, other: LeafKind, side: int) -> set[Template]:
        """Finds a tower's counterparts, by proven pairs or by name."""
        at, most = len(tower) - 1, len(other.template) - 2
        partners = self.target_of if side == 0 else self.proven
        shared = [
            (one.template, _shared(one, other)) for one in map(partners.get, self._below[side].get(tower, ())) if one
        ]
        return {template[: size + 1] for template, size in shared if size < most} or {
            (*other.template[:size], tower[at])
            for size, part in enumerate(other.template[: max(most, 0)])
            if part == kind.template[at]
        }

    def _is_ruled_out(self, kind: LeafKind, other: LeafKind, rival: LeafKind, side: int) -> bool:
        """Tests that a rival of this side is not its pair's."""
        pair, its = _ordered(kind, other, side), self._partner(rival, side)
        wrong = _ordered(rival, other, side)
        if rival in (self.target_of if side == 0 else self.proven) or self._is_better(pair, wrong):
            return True
        if its is not None and self._is_better(_ordered(rival, its, side), wrong):
            return True
        return self._is_in_other_module(kind, other, rival, side) or self._has_other_place(kind, other, rival, side)

    def _is_in_other_module(self, kind: LeafKind, other: LeafKind, rival: LeafKind, side: int) -> bool:
        """Tests that proven neighbours exclude the rival's module."""
        module, partners = self._around(other, 1 - side)
        at = _shared(kind, rival)
        if not partners or any(_shared(one, kind) <= at for one in partners):
            return False
        bags = [self._tree(side).bags(kind.template[:size]) for size in (at, at + 1)]
        # The module may be the counterpart of a larger one, of both leaves.
        return all(
            count <= bags[1][bag] or bags[0][bag] == bags[1][bag]
            for bag, count in self._tree(1 - side).bags(module).items()
        )

    def _has_other_place(self, kind: LeafKind, other: LeafKind, rival: LeafKind, side: int) -> bool:
        """Tests that a proven module has both leaves elsewhere."""
        mine, theirs = self._tree(side).chain(kind), self._tree(1 - side).chain(other)
        places = dict(self._tree(side).chain(rival))
        for at, (node, _) in enumerate(mine):
            if node in places and len(node) < len(kind.template):
                if at >= len(theirs) or theirs[at][1] != mine[at][1] or places[node] == mine[at][1]:
                    return False
                return node not in self._tainted[side] and theirs[at][0] not in self._tainted[1 - side]
        return False

    def _telling(self, source: LeafKind, target: LeafKind) -> frozenset[str]:
        """Returns shared words that name a module of a few.

        Names that differ in the root have all of them.
        """
        roots = [tree.root for tree in (self._sides.source, self._sides.target)]
        cores = [
            tuple(map(meaning_of, kind.template[len(root) :]))
            for root, kind in zip(roots, (source, target), strict=True)
        ]
        if cores[0] and cores[0] == cores[1]:
            return frozenset(cores[0])
        return (source.modules & target.modules) - frozenset(meaning_of(part) for root in roots for part in root)

    def _is_renamed_alike(self, source: LeafKind, target: LeafKind) -> bool:
        """Tests that a proven pair of these modules changes the same words."""
        changed, kept = _changed_words(source, target)
        return bool(kept) and any(
            self.target_of[one].template[:-1] == target.template[:-1]
            and one.template[:-1] == source.template[:-1]
            and _changed_words(one, self.target_of[one])[0] == changed
            and bool(_changed_words(one, self.target_of[one])[1])
            for one in self._below[0].get(source.template[:-1], ())
            if one is not source
        )

    def _is_supported(self, source: LeafKind, target: LeafKind) -> bool:
        """Tests for support by the module or by renamed names."""
        if any(_shared(one, source) > len(self._sides.source.root) for one in self._around(target, 1)[1]):
            return True
        of_all = frozenset.intersection(*[kind.words for kind in self._sides.source.kinds])
        return not self._kept.keys() - of_all and len(self._pairs) == len(self._sides.target.kinds)


def _is_called_the_same(one: LeafKind, other: LeafKind) -> bool:
    """Tests that the innermost modules have the same meaning."""
    ours, theirs = (features(kind.module_parts[-1:], 1) for kind in (one, other))
    return not ours.isdisjoint(theirs)


def _changed_words(one: LeafKind, other: LeafKind) -> tuple[tuple[frozenset[str], frozenset[str]], frozenset[str]]:
    """Returns the words that each name has alone, and the common words."""
    ours, theirs = (frozenset(features(kind.parts, 2)) for kind in (one, other))
    return (ours - theirs, theirs - ours), ours & theirs


def _has_words_of(one: LeafKind, other: LeafKind) -> bool:
    """Tests that a module's words are among the other's."""
    ours, theirs = (features((kind.module_parts or kind.parts[:-1])[-1:], 2) for kind in (one, other))
    return bool(ours and theirs) and (ours <= theirs or theirs <= ours)


def _ordered(kind: LeafKind, other: LeafKind, side: int) -> tuple[LeafKind, LeafKind]:
    return (other, kind) if side else (kind, other)


def _shared(one: LeafKind, other: LeafKind) -> int:
    """Counts the parts that two names begin with."""
    at = 0
    for part, its in zip(one.template, other.template, strict=False):
        if part != its:
            break
        at += 1
    return at
