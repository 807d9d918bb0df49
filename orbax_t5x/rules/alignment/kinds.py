"""Kinds of leaves: a kind is a leaf in all layers."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orbax_t5x.rules.alignment.heads import heads_of, with_matrices
from orbax_t5x.rules.alignment.kernels import with_kernels
from orbax_t5x.rules.alignment.layers import LAYER, NamedLeaf, Shape, bag_of, leaves_and_layers, lists_of
from orbax_t5x.rules.alignment.roles import roles_of
from orbax_t5x.rules.alignment.words import (
    Path,
    contradict,
    features,
    is_of_module,
    is_position_bias,
    meaning_of,
    meanings,
)

_TABLES = frozenset({"token_embedder", "position_embedding"})
_NUMBER = re.compile(r"_\d+$")

Template = tuple[str, ...]
Ranks = tuple[tuple[int, int], ...]


@dataclasses.dataclass(eq=False)
class LeafKind:
    """The leaf of a name in all layers.

    Attributes:
      template: parts of the name, with a mark for a layer's number.
      parts: the words of the name.
      shape: of each.
      bag: shape and dtype, equal for kinds that may be one, transposed or not.
      members: leaves by their places in lists of layers, with the lengths of these.
      usual: the template by the words of roles.
      heads: their number and size in an array whose `shape` joins them; empty for other arrays.
      width: the dimension of such an array that is the model's width.
      is_ordered: whether `shape` is in the other side's order of dimensions.
    """

    template: Template
    parts: Template
    shape: Shape
    bag: tuple[Any, ...]
    members: dict[Ranks, NamedLeaf] = dataclasses.field(default_factory=dict)
    usual: Template = ()
    heads: Shape = ()
    width: int | None = None
    is_ordered: bool = False

    @functools.cached_property
    def words(self) -> frozenset[str]:
        """Parts by their meanings, and single words of them."""
        return _words(self.parts)

    @functools.cached_property
    def own_words(self) -> frozenset[str]:
        """Words of the name as it stands, numbers included."""
        return _words(tuple(part for part in self.template if part != LAYER))

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
    def _meanings(self) -> Template:
        """Parts by their meanings; of modules around others the number says nothing."""
        last = len(self.template) - 2
        return tuple(
            meaning_of(_NUMBER.sub("", part) if at < last else part)
            for at, part in enumerate(self.usual or self.template)
        )

    def below(self, size: int) -> Template:
        """Returns the meanings of parts below a module, or below its layers."""
        return self._meanings[max(size, len(layer_of(self.template))) :]

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
    def is_table(self) -> bool:
        """True for embeddings, which are never transposed."""
        return bool(_TABLES & {word for part in self.parts for word in meanings(part).get("embedding", ())})

    @functools.cached_property
    def places(self) -> frozenset[Ranks]:
        """The places of its members."""
        return frozenset(self.members)


def _words(parts: Template) -> frozenset[str]:
    # An array `b` has no word of a module `b`.
    if parts and meaning_of(parts[-1]).startswith("kind:"):
        return _words(parts[:-1]) | {meaning_of(parts[-1])}
    return features(parts, 1) | {f" {word}" for word in features(parts, 2)}


def layer_of(template: Template) -> Template:
    """Returns the parts of a name up to its layer's number."""
    return template[: len(template) - template[::-1].index(LAYER)] if LAYER in template else ()


class Tree:
    """Kinds of a side by the modules around them.

    Modules with a single child count as the child.
    """

    def __init__(self, kinds: Sequence[LeafKind]):
        self._below: dict[Template, dict[str, None]] = {}
        self._at: dict[Template, list[LeafKind]] = {}
        self._arrays: dict[Template, list[LeafKind]] = {}
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
            self._arrays.setdefault(kind.template[:-1], []).append(kind)
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

    def beside(self, kind: LeafKind) -> list[LeafKind]:
        """Returns all arrays of a leaf's module."""
        return self._arrays[kind.template[:-1]]

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
                    if is_alike and kind.below(at + 1) in other:
                        found.append((*kind.template[:at], part))
            self._twins[kind] = found
        return self._twins[kind]

    def _tails(self, node: Template) -> frozenset[Template]:
        """Returns the meanings of all names in a module, from there."""
        if node not in self._tails_of:
            size = len(node)
            inside = (kind.below(size) for kind in self.kinds if kind.template[:size] == node)
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
        sides, layers = leaves_and_layers(ours, theirs)
        sides = with_matrices(with_kernels(sides))
        # Without dimensions of 1 where the other side has none of the shape.
        bags = [{bag_of(leaf.shape, leaf.dtype) for leaf in side} for side in sides]
        ours_and_theirs = [_kinds(side, its, other) for side, its, other in zip(sides, layers, bags[::-1], strict=True)]
        for kinds in ours_and_theirs:
            _take_out_of_first_layer(kinds)
        _name_by_roles(ours_and_theirs)
        self.source, self.target = map(Tree, ours_and_theirs)
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
        """Tests layers, heads and dimensions of two kinds of a bag."""
        if one.heads and other.heads and one.heads != other.heads:
            return False
        if one.is_matrix and other.is_matrix:
            return not one.places.isdisjoint(other.places)
        straight = [tuple(size for size in kind.shape if size != 1) for kind in (one, other)]
        return straight[0] == straight[1] and not one.places.isdisjoint(other.places)


def _take_out_of_first_layer(kinds: Sequence[LeafKind]) -> None:
    """Places the first layer's position bias outside of layers.

    All layers use it.
    """
    for kind in kinds:
        (ranks, leaf), *others = kind.members.items()
        last = next((at for at, part in enumerate(kind.template) if is_position_bias(part)), 0)
        if ranks and not others and not any(rank for rank, _ in ranks) and LAYER not in kind.template[last:]:
            first = kind.template.index(LAYER)
            kind.parts = (*kind.parts[:first], *kind.parts[last - kind.template[:last].count(LAYER) :])
            kind.template = (*kind.template[:first], *kind.template[last:])
            kind.members = {(): leaf}


def _name_by_roles(sides: Sequence[Sequence[LeafKind]]) -> None:
    """Gives modules the words of roles that both sides have."""
    roles = [roles_of((kind.template, kind.shape) for kind in kinds if kind.template) for kinds in sides]
    for kinds, its, others in zip(sides, roles, roles[::-1], strict=True):
        words = {node: word for role, found in its.items() if others[role] for node, word in found.items()}
        for kind in kinds if words else ():
            nodes = [kind.template[: at + 1] for at in range(len(kind.template))]
            kind.usual = tuple(words.get(node, node[-1]) for node in nodes)
            known = [words.get(node) for node in nodes if node[-1] != LAYER]
            kind.parts = tuple(word or part for word, part in zip(known, kind.parts, strict=True))


def _has_dots(leaves: Iterable[NamedLeaf]) -> bool:
    return any("." in leaf.name for leaf in leaves)


def _kinds(
    leaves: Sequence[NamedLeaf], layers: Mapping[Path, Sequence[int]], other: set[tuple[Any, ...]]
) -> list[LeafKind]:
    lists = lists_of(leaves)
    numbers = {before: sorted(found) for before, found in lists.items()}
    for leaf in leaves:
        for at, key in enumerate(leaf.path):
            if isinstance(key, str) and leaf.path[:at] in numbers and numbers[leaf.path[:at]][0] > 0:
                numbers[leaf.path[:at]].insert(0, 0)  # `linear` beside `linear_1`
    found: dict[Any, LeafKind] = {}
    for leaf in leaves:
        template, parts, ranks = _template(leaf.path, layers, numbers)
        bag = bag_of(leaf.shape, leaf.dtype)
        if bag not in other and 1 in leaf.shape:
            bag = bag_of(tuple(size for size in leaf.shape if size != 1), leaf.dtype)
        heads = heads_of(leaf)
        new = LeafKind(template, parts, leaf.shape, bag, heads=heads, width=leaf.width, is_ordered=bool(leaf.order))
        kind = found.setdefault((template, leaf.shape, bag, new.heads, new.width), new)
        kind.members[ranks] = leaf
    return list(found.values())


def _template(
    path: Path, layers: Mapping[Path, Sequence[int]], numbers: Mapping[Path, Sequence[int]]
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
            parts[-1] = f"{parts[-1]}_{key}"
            beside = numbers[path[:at]]
            # Of one module the number says nothing, and of several those beside it are part of what it says.
            # Flax numbers its classes from 0: of these the first is lacking.
            if meanings(parts[-1]):
                words[-1] = parts[-1]
            elif beside != [0]:
                words[-1] = f"{parts[-1]} of {beside}"
        else:
            parts.append(str(key))
            words.append(f"{key} of {numbers[path[:at]]}")
    return tuple(parts), tuple(words), tuple(ranks)
