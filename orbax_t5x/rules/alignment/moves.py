"""Moves from a checkpoint's leaves to a target's, if certain."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from orbax_t5x.rules.alignment.evidence import NAME, Evidence
from orbax_t5x.rules.alignment.given import given_pairs
from orbax_t5x.rules.alignment.heads import change
from orbax_t5x.rules.alignment.kinds import LeafKind, Sides
from orbax_t5x.rules.alignment.layers import NamedLeaf
from orbax_t5x.rules.alignment.search import proposals
from orbax_t5x.rules.alignment.turns import UNKNOWN_TURN
from orbax_t5x.rules.alignment.words import ROOTS, is_flat, path_of

# Readings listed for an open leaf.
_MOST_READINGS = 64
# Parts of a name before the model that is copied below it.
_DEEPEST_COPY = 3
# Rounds in which the search learns from what is proven.
_ROUNDS = 8


@dataclasses.dataclass(frozen=True)
class Move:
    """Move of a leaf, or of the leaves of all layers.

    Attributes:
      sources: names of a leaf, or of each layer's.
      targets: the same on the other side; one side has one name.
      axis: of the layers on the side that has one name for all; None where they are single leaves.
      stacks: whether it is the target's side that has one name for all.
      axes: the source's axis for each of the target's, of a leaf or of a layer; empty where the order is kept.
      shapes: of a source and a target, or of a layer, where dimensions of 1 or heads differ.
      atoms: the shape that `axes` are of, where this is not the source's.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    axis: int | None = None
    stacks: bool = False
    axes: tuple[int, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    atoms: tuple[int, ...] = ()

    def reversed(self) -> Move:
        """Returns the way back."""
        is_stacked = self.axis is not None and not self.stacks
        axes = tuple(self.axes.index(at) for at in range(len(self.axes)))
        atoms = tuple(self.atoms[at] for at in self.axes) if self.atoms else ()
        return Move(self.targets, self.sources, self.axis, is_stacked, axes, self.shapes[::-1], atoms)


class Moves(dict[str, Move]):
    """Moves by the target's names, and the open leaves.

    Attributes:
      why: by the target's leaf, what proves its move, or why it has none.
    """

    open: dict[str, tuple[str, ...]]
    why: dict[str, str]

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.open = {}
        self.why = {}


def moves_between(
    source: Mapping[str, Any],
    target: Mapping[str, Any],
    *,
    may_contradict: bool = False,
    given: Mapping[str, str] | None = None,
) -> Moves:
    """Finds the moves between two sets of named leaves.

    With `may_contradict` guesses count, too: who permits contradictions asks about what is found.
    """
    if all(name in source and _shape_of(source[name]) == _shape_of(leaf) for name, leaf in target.items()):
        found = Moves({name: Move((name,), (name,)) for name in target})
        found.why = dict.fromkeys(target, NAME)
        return found
    if not source:
        found = Moves()
        found.open = dict.fromkeys(target, ())
        return found
    source = _without_copies(source, target)
    first = _moves(source, target, False, may_contradict, given or {})
    if first.open and (is_flat(source) or is_flat(target)):
        second = _moves(source, target, True, may_contradict, given or {})
        return first if len(second.open) >= len(first.open) else second
    return first


def _without_copies(source: Mapping[str, Any], target: Mapping[str, Any]) -> Mapping[str, Any]:
    """Drops copies, such as averages, unknown to the target."""
    words = {key for name in target for key in path_of(name) if isinstance(key, str)}
    below: dict[tuple[Any, ...], dict[tuple[Any, ...], str]] = {(): {}}
    for name in source:
        path = path_of(name)
        for at in range(min(_DEEPEST_COPY, len(path) - 1) + 1):
            below.setdefault(path[:at], {})[path[at:]] = name
    models = [found for prefix, found in below.items() if ROOTS.issuperset(prefix)]
    copies: set[str] = set()
    for prefix, found in below.items():
        is_root = ROOTS.issuperset(prefix) or not words.isdisjoint(prefix)
        if is_root or len(found) < max(2, len(target) // 4):
            continue
        for model in models:
            if all(
                rest in model and _shape_of(source[model[rest]]) == _shape_of(source[name])
                for rest, name in found.items()
            ):
                copies.update(found.values())
    return {name: leaf for name, leaf in source.items() if name not in copies}


def _moves(
    source: Mapping[str, Any], target: Mapping[str, Any], flat: bool, may_contradict: bool, given: Mapping[str, str]
) -> Moves:
    sides = Sides(*_items(source, target, flat=flat))
    evidence = Evidence(sides, given_pairs(given, sides), may_contradict=may_contradict)
    pairs = proposals(sides, evidence)
    for _ in range(_ROUNDS):
        if not evidence.prove(pairs):
            break
        pairs = proposals(sides, evidence)
    found = _written(sides, pairs if may_contradict else evidence.proven, evidence, source, target)
    for kind in sides.target.kinds:
        for ranks, leaf in kind.members.items():
            if leaf.name not in found:
                some = evidence.rivals.get(kind) or sorted(
                    [
                        one
                        for one in sides.source.by_bag.get(kind.bag, ())
                        if one not in evidence.target_of and evidence.is_possible(one, kind)
                    ],
                    key=lambda one: one.template,
                )
                names = [one.members[ranks].name for one in some if ranks in one.members]
                reason = "several leaves of its shape are alike" if names else "nothing has its shape and place"
                earlier = found.open.get(leaf.name, ())
                found.open[leaf.name] = tuple(dict.fromkeys((*earlier, *names)))[:_MOST_READINGS]
                found.why.setdefault(leaf.name, evidence.why.get(kind, reason))
    found.open = {name: found.open[name] for name in target if name in found.open}
    return found


def _written(
    sides: Sides,
    pairs: Mapping[LeafKind, LeafKind],
    evidence: Evidence,
    source: Mapping[str, Any],
    target: Mapping[str, Any],
) -> Moves:
    """Returns the moves of leaves with a partner for each layer."""
    layers: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for count, tree in zip(layers, (sides.source, sides.target), strict=True):
        for name, _ in tree.kind_of:
            count[name] = count.get(name, 0) + 1
    found = Moves()
    links: dict[tuple[str, ...], list[tuple[NamedLeaf, NamedLeaf, bool]]] = {}
    for kind, one in pairs.items():
        turns = evidence.turns.of(one, kind)
        for ranks in kind.members.keys() & one.members.keys():
            old, new = one.members[ranks], kind.members[ranks]
            found.why[new.name] = evidence.why.get(kind, "")
            if turns is None:
                found.why[new.name] = UNKNOWN_TURN
                found.open[new.name] = (*found.open.get(new.name, ()), old.name)
                continue
            key = ("source", old.name) if old.layer is not None and new.layer is None else ("target", new.name)
            links.setdefault(key, []).append((old, new, turns))
    for (side, name), its in links.items():
        its.sort(key=lambda one: (one[0].layer or 0, one[1].layer or 0))
        olds, news, turns = zip(*its, strict=True)
        whole = layers[0 if side == "source" else 1][name]
        is_whole = len(its) == whole and len(set(turns)) == 1
        steps = change(olds[0], news[0], turns[0], len(its))
        if olds[0].axis is not None and news[0].axis is not None:
            is_whole &= {one.name for one in olds} == {olds[0].name} and {one.name for one in news} == {news[0].name}
            is_whole &= all(one.layer == other.layer for one, other, _ in its)
            olds, news = olds[:1], news[:1]
        if not is_whole:
            for new in news:
                found.open[new.name] = tuple(dict.fromkeys(old.name for old in olds))
                found.why[new.name] = "only some of its layers have a counterpart"
            continue
        axis = olds[0].axis if news[0].layer is None else news[0].axis if olds[0].layer is None else None
        sources, targets = (tuple(dict.fromkeys(one.name for one in some)) for some in (olds, news))
        is_stacked = news[0].layer is not None and axis is not None
        move = Move(sources, targets, axis, is_stacked, steps.axes, steps.shapes, steps.atoms)
        found.update((new, move) for new in targets)
    for name in found:
        found.open.pop(name, None)
    return found


def _items(
    source: Mapping[str, Any], target: Mapping[str, Any], *, flat: bool
) -> tuple[list[NamedLeaf], list[NamedLeaf]]:
    """Returns the leaves of both sides; shared dtypes count."""
    dtypes = [{str(leaf.dtype) for leaf in side.values()} for side in (source, target)]
    is_exact = dtypes[0] == dtypes[1]

    def items(side: Mapping[str, Any]) -> list[NamedLeaf]:
        paths = {name: path_of(name, is_flat=flat) for name in side}
        paths = {name: path[:-1] if len(path) > 1 and path[-1] == "value" else path for name, path in paths.items()}
        if len(set(paths.values())) < len(paths):  # such as layer_1 and layer_01
            paths = {name: tuple(name.split("/")) for name in side}
        return [
            NamedLeaf(name, _shape_of(leaf), str(leaf.dtype) if is_exact else _dtype_kind(leaf.dtype), paths[name])
            for name, leaf in side.items()
        ]

    return items(source), items(target)


def _shape_of(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.shape)


def _dtype_kind(dtype: Any) -> str:
    """Returns the kind of a dtype; casts stay within a kind."""
    for kind in (jnp.floating, jnp.integer, jnp.bool_):
        if jnp.issubdtype(dtype, kind):
            return kind.__name__
    return str(dtype)
