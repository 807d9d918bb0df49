"""The optimizer's leaves of a parameter made of old parameters.

Pure: leaves in, lazy leaves out, and for each whether it is exact, approximate or reset. A leaf that has the
parameter's shape is computed as the parameter was. Adafactor's v_row and v_col are computed over the dimensions that
they keep, and are exchanged where rows become columns. Slots that are not in use, zeros of shape (1,), are handed on
unchanged and never stacked.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from orbax_t5x.lazy import View, as_view
from orbax_t5x.lazy.several import average
from orbax_t5x.optim.factor_rules import FactorDim
from orbax_t5x.optim.factored_dims import FactorDims, Shape, possible_dims
from orbax_t5x.transforms.follow.trace import CannotFollowError, KeptDims, Replay, Symbol, symbol_below, symbols_of

_FACTORED = ("v_row", "v_col")
_SECOND_MOMENT = (*_FACTORED, "v")
_PLACEHOLDER = (1,)

RuleOf = Callable[[str, int], tuple[FactorDim, ...] | None]
"""The Adafactor rule of a parameter by its path and rank; None where none was given."""


@dataclasses.dataclass(frozen=True)
class NewParameter:
    """A parameter's view, and old leaves of an optimizer for it.

    `view` is computed from symbols of the old ones; `wanted` are the target's leaves. With `always_by_size` the second
    moment is factored by size for every rank (Optax). `not_in_use` are kinds of which parameters of other shapes have
    placeholders, `approximate` the leaves that are approximate already.
    """

    view: View
    path: str
    paths: Mapping[str, str]
    leaves: Mapping[str, Mapping[str, Any]]
    wanted: Mapping[str, Any]
    always_by_size: bool
    not_in_use: frozenset[str] = frozenset()
    approximate: frozenset[tuple[str, str]] = frozenset()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of leaves that the optimizer has."""
        return tuple(next(iter(self.leaves.values())))

    def all_of(self, kind: str) -> list[Any]:
        """Returns the old leaves of a kind."""
        return [leaves[kind] for leaves in self.leaves.values()]

    def wanted_shape(self, kind: str) -> Shape | None:
        """Returns the shape of the target's leaf, if known."""
        return _slot_shape(self.wanted.get(kind))


@dataclasses.dataclass
class MovedLeaves:
    """A new parameter's leaves by kind, approximate and reset kinds."""

    leaves: dict[str, Any] = dataclasses.field(default_factory=dict)
    approximate: set[str] = dataclasses.field(default_factory=set)
    reset: dict[str, str] = dataclasses.field(default_factory=dict)


def is_placeholder_for(leaf: Any, shape: Shape | None) -> bool:
    """Reports whether a leaf is a placeholder for a parameter."""
    return shape is not None and _slot_shape(leaf) == _PLACEHOLDER != shape


def move_leaves(param: NewParameter, rule_of: RuleOf) -> MovedLeaves:
    """Moves an optimizer's leaves for a new parameter."""
    moved = MovedLeaves()
    if symbol_below(param.view) is not None and all(
        param.wanted_shape(kind) in (None, _slot_shape(param.all_of(kind)[0])) for kind in param.kinds
    ):
        moved.leaves.update(next(iter(param.leaves.values())))
        moved.approximate.update(kind for _, kind in param.approximate)
        return moved
    adafactor = all(kind in param.kinds for kind in _FACTORED)
    for kind in param.kinds:
        if not adafactor or kind not in _SECOND_MOMENT:
            _move_one(param, kind, moved)
    if adafactor:
        _move_second_moment(param, rule_of, moved)
    return moved


def _slot_shape(value: Any) -> Shape | None:
    shape = getattr(value, "shape", None)
    return None if shape is None else tuple(shape)


def _move_one(param: NewParameter, kind: str, moved: MovedLeaves) -> None:
    """Moves leaves like their parameters, Nones and placeholders."""
    leaves = param.all_of(kind)
    shapes = {symbol.name: symbol.shape for symbol in symbols_of(param.view)}
    if all(leaf is None for leaf in leaves):
        moved.leaves[kind] = None
        return
    like_parameter = all(_slot_shape(found[kind]) == shapes[name] for name, found in param.leaves.items())
    if like_parameter and not _is_placeholder(param, kind):
        _replay(param, kind, moved)
    elif {_slot_shape(leaf) for leaf in leaves} == {_PLACEHOLDER} and param.wanted_shape(kind) in (None, _PLACEHOLDER):
        moved.leaves[kind] = leaves[0]
    else:
        moved.reset[kind] = "its shape is not its parameter's"


def _is_placeholder(param: NewParameter, kind: str) -> bool:
    """Reports whether leaves of parameters of shape (1,) are placeholders."""
    if {_slot_shape(leaf) for leaf in param.all_of(kind)} != {_PLACEHOLDER} or kind in _SECOND_MOMENT:
        return False
    wanted = param.wanted_shape(kind)
    return kind in param.not_in_use if wanted is None else wanted == _PLACEHOLDER != tuple(param.view.shape)


def _replay(param: NewParameter, kind: str, moved: MovedLeaves) -> None:
    def leaf(symbol: Symbol, kept: KeptDims) -> View:
        return as_view(param.leaves[symbol.name][kind], name=symbol.name)

    replay = Replay(leaf, of_parameters=False)
    try:
        moved.leaves[kind] = replay.build(param.view, frozenset(range(param.view.ndim)))
    except ValueError as error:
        moved.reset[kind] = str(error)
        return
    if not replay.is_exact or any((name, kind) in param.approximate for name in param.leaves):
        moved.approximate.add(kind)


def _move_second_moment(param: NewParameter, rule_of: RuleOf, moved: MovedLeaves) -> None:
    """Moves v_row and v_col, or v; the rest are placeholders."""
    before = {_is_factored(leaves) for leaves in param.leaves.values()}
    after = _becomes_factored(param, any(before))
    live = _FACTORED if after else ("v",)
    if before != {after}:
        reason = "factored on one side only" if len(before) == 1 else "factored for some of its layers only"
        moved.reset.update((kind, reason) for kind in live if kind in param.kinds)
    elif after:
        _move_factored(param, rule_of, moved)
    elif "v" in param.kinds:
        _move_one(param, "v", moved)
    # A factor of one element has the placeholders' shape, too.
    unused = (leaves.get(kind) for leaves in param.leaves.values() for kind in _unused(leaves))
    placeholder = next((leaf for leaf in unused if _slot_shape(leaf) == _PLACEHOLDER), None)
    for kind in _SECOND_MOMENT:
        if kind in param.kinds and kind not in live and placeholder is not None:
            moved.leaves[kind] = placeholder


def _is_factored(leaves: Mapping[str, Any]) -> bool:
    if "v" in leaves and _slot_shape(leaves["v"]) != _PLACEHOLDER:
        return False
    return any(_slot_shape(leaves[kind]) != _PLACEHOLDER for kind in _FACTORED)


def _unused(leaves: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the kinds of the second moment's placeholders."""
    return ("v",) if _is_factored(leaves) else _FACTORED


def _becomes_factored(param: NewParameter, was: bool) -> bool:
    """Reports whether the target's second moment is factored."""
    if "v_row" not in param.wanted:
        return was
    if all(param.wanted_shape(kind) == _PLACEHOLDER for kind in _FACTORED):
        return False
    return "v" not in param.wanted or param.wanted_shape("v") != tuple(param.view.shape)


def _move_factored(param: NewParameter, rule_of: RuleOf, moved: MovedLeaves) -> None:
    """Moves v_row and v_col if a single solution exists."""
    shape = tuple(param.view.shape)
    v_row, v_col = (param.wanted_shape(kind) for kind in _FACTORED)
    rule = rule_of(param.path, len(shape))
    after = possible_dims(shape, v_row, v_col, rule, always_by_size=param.always_by_size)
    solutions = _solutions(param, rule_of, after) or _solutions(param, rule_of, after, averages=True)
    if len(solutions) == 1:
        leaves, approximate = solutions[0]
        moved.leaves.update(leaves)
        moved.approximate.update(approximate)
        return
    reason = "its rows and columns are not those of the new parameter"
    if solutions:
        reason = "rows and columns have ambiguous shapes: give FollowOptimizer(…, factors=[(pattern, dimensions)])"
    moved.reset.update(dict.fromkeys(_FACTORED, reason))


def _solutions(
    param: NewParameter, rule_of: RuleOf, after: Sequence[FactorDims], *, averages: bool = False
) -> list[tuple[dict[str, Any], set[str]]]:
    """Returns v_row and v_col for each choice of averaged dimensions."""
    tried = (_solve(param, old, new, averages) for old in _dims_before(param, rule_of) for new in after)
    return [solution for solution in tried if solution is not None]


def _dims_before(param: NewParameter, rule_of: RuleOf) -> Iterator[dict[str, FactorDims]]:
    """Yields every choice of averaged dimensions of old parameters."""
    groups: dict[Any, list[str]] = collections.defaultdict(list)
    for symbol in symbols_of(param.view):
        v_row, v_col = (_slot_shape(param.leaves[symbol.name][kind]) for kind in _FACTORED)
        rule = rule_of(param.paths[symbol.name], len(symbol.shape))
        groups[symbol.shape, v_row, v_col, rule].append(symbol.name)
    options = (possible_dims(*group, always_by_size=param.always_by_size) for group in groups)
    for chosen in itertools.product(*options):
        yield {name: dims for dims, members in zip(chosen, groups.values(), strict=True) for name in members}


def _solve(
    param: NewParameter, before: Mapping[str, FactorDims], after: FactorDims, averages: bool
) -> tuple[dict[str, Any], set[str]] | None:
    """Computes v_row and v_col for a choice, or returns None.

    With `averages` a mean of an old leaf over more dimensions will do.
    """
    used: set[tuple[str, str]] = set()

    def leaf(symbol: Symbol, kept: KeptDims) -> View:
        wanted = _large(kept, symbol.shape)
        for kind, keeps in zip(_FACTORED, before[symbol.name].kept(len(symbol.shape)), strict=True):
            has = _large(keeps, symbol.shape)
            if has == wanted or (averages and has > wanted):
                used.add((symbol.name, kind))
                made = as_view(param.leaves[symbol.name][kind], name=symbol.name)
                made = made.reshape([symbol.shape[dim] for dim in sorted(has)])
                for axis, dim in reversed([*enumerate(sorted(has))]):
                    made = made if dim in wanted else _mean(made, axis)
                return made.reshape([symbol.shape[dim] for dim in sorted(kept)])
        raise CannotFollowError("no slot keeps these dimensions")

    leaves: dict[str, Any] = {}
    approximate: set[str] = set()
    for kind, kept in zip(_FACTORED, after.kept(param.view.ndim), strict=True):
        replay = Replay(leaf, of_parameters=False)
        used.clear()
        try:
            leaves[kind] = replay.build(param.view, kept)
        except ValueError:
            return None
        if not replay.is_exact or not used.isdisjoint(param.approximate):
            approximate.add(kind)
    return leaves, approximate


def _mean(view: View, axis: int) -> View:
    """Averages a view over an axis."""
    before = (slice(None),) * axis
    parts = [view[(*before, index)] for index in range(view.shape[axis])]
    return average(parts, [1.0] * len(parts))


def _large(kept: Iterable[int], shape: Sequence[int]) -> KeptDims:
    """Drops kept dimensions of size 1."""
    return frozenset(dim for dim in kept if shape[dim] != 1)
