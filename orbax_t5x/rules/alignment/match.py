"""Pairs the leaves of two trees as far as shapes, structure and names leave one reading.

A pair of subtrees holds one another's leaves. Their parts are paired by what they hold: shapes first, then structure.
Where several parts are alike, equal names decide, then names of one meaning; of layers, which are numbers on both
sides, the order. What is alike still is not paired. Names never decide against shapes, but a pair whose names are
known to mean different modules is none.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from orbax_t5x.rules.alignment.tree import NamedLeaf, Subtree, leaf_number, subtree_of
from orbax_t5x.rules.alignment.words import contradict, features, meaning_of, says_little

_TIERS = (0, 1, 2)
# Subtrees of fewer leaves may be alike by chance where the trees have not the same leaves.
_LEAST_TELLING = 4
# Readings listed for an open leaf.
_MOST_READINGS = 64

Subtrees = Sequence[Subtree]
_T = TypeVar("_T")
_K = TypeVar("_K", bound=Hashable)


class LeafPairing:
    """Pairs of the leaves of two sides.

    Args:
      ours, theirs: leaves.
      may_contradict: whether modules are paired although their words are known to differ.

    Attributes:
      pairs: leaves that have one reading.
      open: leaves of the other side without one, with what they may be.
      named: leaves of the other side that are told from others of their shape by names or numbers.
    """

    def __init__(self, ours: Iterable[NamedLeaf], theirs: Iterable[NamedLeaf], *, may_contradict: bool = False):
        self._may_contradict = may_contradict
        self.pairs: list[tuple[NamedLeaf, NamedLeaf]] = []
        self.open: dict[NamedLeaf, list[NamedLeaf]] = {}
        self.named: set[NamedLeaf] = set()
        mine, other = subtree_of(ours), subtree_of(theirs)
        if mine.bag == other.bag:
            self._pair(mine, other)
        else:
            self._pair_unequal([mine], [other])

    def _pair(self, ours: Subtree, theirs: Subtree, *, is_named: bool = False) -> None:
        """Pairs two subtrees with the same shapes."""
        if is_named:
            self.named.update(theirs.items())
        elif self._contradict(ours, theirs):
            return self._leave_open([ours], [theirs])
        if ours.item is not None and theirs.item is not None:
            self.pairs.append((ours.item, theirs.item))
        elif _are_lists_in_order(ours, theirs):
            for one, other in zip(ours.children, theirs.children, strict=True):
                self._pair_layers(one, other)
        else:
            self._pair_forests(_parts_below(ours), _parts_below(theirs))
        return None

    def _pair_forests(self, ours: Subtrees, theirs: Subtrees) -> None:
        """Pairs trees that together have the same shapes; those without a counterpart are taken apart."""
        while True:
            if len(ours) == len(theirs) == 1:
                return self._pair(ours[0], theirs[0])
            mine, other = _groups(ours, _bag), _groups(theirs, _bag)
            alone = [
                node
                for side, beside in ((mine, other), (other, mine))
                for bag, nodes in side.items()
                if len(nodes) != len(beside.get(bag, ()))
                for node in nodes
                if node.children
            ]
            if not alone:
                break
            largest = max(node.size for node in alone)
            taken = {id(node) for node in alone if node.size == largest}
            ours, theirs = _taken_apart(ours, taken), _taken_apart(theirs, taken)
        turned = _transposed_namesakes(ours, theirs)
        for bag, nodes in mine.items():
            if any(id(node) in turned for node in (*nodes, *other[bag])):
                self._leave_open(nodes, other[bag])
            else:
                self._pair_alike(nodes, other[bag])
        return None

    def _pair_alike(self, ours: Subtrees, theirs: Subtrees) -> None:
        """Pairs trees of which all have the same shapes."""
        if len(ours) == 1:
            return self._pair(ours[0], theirs[0])
        mine, other = _groups(ours, _structure), _groups(theirs, _structure)
        if len(mine) > 1 and {key: len(nodes) for key, nodes in mine.items()} == {
            key: len(nodes) for key, nodes in other.items()
        }:
            for key, nodes in mine.items():
                self._pair_alike(nodes, other[key])
            return None
        found = _by_names(ours, theirs)
        for one, their in found:
            self._pair(one, their, is_named=True)
        left = [node for node in ours if all(node is not one for one, _ in found)]
        others = [node for node in theirs if all(node is not their for _, their in found)]
        if len(left) == 1:
            self._pair(left[0], others[0])
        elif left:
            self._leave_open(left, others)
        return None

    def _pair_unequal(self, ours: Subtrees, theirs: Subtrees) -> None:
        """Pairs trees of which one side has leaves that the other lacks: by name, or large ones of equal structure."""
        while True:
            found = [
                (one, other)
                for one, other in _unique_pairs(ours, theirs, _name_meanings)
                if bool(one.children) == bool(other.children) and (one.children or one.bag == other.bag)
            ]
            found = found or [
                pair for pair in _unique_pairs(ours, theirs, _structure) if pair[0].size >= _LEAST_TELLING
            ]
            for one, other in found:
                if one.bag == other.bag:
                    self._pair(one, other)
                else:
                    self._pair_below(one, other)
            taken = {id(node) for pair in found for node in pair}
            ours = [node for node in ours if id(node) not in taken]
            theirs = [node for node in theirs if id(node) not in taken]
            if found:
                continue
            whole = [node for node in (*ours, *theirs) if node.children]
            # The order of layers counts as long as they are together.
            whole = [node for node in whole if not node.is_list] or whole
            if not whole:
                break
            largest = max(node.size for node in whole)
            apart = {id(node) for node in whole if node.size == largest}
            ours, theirs = _taken_apart(ours, apart), _taken_apart(theirs, apart)
        self._leave_open(ours, theirs)

    def _pair_below(self, ours: Subtree, theirs: Subtree) -> None:
        if not (ours.is_list and theirs.is_list):
            return self._pair_unequal(_parts_below(ours), _parts_below(theirs))
        # Layers are the same ones only where there are as many.
        if [node.label[0] for node in ours.children] != [node.label[0] for node in theirs.children]:
            return self._leave_open([ours], [theirs])
        for one, other in zip(ours.children, theirs.children, strict=True):
            if one.bag == other.bag:
                self._pair_layers(one, other)
            else:
                self._pair_unequal(_parts_below(one), _parts_below(other))
        return None

    def _pair_layers(self, ours: Subtree, theirs: Subtree) -> None:
        """Pairs two layers by their number; a layer with a single module has the module's words, too."""
        if self._contradict(ours, theirs):
            self._leave_open([ours], [theirs])
        else:
            self._pair(ours, theirs, is_named=True)

    def _contradict(self, ours: Subtree, theirs: Subtree) -> bool:
        return not self._may_contradict and contradict(ours.words(), theirs.words())

    def _leave_open(self, ours: Subtrees, theirs: Subtrees) -> None:
        by_shape = _groups(itertools.chain.from_iterable(node.items() for node in ours), leaf_number)
        for item in itertools.chain.from_iterable(node.items() for node in theirs):
            self.open[item] = by_shape.get(leaf_number(item), [])[:_MOST_READINGS]


def _bag(node: Subtree) -> int:
    return node.bag


def _structure(node: Subtree) -> int:
    return node.structure


def _name_meanings(node: Subtree) -> tuple[str, ...]:
    """Returns what two nodes have in common that are called the same: the meanings of the parts of their labels."""
    return tuple([meaning_of(word) for word in node.words() if not says_little(word)])


def _groups(things: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    found: dict[_K, list[_T]] = collections.defaultdict(list)
    for thing in things:
        found[key(thing)].append(thing)
    return dict(found)


def _unique_pairs(
    ours: Subtrees, theirs: Subtrees, key: Callable[[Subtree], Hashable]
) -> list[tuple[Subtree, Subtree]]:
    """Returns the pairs of nodes with a key that one node of either side has."""
    mine, other = _groups(ours, key), _groups(theirs, key)
    return [
        (nodes[0], other[one][0]) for one, nodes in mine.items() if one and len(nodes) == len(other.get(one, ())) == 1
    ]


def _parts_below(node: Subtree) -> list[Subtree]:
    return node.children or [node]


def _taken_apart(nodes: Subtrees, which: set[int]) -> list[Subtree]:
    return [part for node in nodes for part in (node.spread() if id(node) in which and node.children else [node])]


def _are_lists_in_order(ours: Subtree, theirs: Subtree) -> bool:
    return (
        ours.is_list
        and theirs.is_list
        and [node.bag for node in ours.children] == [node.bag for node in theirs.children]
    )


def _by_names(ours: Subtrees, theirs: Subtrees) -> list[tuple[Subtree, Subtree]]:
    """Returns pairs of trees that are alike by their names: by equal ones first, then by meanings, then by words."""
    found: list[tuple[Subtree, Subtree]] = []
    for below, tier in ((False, 0), (False, 1), (True, 0), (True, 1), (False, 2)):
        left = [node for node in ours if all(node is not one for one, _ in found)]
        others = [node for node in theirs if all(node is not other for _, other in found)]
        if not left:
            break
        named = _agreed(
            *[[features(node.all_words if below else node.words(), tier) for node in side] for side in (left, others)]
        )
        # Single words say little: all trees have to be told by them.
        if tier != _TIERS[-1] or len(named) == len(left):
            found += [(left[one], others[other]) for one, other in named.items()]
    return found


def _agreed(ours: Sequence[frozenset[str]], theirs: Sequence[frozenset[str]]) -> dict[int, int]:
    """Returns the pairs that features show which one tree of either side has, where they show one pair only."""
    places = [{feature: at for feature, at in _only(side).items()} for side in (ours, theirs)]
    votes = {(places[0][feature], places[1][feature]) for feature in places[0].keys() & places[1].keys()}
    left, right = (collections.Counter(pair[side] for pair in votes) for side in (0, 1))
    return {one: other for one, other in votes if left[one] == right[other] == 1}


def _only(side: Sequence[frozenset[str]]) -> dict[str, int]:
    counts = collections.Counter(itertools.chain.from_iterable(side))
    return {feature: at for at, found in enumerate(side) for feature in found if counts[feature] == 1}


def _transposed_namesakes(ours: Subtrees, theirs: Subtrees) -> set[int]:
    """Returns the leaves whose namesakes have the transposed shape: they may have been transposed."""
    mine, other = (
        [node for node in side if node.item is not None and len(node.item.shape) == 2] for side in (ours, theirs)
    )
    turned: set[int] = set()
    for one, namesake in _unique_pairs(mine, other, _name_meanings):
        assert one.item is not None and namesake.item is not None
        if one.bag != namesake.bag and one.item.shape == namesake.item.shape[::-1]:
            turned |= {id(one), id(namesake)}
    return turned
