"""What becomes of one parameter's optimizer leaves when the parameter becomes part of another.

Pure: leaves in, leaves out, and for each whether it is exact, approximate or reset. Leaves of the parameter's shape
  go its way. Adafactor's
rows and columns go the way of the dimensions they keep, and change places where rows become columns; unused slots,
(1,) zeros, stay as they are and are never stacked.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from orbax_t5x.lazy import View, as_view
from orbax_t5x.transforms.follow.factoring import Factoring, Shape, Spec, candidates
from orbax_t5x.transforms.follow.trace import CannotFollowError, Kept, Replay, Symbol, is_symbol, symbols_of

_FACTORED = ("v_row", "v_col")
_SECOND_MOMENT = (*_FACTORED, "v")
_PLACEHOLDER = (1,)

SpecOf = Callable[[str, int], Spec | None]
"""The parts that a parameter's dimensions play, by its path and rank; None where nobody said."""


@dataclasses.dataclass(frozen=True)
class Move:
    """One parameter's way, and one optimizer's leaves on both sides.

    Attributes:
      view: the parameter as a graph over symbols.
      path: the new parameter's path.
      paths: old parameter's name -> its path.
      leaves: old parameter's name -> kind -> the leaf; each has the same kinds.
      wanted: kind -> the target's leaf, for the kinds that the target has.
      sizes_decide: whether factoring goes by size for every rank (Optax).
    """

    view: View
    path: str
    paths: Mapping[str, str]
    leaves: Mapping[str, Mapping[str, Any]]
    wanted: Mapping[str, Any]
    sizes_decide: bool

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of leaves that there are."""
        return tuple(next(iter(self.leaves.values())))

    def all_of(self, kind: str) -> list[Any]:
        """The old leaves of a kind."""
        return [leaves[kind] for leaves in self.leaves.values()]

    def wanted_shape(self, kind: str) -> Shape | None:
        """The shape of the target's leaf of a kind, where that is known."""
        return _shape(self.wanted.get(kind))


@dataclasses.dataclass
class Outcome:
    """What became of the leaves.

    Attributes:
      leaves: kind -> the new leaf.
      approximate: kinds whose new leaf is not just what it would have been.
      reset: kind -> why it has no new leaf.
    """

    leaves: dict[str, Any] = dataclasses.field(default_factory=dict)
    approximate: set[str] = dataclasses.field(default_factory=set)
    reset: dict[str, str] = dataclasses.field(default_factory=dict)


def move_leaves(move: Move, spec_of: SpecOf) -> Outcome:
    """Moves all leaves of one optimizer for one new parameter."""
    outcome = Outcome()
    if is_symbol(move.view) and all(
        move.wanted_shape(kind) in (None, _shape(move.all_of(kind)[0])) for kind in move.kinds
    ):
        outcome.leaves.update(next(iter(move.leaves.values())))
        return outcome
    adafactor = all(kind in move.kinds for kind in _FACTORED)
    for kind in move.kinds:
        if not adafactor or kind not in _SECOND_MOMENT:
            _move_one(move, kind, outcome)
    if adafactor:
        _move_second_moment(move, spec_of, outcome)
    return outcome


def _shape(value: Any) -> Shape | None:
    shape = getattr(value, "shape", None)
    return None if shape is None else tuple(shape)


def _move_one(move: Move, kind: str, outcome: Outcome) -> None:
    """A leaf that has the parameter's shape, or None, or a placeholder."""
    leaves = move.all_of(kind)
    shapes = {symbol.name: symbol.shape for symbol in symbols_of(move.view)}
    if all(leaf is None for leaf in leaves):
        outcome.leaves[kind] = None
    elif all(_shape(found[kind]) == shapes[name] for name, found in move.leaves.items()):
        _replay(move, kind, outcome)
    elif {_shape(leaf) for leaf in leaves} == {_PLACEHOLDER} and move.wanted_shape(kind) in (None, _PLACEHOLDER):
        outcome.leaves[kind] = leaves[0]
    else:
        outcome.reset[kind] = "its shape is not its parameter's"


def _replay(move: Move, kind: str, outcome: Outcome) -> None:
    def leaf(symbol: Symbol, kept: Kept) -> View:
        return as_view(move.leaves[symbol.name][kind], name=symbol.name)

    replay = Replay(leaf, casts=False)
    try:
        outcome.leaves[kind] = replay.build(move.view, frozenset(range(move.view.ndim)))
    except ValueError as error:
        outcome.reset[kind] = str(error)
        return
    if not replay.is_exact:
        outcome.approximate.add(kind)


def _move_second_moment(move: Move, spec_of: SpecOf, outcome: Outcome) -> None:
    """v where it is not factored, v_row and v_col where it is; the others are placeholders."""
    before = {_is_factored(leaves) for leaves in move.leaves.values()}
    after = _becomes_factored(move, any(before))
    live = _FACTORED if after else ("v",)
    if before != {after}:
        reason = "factored on one side only" if len(before) == 1 else "factored for some of its layers only"
        outcome.reset.update((kind, reason) for kind in live if kind in move.kinds)
    elif after:
        _move_factored(move, spec_of, outcome)
    else:
        _move_one(move, "v", outcome)
    placeholders = (leaf for kind in _SECOND_MOMENT if kind in move.kinds for leaf in move.all_of(kind))
    placeholder = next((leaf for leaf in placeholders if _shape(leaf) == _PLACEHOLDER), None)
    for kind in _SECOND_MOMENT:
        if kind in move.kinds and kind not in live and placeholder is not None:
            outcome.leaves[kind] = placeholder


def _is_factored(leaves: Mapping[str, Any]) -> bool:
    if "v" in leaves and _shape(leaves["v"]) != _PLACEHOLDER:
        return False
    return any(_shape(leaves[kind]) != _PLACEHOLDER for kind in _FACTORED)


def _becomes_factored(move: Move, was: bool) -> bool:
    """As the target says; as before where there is none."""
    if "v_row" not in move.wanted:
        return was
    if all(move.wanted_shape(kind) == _PLACEHOLDER for kind in _FACTORED):
        return False
    return "v" not in move.wanted or move.wanted_shape("v") != tuple(move.view.shape)


def _move_factored(move: Move, spec_of: SpecOf, outcome: Outcome) -> None:
    """v_row and v_col, changed over where rows become columns; reset where there is not just one way."""
    shape = tuple(move.view.shape)
    wanted = [move.wanted_shape(kind) for kind in _FACTORED]
    after = candidates(shape, *wanted, spec_of(move.path, len(shape)), move.sizes_decide)
    ways = (_solve(move, before, then) for before in _ways_before(move, spec_of) for then in after)
    solutions = [solution for solution in ways if solution is not None]
    if len(solutions) == 1:
        leaves, is_exact = solutions[0]
        outcome.leaves.update(leaves)
        outcome.approximate.update(() if is_exact else _FACTORED)
        return
    reason = "its rows and columns are not those of the new parameter"
    if solutions:
        reason = "shapes do not tell rows from columns: give FollowOptimizer(…, factors=[(pattern, dimensions)])"
    outcome.reset.update(dict.fromkeys(_FACTORED, reason))


def _ways_before(move: Move, spec_of: SpecOf) -> Iterator[dict[str, Factoring]]:
    """All ways in which the old parameters may be factored; those of one shape in the same way."""
    groups: dict[Any, list[str]] = collections.defaultdict(list)
    for symbol in symbols_of(move.view):
        row, col = (_shape(move.leaves[symbol.name][kind]) for kind in _FACTORED)
        spec = spec_of(move.paths[symbol.name], len(symbol.shape))
        groups[symbol.shape, row, col, spec].append(symbol.name)
    for chosen in itertools.product(*(candidates(*group, move.sizes_decide) for group in groups)):
        yield {name: way for way, members in zip(chosen, groups.values(), strict=True) for name in members}


def _solve(move: Move, before: Mapping[str, Factoring], then: Factoring) -> tuple[dict[str, Any], bool] | None:
    """v_row and v_col if the old parameters are factored in one way and the new one in another; and whether they
    are exact.
    """

    def leaf(symbol: Symbol, kept: Kept) -> View:
        for kind, keeps in zip(_FACTORED, before[symbol.name], strict=True):
            if _large(keeps, symbol.shape) == _large(kept, symbol.shape):
                sizes = tuple(symbol.shape[dim] for dim in sorted(kept))
                return as_view(move.leaves[symbol.name][kind], name=symbol.name).reshape(sizes)
        raise CannotFollowError("no slot keeps these dimensions")

    replay = Replay(leaf, casts=False)
    try:
        return {
            kind: replay.build(move.view, kept) for kind, kept in zip(_FACTORED, then, strict=True)
        }, replay.is_exact
    except ValueError:
        return None


def _large(kept: Iterable[int], shape: Sequence[int]) -> Kept:
    """The dimensions that hold more than one element; the others may be kept or not."""
    return frozenset(dim for dim in kept if shape[dim] != 1)
