"""Finds for each leaf of a target the leaves of a checkpoint that it can only mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Mapping
from typing import Any

import jax.numpy as jnp

from orbax_t5x.rules.alignment.arrangements import Arrangement, arrangements, last_part
from orbax_t5x.rules.alignment.evidence import NAME, UNKNOWN_TURN, Move, judge
from orbax_t5x.rules.alignment.given import given_pairs
from orbax_t5x.rules.alignment.match import LeafPairing
from orbax_t5x.rules.alignment.tree import NamedLeaf, Path
from orbax_t5x.rules.alignment.words import is_flat, path_of


class Moves(dict[str, Move]):
    """Moves by the name of the target's leaf; `open` has the leaves without one, and what they may be.

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
    """Finds the moves between two sets of leaves by name, which have shapes and dtypes.

    Modules whose words are known to differ are paired only with `may_contradict`. Leaves that `given` names need no
    other proof, and are taken out before the others are looked at.
    """
    if given:
        told = given_pairs(given, *_items(source, target, flat=is_flat(source) or is_flat(target)))
        taken = set(told.values())
        found = _search(
            {name: leaf for name, leaf in source.items() if name not in taken},
            {name: leaf for name, leaf in target.items() if name not in told},
            may_contradict=False,
        )
        for new, old in told.items():
            found[new] = Move((old,), (new,), turns_source=_shape_of(source[old]) != _shape_of(target[new]))
        return _proven(found, source, target, given=told.keys())
    same = {name: Move((name,), (name,)) for name in target if name in source}
    if len(same) == len(target) and all(_shape_of(source[name]) == _shape_of(target[name]) for name in target):
        found = Moves(same)
        found.why = dict.fromkeys(same, NAME)
        return found
    found = _search(source, target, may_contradict=may_contradict)
    # Who permits contradictions asks about what is found.
    return found if may_contradict or not source or not target else _proven(found, source, target)


def _search(source: Mapping[str, Any], target: Mapping[str, Any], *, may_contradict: bool) -> Moves:
    first = _moves(source, target, flat=False, may_contradict=may_contradict)
    flat = is_flat(source) or is_flat(target)
    if first.open and flat:
        second = _moves(source, target, flat=True, may_contradict=may_contradict)
        first = first if second.open else second
    return first


def _proven(found: Moves, source: Mapping[str, Any], target: Mapping[str, Any], *, given: Container[str] = ()) -> Moves:
    """Opens the moves that nothing proves; leaves with equal names that these kept apart are moved as they are."""
    ours, theirs = _items(source, target, flat=is_flat(source) or is_flat(target))
    opened: dict[str, tuple[str, ...]] = {}
    verdicts = judge(found.values(), ours, theirs, given)
    # A square matrix may lie the other way.
    turned = {
        name: dataclasses.replace(
            move, turns_source=not move.turns_source and not move.turns_target, turns_target=False
        )
        for name, move in found.items()
        if verdicts[name][1] == UNKNOWN_TURN
    }
    if turned:
        found.update(turned)
        verdicts = judge(found.values(), ours, theirs, given)
    for name, (proof, reason, candidates) in verdicts.items():
        found.why[name] = proof or reason
        if not proof:
            opened[name] = candidates
    for name in opened:
        del found[name]
    taken = {one for move in found.values() for one in move.sources}
    numbers = _numbers(ours), _numbers(theirs)
    for item in theirs:
        name = item.names[0]
        leaf = source.get(name)
        if leaf is None or name in taken or name in found or _shape_of(leaf) != item.shape:
            continue
        # Layers that are numbered in another way have other names.
        lists = [item.path[:at] for at, key in enumerate(item.path) if isinstance(key, int)]
        if all(numbers[0].get(before) == numbers[1][before] for before in lists):
            found[name] = Move((name,), (name,), is_named=True)
            found.why[name] = NAME
    found.open = {
        name: (*dict.fromkeys((*opened.get(name, ()), *found.open.get(name, ()))),)
        for name in target
        if name not in found
    }
    return found


def _moves(source: Mapping[str, Any], target: Mapping[str, Any], *, flat: bool, may_contradict: bool) -> Moves:
    found = Moves()
    found.open = dict.fromkeys(target, ())
    if not source or not target:
        return found
    ours, theirs = _items(source, target, flat=flat)
    ways = [_paired(arrangement, may_contradict) for arrangement in arrangements(ours, theirs)]
    whole = [way for way in ways if not way.open]
    ways = whole or ways
    for name in target:
        moves = {way.get(name) for way in ways}
        move = next(iter(moves))
        if len(moves) == 1 and move is not None:
            found[name] = move
    # All leaves of a move have it, or none.
    for name, move in list(found.items()):
        if any(found.get(one) != move for one in move.targets):
            del found[name]
    found.open = {
        name: tuple(sorted({one for way in ways for one in _readings(way, name)}))
        for name in target
        if name not in found
    }
    return found


def _numbers(items: Iterable[NamedLeaf]) -> dict[Path, set[int]]:
    found: dict[Path, set[int]] = {}
    for item in items:
        for at, key in enumerate(item.path):
            if isinstance(key, int):
                found.setdefault(item.path[:at], set()).add(key)
    return found


def _readings(way: Moves, name: str) -> tuple[str, ...]:
    return way[name].sources if name in way else way.open.get(name, ())


def _paired(arrangement: Arrangement, may_contradict: bool) -> Moves:
    pairing = LeafPairing(arrangement.ours, arrangement.theirs, may_contradict=may_contradict)
    moves = Moves()
    moves.open = {
        name: tuple(n for one in readings for n in one.names)
        for item, readings in pairing.open.items()
        for name in item.names
    }
    turns = any(item.is_turned for side in arrangement for item in side)
    for one, other in pairing.pairs:
        if turns and not _is_turned_right(one, other):
            moves.open.update((name, one.names) for name in other.names)
            continue
        axis = one.axis if one.axis is not None else other.axis
        move = Move(
            one.names, other.names, axis, one.axis is not None, one.is_turned, other.is_turned, other in pairing.named
        )
        moves.update((name, move) for name in other.names)
    return moves


def _is_turned_right(one: NamedLeaf, other: NamedLeaf) -> bool:
    """Tests that a matrix of PyTorch is transposed where the other side has a kernel, and only there."""
    if len(one.shape) - (one.axis is not None) != 2:
        return True
    kinds = {last_part(one), last_part(other)}
    return (kinds == {"weight", "kernel"}) == (one.is_turned or other.is_turned)


def _items(
    source: Mapping[str, Any], target: Mapping[str, Any], *, flat: bool
) -> tuple[list[NamedLeaf], list[NamedLeaf]]:
    """Returns the leaves of both sides; dtypes count where both sides have the same ones."""
    dtypes = [{str(leaf.dtype) for leaf in side.values()} for side in (source, target)]
    is_exact = dtypes[0] == dtypes[1]

    def items(side: Mapping[str, Any]) -> list[NamedLeaf]:
        paths = {name: path_of(name, is_flat=flat) for name in side}
        if len(set(paths.values())) < len(paths):  # such as layer_1 and layer_01
            paths = {name: tuple(name.split("/")) for name in side}
        return [
            NamedLeaf((name,), _shape_of(leaf), str(leaf.dtype) if is_exact else _dtype_kind(leaf.dtype), paths[name])
            for name, leaf in side.items()
        ]

    return items(source), items(target)


def _shape_of(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.shape)


def _dtype_kind(dtype: Any) -> str:
    """Returns the kind of a dtype: values of one kind are cast into one another."""
    for kind in (jnp.floating, jnp.integer, jnp.bool_):
        if jnp.issubdtype(dtype, kind):
            return kind.__name__
    return str(dtype)
