"""Slots of a new parameter, made of the slots of the parameters that it is made of.

Pure: views in, views out. A slot of its parameter's shape is computed as the parameter was. Adafactor's `v_row` and
`v_col` keep some of the parameter's dimensions: they are computed over those, and exchanged where rows become columns;
a slot that is not in use is a placeholder of shape (1,) and stays. One number for a parameter stays as long as the
parameter does. Everything else cannot follow, with a reason.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from orbax_t5x.lazy import View, as_view
from orbax_t5x.optim.factor_rules import FactorDim
from orbax_t5x.optim.factored_dims import FactorDims, Shape, possible_dims
from orbax_t5x.transforms.follow.trace import (
    CannotFollowError,
    KeptDims,
    Replay,
    Symbol,
    is_rearranged,
    symbol_below,
    symbols_of,
)

FACTORS = ("v_row", "v_col")
_SECOND_MOMENT = (*FACTORS, "v")
_PLACEHOLDER: Shape = (1,)
# Means of updates. What stands before them in a chain may have scaled an update by its leaf's norm.
_OF_UPDATES = frozenset({"trace", "ema", "m", "momentum"})
# Means of what the other kinds of the same node have scaled.
_OF_OTHERS = frozenset({"mu", *_OF_UPDATES})

RuleOf = Callable[[str, int], "tuple[FactorDim, ...] | None"]
"""Adafactor's rule for a parameter by its plain name and rank, or None."""


@dataclasses.dataclass(frozen=True)
class NewParameter:
    """A new parameter, and the slots of the parameters that it is made of.

    Attributes:
      name: Its plain name.
      view: Its value, over symbols of the old parameters.
      slots: Slots of a node by kind, and by the names of the old parameters.
      wanted: Shapes of the target's slots by kind, as far as they are known.
      is_by_size: True where sizes decide about factors for every rank (Optax), not only for matrices (T5X).
      is_copy: True where the slots are copies of parameters.
      is_first: True where the node is the first of its chain.
      unused_kinds: Kinds of which the optimizer has placeholders only.
    """

    name: str
    view: View
    slots: Mapping[str, Mapping[str, Any]]
    wanted: Mapping[str, Shape]
    is_by_size: bool
    is_copy: bool
    is_first: bool
    unused_kinds: frozenset[str]


@dataclasses.dataclass
class NewSlots:
    """Slots of a new parameter by kind; kinds that are approximate; reasons of those that cannot follow."""

    views: dict[str, Any] = dataclasses.field(default_factory=dict)
    approximate: set[str] = dataclasses.field(default_factory=set)
    lost: dict[str, str] = dataclasses.field(default_factory=dict)


def follow_parameter(parameter: NewParameter, rule_of: RuleOf) -> NewSlots:
    """Computes the slots of a new parameter."""
    result = NewSlots()
    whole = symbol_below(parameter.view)
    names = [symbol.name for symbol in symbols_of(parameter.view)]
    kinds = [kind for kind, slots in parameter.slots.items() if set(names) == slots.keys()]
    for kind in parameter.slots.keys() - set(kinds):
        result.lost[kind] = "not all of its parameters have this state"
    is_same = whole is not None and all(
        parameter.wanted.get(kind) in (None, _shape(parameter.slots[kind][whole.name])) for kind in kinds
    )
    if whole is not None and is_same and not parameter.is_copy:
        result.views.update({kind: parameter.slots[kind][whole.name] for kind in kinds})
        return result
    factors = [kind for kind in FACTORS if kind in kinds]
    # A copy takes casts and added constants, too.
    for kind in kinds:
        if not factors or kind not in _SECOND_MOMENT:
            _follow_kind(parameter, kind, result)
        elif len(factors) == 1:
            result.lost[kind] = "one of its two factors is missing"
    if len(factors) > 1:
        _follow_second_moment(parameter, kinds, rule_of, result)
    if not is_rearranged(parameter.view):
        _mark_approximate(parameter, result)
    return result


def _mark_approximate(parameter: NewParameter, result: NewSlots) -> None:
    """Marks kinds whose values depend on where a parameter's leaf begins and ends."""
    used = {kind for kind, view in result.views.items() if _shape(view) != _PLACEHOLDER}
    if result.lost or result.approximate:
        result.approximate.update(used & _OF_OTHERS)
    elif not parameter.is_first:
        result.approximate.update(used & _OF_UPDATES)


def _shape(value: Any) -> Shape | None:
    shape = getattr(value, "shape", None)
    return None if shape is None else tuple(shape)


def is_placeholder(slot: Any, shape: Shape | None) -> bool:
    """Returns True if a slot is not in use for a parameter of a shape."""
    return shape is not None and _shape(slot) == _PLACEHOLDER != shape


def _follow_kind(parameter: NewParameter, kind: str, result: NewSlots) -> None:
    """Computes a slot of the parameter's shape, a number for it, or a placeholder."""
    slots = parameter.slots[kind]
    symbols = list(symbols_of(parameter.view))
    shapes = {_shape(slot) for slot in slots.values()}
    if shapes == {None}:
        result.views[kind] = next(iter(slots.values()))
    elif shapes == {_PLACEHOLDER} and (
        kind in parameter.unused_kinds or any(symbol.shape != _PLACEHOLDER for symbol in symbols)
    ):
        if parameter.wanted.get(kind) in (None, _PLACEHOLDER):
            result.views[kind] = next(iter(slots.values()))
        else:
            result.lost[kind] = "it is not in use in the checkpoint"
    elif all(_shape(slots[symbol.name]) == symbol.shape for symbol in symbols):
        _replay(parameter, kind, result)
    elif shapes == {()} and is_rearranged(parameter.view):
        result.views[kind] = slots[symbols[0].name]
    else:
        result.lost[kind] = "it has one number for its whole parameter" if shapes == {()} else "its form is not known"


def _replay(parameter: NewParameter, kind: str, result: NewSlots) -> None:
    def slot_of(symbol: Symbol, kept: KeptDims) -> View:
        return as_view(parameter.slots[kind][symbol.name], name=symbol.name)

    replay = Replay(slot_of, of_parameters=parameter.is_copy)
    try:
        result.views[kind] = replay.build(parameter.view, frozenset(range(parameter.view.ndim)))
    except ValueError as error:
        result.lost[kind] = str(error)
        return
    if not replay.is_exact:
        result.approximate.add(kind)


# -- Adafactor's second moment


def _follow_second_moment(parameter: NewParameter, kinds: Iterable[str], rule_of: RuleOf, result: NewSlots) -> None:
    """Computes `v_row` and `v_col`, or `v`; the others are placeholders."""
    before = {_is_factored(parameter, symbol) for symbol in symbols_of(parameter.view)}
    after = _becomes_factored(parameter, any(before))
    used = FACTORS if after else ("v",)
    if before != {after}:
        reason = "factored on one side only" if len(before) == 1 else "factored for some of its layers only"
        result.lost.update((kind, reason) for kind in used if kind in kinds)
    elif after:
        _follow_factors(parameter, rule_of, result)
    elif "v" in kinds:
        _replay(parameter, "v", result)
    for kind in set(_SECOND_MOMENT).intersection(kinds).difference(used):
        slots = parameter.slots[kind].values()
        placeholder = next((slot for slot in slots if _shape(slot) == _PLACEHOLDER), None)
        if placeholder is not None:
            result.views[kind] = placeholder
        else:
            result.lost[kind] = "no parameter of it has a placeholder for this"


def _is_factored(parameter: NewParameter, symbol: Symbol) -> bool:
    shapes = {kind: _shape(slots[symbol.name]) for kind, slots in parameter.slots.items() if symbol.name in slots}
    if shapes.get("v", _PLACEHOLDER) != _PLACEHOLDER:
        return False
    return any(shapes[kind] != _PLACEHOLDER for kind in FACTORS)


def _becomes_factored(parameter: NewParameter, is_factored: bool) -> bool:
    """Returns True if the new parameter's second moment is factored: as the target says, else as it was."""
    wanted = parameter.wanted
    if "v_row" not in wanted:
        return is_factored
    if all(wanted.get(kind) == _PLACEHOLDER for kind in FACTORS):
        return False
    return wanted.get("v") != tuple(parameter.view.shape)


def _follow_factors(parameter: NewParameter, rule_of: RuleOf, result: NewSlots) -> None:
    """Computes `v_row` and `v_col` if a single reading of their dimensions exists."""
    shape = tuple(parameter.view.shape)
    rule = rule_of(parameter.name, len(shape))
    after = possible_dims(
        shape, *(parameter.wanted.get(kind) for kind in FACTORS), rule, always_by_size=parameter.is_by_size
    )
    readings = list(itertools.product(_dims_before(parameter, rule_of), after))
    for may_average in (False, True):
        solved = [_solve(parameter, before, dims, may_average) for before, dims in readings]
        solutions = [solution for solution in solved if solution is not None]
        if len(solutions) == 1:
            views, approximate = solutions[0]
            result.views.update(views)
            result.approximate.update(approximate)
            return
        if solutions:
            break
    reason = "its rows and columns are not those of the new parameter"
    if len(solutions) > 1:
        reason = "shapes leave open which of its dimensions are rows and which columns"
    result.lost.update(dict.fromkeys(FACTORS, reason))


def _dims_before(parameter: NewParameter, rule_of: RuleOf) -> Iterator[dict[str, FactorDims]]:
    """Yields each reading of the old parameters' factors; parameters of equal shapes are read alike."""
    groups: dict[Any, list[str]] = collections.defaultdict(list)
    for symbol in symbols_of(parameter.view):
        row, column = (_shape(parameter.slots[kind][symbol.name]) for kind in FACTORS)
        groups[symbol.shape, row, column, rule_of(symbol.name, len(symbol.shape))].append(symbol.name)
    options = [possible_dims(*group, always_by_size=parameter.is_by_size) for group in groups]
    for chosen in itertools.product(*options):
        yield {name: dims for dims, names in zip(chosen, groups.values(), strict=True) for name in names}


def _solve(
    parameter: NewParameter, before: Mapping[str, FactorDims], after: FactorDims, may_average: bool
) -> tuple[dict[str, View], set[str]] | None:
    """Computes `v_row` and `v_col` for a reading, and which of them are approximate, or returns None.

    With `may_average` a mean of an old factor over more dimensions will do.
    """

    def slot_of(symbol: Symbol, kept: KeptDims) -> View:
        wanted = _larger_than_one(kept, symbol.shape)
        for kind, factor_keeps in zip(FACTORS, before[symbol.name].kept(len(symbol.shape)), strict=True):
            dims = sorted(_larger_than_one(factor_keeps, symbol.shape))
            if set(dims) != wanted and not (may_average and wanted < set(dims)):
                continue
            view = as_view(parameter.slots[kind][symbol.name], name=symbol.name)
            view = view.reshape([symbol.shape[dim] for dim in dims])
            for axis in reversed(range(len(dims))):
                view = view if dims[axis] in wanted else mean_over(view, axis)
            return view.reshape([symbol.shape[dim] for dim in sorted(kept)])
        raise CannotFollowError("no factor keeps these dimensions")

    views: dict[str, View] = {}
    approximate: set[str] = set()
    for kind, kept in zip(FACTORS, after.kept(parameter.view.ndim), strict=True):
        replay = Replay(slot_of, of_parameters=False)
        try:
            views[kind] = replay.build(parameter.view, kept)
        except ValueError:
            return None
        if not replay.is_exact:
            approximate.add(kind)
    return views, approximate


def mean_over(view: View, axis: int) -> View:
    """Averages a view over an axis."""
    before = (slice(None),) * axis
    return Replay.mean([view[(*before, index)] for index in range(view.shape[axis])])


def _larger_than_one(dims: Iterable[int], shape: Shape) -> set[int]:
    """Leaves out dimensions of size 1."""
    return {dim for dim in dims if shape[dim] != 1}
