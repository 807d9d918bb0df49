"""What moves a parameter moves its optimizer state, too.

The transform runs once, on symbols of the parameters; its result is then replayed over each optimizer leaf that
belongs to them (`_trace`, `_move`). Leaves of the parameter's shape (Adam's mu and nu, momentum, an unfactored
second moment) are moved exactly as the parameter was. A factored second moment keeps some of the parameter's
dimensions; which, before and after, is `_factoring`'s answer. What cannot be moved is reset: left out, with a
warning, for `fallback` to give.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from orbax_t5x.lazy import View, as_view
from orbax_t5x.transforms.base import AnyTransform, Transform
from orbax_t5x.transforms.describe import describe_transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.follow.factoring import Spec, checked_spec
from orbax_t5x.transforms.follow.move import Move, Outcome, move_leaves
from orbax_t5x.transforms.follow.slots import STANDARD_ROOTS, Names, Place, Roots, Slot, Tree, by_tree, checked_roots
from orbax_t5x.transforms.follow.trace import Kept, Replay, Symbol, is_symbol, symbol_for, symbols_of
from orbax_t5x.transforms.patterns.table import Pattern, check_pattern, rule_table
from orbax_t5x.transforms.run import run_transforms
from orbax_t5x.trees.flat import FlatState


@dataclasses.dataclass(frozen=True)
class FollowOptimizer(Transform):
    """Runs a transform, and does to the optimizer's leaves what it does to their parameters.

    The transform sees parameters, step and counts, not the leaves that belong to parameters; its patterns are for
    the parameters. Each leaf that follows is classed in `Diagnostics.fidelity`: "exact"; "approximate" (averaged,
    repeated, or a part of what was averaged over more); "reset": left out, because it has no counterpart. Casts are
    for parameters alone.

    Attributes:
      transform: any transform, or a plain function that renames or composes.
      factors: pairs (regex of a parameter's path, the part of each of its dimensions: "ROW", "COLUMN" or "BATCH"),
        as in T5X's factor_map, for parameters of rank 3 and more whose shapes do not tell. The first whose regex
        and rank fit counts.
      roots: pairs (where parameters stand, where their optimizer's state stands).
    """

    transform: AnyTransform
    factors: tuple[tuple[Pattern, Spec], ...] = ()
    roots: Roots = STANDARD_ROOTS

    def __post_init__(self) -> None:
        given: Any = self.factors
        pairs = given.items() if isinstance(given, Mapping) else given
        factors = tuple((pattern, checked_spec(spec)) for pattern, spec in pairs)
        for pattern, _ in factors:
            check_pattern(pattern, "FollowOptimizer")
        object.__setattr__(self, "factors", factors)
        object.__setattr__(self, "roots", checked_roots(self.roots))

    def describe(self) -> str:
        """One line for people."""
        return f"FollowOptimizer({describe_transform(self.transform)})"

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        """See `Transform.apply`."""
        names = Names(self.roots)
        slots, target_slots = names.slots(state), names.slots(target)
        symbols: dict[str, Any] = {}
        for name, value in state.items():
            if name not in slots:
                symbol = symbol_for(name, value) if names.param(name) is not None else None
                symbols[name] = value if symbol is None else symbol
        inner_target = {name: value for name, value in target.items() if name not in target_slots}
        moved = run_transforms((self.transform,), symbols, inner_target, is_resuming=False, diagnostics=diagnostics)
        following = _Following(self, names, state, slots, target, moved, diagnostics)
        result = {name: following.parameter(value) for name, value in moved.items()}
        for name, value in moved.items():
            result.update(following.slots_of(name, value))
        following.finish()
        return result

    def spec_of(self, path: str, rank: int) -> Spec | None:
        """The parts of a parameter's dimensions, where `factors` tells them."""
        for pattern, spec in self.factors:
            if len(spec) == rank and rule_table((pattern,)).first(path) is not None:
                return spec
        return None


class _Following:
    """One run of `FollowOptimizer`: finds what belongs to what, and records what became of it."""

    def __init__(
        self,
        owner: FollowOptimizer,
        names: Names,
        state: FlatState,
        slots: Mapping[str, Slot],
        target: FlatState,
        moved: FlatState,
        diagnostics: Diagnostics,
    ):
        self._owner = owner
        self._names = names
        self._state = state
        self._target = target
        self._diagnostics = diagnostics
        self._reset: dict[str, list[str]] = collections.defaultdict(list)
        # Parameters that stand under several names now: each of those will get but a part of the old one's gradient.
        self._copies = collections.Counter(value.leaf.name for value in moved.values() if is_symbol(value))
        # (path in the optimizer, kind first) -> (place, parameter's path) -> kind -> name
        self._trees: dict[tuple[str, bool], dict[tuple[Place, str], dict[str, str]]] = collections.defaultdict(dict)
        for tree, params in by_tree(slots).items():
            for param, kinds in params.items():
                self._trees[tree.path, tree.kind_first][tree.place, param] = kinds

    def parameter(self, value: Any) -> Any:
        """A result of the transform over the real leaves."""
        if is_symbol(value):
            return self._state[value.leaf.name]
        if not any(True for _ in symbols_of(value)):
            return value

        def real(symbol: Symbol, kept: Kept) -> View:
            return as_view(self._state[symbol.name], name=symbol.name)

        return Replay(real, casts=True).build(value, frozenset(range(value.ndim)))

    def slots_of(self, name: str, value: Any) -> dict[str, Any]:
        """The optimizer leaves of a result, by their new names."""
        found = self._names.param(name)
        old = {symbol.name: self._names.param(symbol.name) for symbol in symbols_of(value)}
        if found is None or not old:
            return {}
        result: dict[str, Any] = {}
        for (tree_path, kind_first), leaves_of in self._trees.items():
            having = {old_name: leaves_of[key] for old_name, key in old.items() if key is not None and key in leaves_of}
            if not having:
                continue
            kinds = list(dict.fromkeys(kind for kinds in having.values() for kind in kinds))
            tree = Tree(found[0], tree_path, kind_first)
            new = {kind: self._names.slot_name(Slot(tree, kind, found[1])) for kind in kinds}
            if all(set(having.get(old_name, ())) == set(kinds) for old_name in old):
                move = Move(
                    value,
                    found[1],
                    {old_name: key[1] for old_name, key in old.items() if key is not None},
                    {n: {kind: self._state[slot] for kind, slot in slots.items()} for n, slots in having.items()},
                    {kind: self._target[slot] for kind, slot in new.items() if slot in self._target},
                    kind_first,
                )
                outcome = move_leaves(move, self._owner.spec_of)
                if is_symbol(value) and self._copies[value.leaf.name] > 1:
                    outcome.approximate.update(outcome.leaves)
            else:
                outcome = Outcome(reset=dict.fromkeys(kinds, "not all of its parameters have this state"))
            result.update((new[kind], leaf) for kind, leaf in outcome.leaves.items())
            self._note(name, new, outcome)
        return result

    def _note(self, name: str, new: Mapping[str, str], outcome: Outcome) -> None:
        rule = self._diagnostics.rule_for.get(name)
        for kind in outcome.leaves:
            fidelity = "approximate" if kind in outcome.approximate else "exact"
            self._diagnostics.fidelity[new[kind]] = fidelity
            if rule is not None:
                self._diagnostics.rule_for[new[kind]] = f"{rule}; followed ({fidelity})"
        for kind, reason in outcome.reset.items():
            # A target without this optimizer misses nothing.
            if not self._target or new[kind] in self._target:
                self._diagnostics.fidelity[new[kind]] = "reset"
                self._diagnostics.rule_for[new[kind]] = f"reset: {reason}"
                self._reset[reason].append(new[kind])

    def finish(self) -> None:
        """Records one warning per reason for what was reset."""
        for reason, names in self._reset.items():
            count = f"{len(names)} optimizer leaves are" if len(names) > 1 else "one optimizer leaf is"
            more = f"{names[0]!r} …" if len(names) > 1 else repr(names[0])
            self._diagnostics.warnings.append(
                f"FollowOptimizer: {count} reset ({reason}): {more}; give them by fallback="
            )
