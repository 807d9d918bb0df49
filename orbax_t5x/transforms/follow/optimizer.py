"""A transform of parameters that the optimizer's state follows.

The transform runs once, on symbols of the parameters; its result is then built again over each optimizer leaf that
belongs to them (`trace`, `move`). Leaves of the parameter's shape (Adam's mu and nu, momentum, a second moment that is
not factored) are computed exactly as the parameter was. A factored second moment keeps some of the parameter's
dimensions: which ones, `optim.factored_dims` decides. A leaf that cannot be computed is reset: it is left out with a
warning, so that `fallback` gives it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from orbax_t5x.errors import Fix
from orbax_t5x.lazy import View, as_view
from orbax_t5x.optim.containers import STANDARD_ROOTS, checked_roots, find_roots, rename_counts
from orbax_t5x.optim.factor_rules import FactorDim
from orbax_t5x.optim.moments import Slot, SlotNames, SlotTree, StateRoot, by_tree
from orbax_t5x.provenance.digests import digest_of
from orbax_t5x.text.wording import leaves_text, listed
from orbax_t5x.transforms.base import AnyTransform, Transform, describe_transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.follow.move import MovedLeaves, NewParameter, is_placeholder_for, move_leaves
from orbax_t5x.transforms.follow.trace import KeptDims, Replay, Symbol, is_symbol, symbol_below, symbol_for, symbols_of
from orbax_t5x.transforms.patterns.table import Pattern, check_pattern, rule_table
from orbax_t5x.transforms.run import run_transforms
from orbax_t5x.trees.flat import FlatState

Position = tuple[str, str]
"""The path of slots in an optimizer's state, and the form of their names."""


class PlaceOfSlots(NamedTuple):
    """A new parameter's train state, path and names of slots."""

    names: SlotNames
    state: StateRoot
    path: str


class Places:
    """Finder of the names that slots of new parameters get.

    A target's state with these parameters comes first, then the roots of the old state. Parameters with a root of
    their own keep their slots in the container in which they are.
    """

    def __init__(
        self,
        names: SlotNames,
        target_names: SlotNames,
        target_slots: Mapping[str, Slot],
        target: FlatState,
        moved: FlatState,
        *,
        is_given: bool,
    ):
        self.old = names
        self._target = target_names
        self._target_names = target
        self._wanted = {slot.tree.state for slot in target_slots.values()}
        self._target_kinds: dict[Position, set[str]] = collections.defaultdict(set)
        for slot in target_slots.values():
            self._target_kinds[slot.tree.path, slot.tree.form].add(slot.kind)
        self._own = {} if is_given else self._own_roots(moved)

    def _known(self, name: str, old: StateRoot) -> PlaceOfSlots | None:
        found = self._target.param(name)
        if found is not None and found[0] in self._wanted:
            return PlaceOfSlots(self._target, *found)
        found = self.old.param(name)
        is_new_standard = found is not None and found[0].number != old.number and self._is_standard(found[0])
        if found is None or (is_new_standard and not self._is_standard(old)):
            return None
        return PlaceOfSlots(self.old, *found)

    def _is_standard(self, state: StateRoot) -> bool:
        return self.old.roots[state.number] in STANDARD_ROOTS

    def _own_roots(self, moved: FlatState) -> dict[StateRoot, str]:
        """Returns new roots of parameters below no known root."""
        votes: dict[StateRoot, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        outside: dict[StateRoot, list[str]] = collections.defaultdict(list)
        inside: set[StateRoot] = set()
        for name, value in moved.items():
            for symbol in symbols_of(value):
                old = self.old.param(symbol.name)
                if old is None:
                    continue
                if self._known(name, old[0]) is not None:
                    inside.add(old[0])
                    continue
                outside[old[0]].append(name)
                if name.endswith(f"/{old[1]}"):
                    votes[old[0]][name.removesuffix(f"/{old[1]}")] += 1
        result: dict[StateRoot, str] = {}
        for state, names in outside.items():
            firsts = {name.partition("/")[0] for name in names}
            likely = [*(root for root, _ in votes[state].most_common(1)), *(firsts if len(firsts) == 1 else ())]
            fitting = (root for root in likely if all(name.startswith(f"{root}/") for name in names))
            result[state] = "" if state in inside else next(fitting, "")
        return result

    def of(self, name: str, old: StateRoot) -> PlaceOfSlots | None:
        """Returns the place of a new parameter, or None."""
        known = self._known(name, old)
        root = self._own.get(old)
        if known is not None or root is None:
            return known
        names = SlotNames(((root, old.source + self.old.roots[old.number][1]),))
        return PlaceOfSlots(names, StateRoot("", 0), name[len(root) :].lstrip("/"))

    def tree(
        self, place: PlaceOfSlots, old: SlotTree, kinds: Sequence[str], others: Iterable[Position]
    ) -> tuple[SlotTree, Sequence[str]]:
        """Returns a place's tree of slots, with the kinds as named there."""
        position = old.path, old.form
        if place.names is self._target and not self._target_kinds[position].issuperset(kinds):
            if old.kind_first and all(kind.isdecimal() for kind in kinds):
                kinds = self._by_fields(place, old.path, kinds)
            same = [
                one
                for one, has in self._target_kinds.items()
                if one[1].startswith("{kind}") == old.kind_first and has.issuperset(kinds)
            ]
            inside = [one for one in same if f"/{one[0]}".endswith(f"/{old.path}")]  # a wrapper
            same = [one for one in inside if one[0] == old.path] or inside or same
            if len(same) == 1 and (same[0] not in others or same[0][0] == old.path):
                position = same[0]
        return SlotTree(place.state, *position), kinds

    def _by_fields(self, place: PlaceOfSlots, path: str, kinds: Sequence[str]) -> Sequence[str]:
        """Returns the target's fields at these indices."""
        start = place.names.directory(SlotTree(place.state, path, "")) + "/"
        below = [name.removeprefix(start).split("/")[0] for name in self._target_names if name.startswith(start)]
        fields = dict(enumerate(dict.fromkeys(below)))
        return [fields.get(int(kind), kind) for kind in kinds]


Spec = tuple[str, ...]
"""A factor rule as text: the part of each dimension, "ROW", "COLUMN" or "BATCH"."""

_PARTS = frozenset({"ROW", "COLUMN", "BATCH"})
_FACTORS = frozenset({"v_row", "v_col"})
# Adafactor's momentum is a mean of updates, in which the factors are.
_MOMENTUM = frozenset({"m", "ema"})
_RESET = "reset: "
_DROP_FIRST = Fix(
    "drop the optimizer's leaves first (Drop), or restore into a target and give fallback= values for them"
)
_GIVE_ROOTS = Fix("give FollowOptimizer(…, roots=[(root of the parameters, root of their optimizer's state), …])")


@dataclasses.dataclass(frozen=True)
class FollowOptimizer(Transform):
    """Transform of parameters and, in the same way, of their optimizer.

    The transform gets parameters, step and counts, not the leaves that belong to parameters; its patterns are for
    the parameters. The fidelity of each leaf that follows is recorded: "exact"; "approximate" (averaged, repeated, or
    a part of a mean over more); "reset" (left out, because it has no counterpart). In a chain of several the worst
    counts. Casts apply only to parameters.

    Attributes:
      transform: any transform, or a plain function that renames or composes.
      factors: pairs (regex of a parameter's path, the part of each of its dimensions: "ROW", "COLUMN" or "BATCH"),
        as in T5X's factor_map, for parameters of rank 3 and more whose shapes are ambiguous. The first pair whose regex
        and rank fit counts.
      roots: pairs (root of the parameters' names, root of their optimizer's state). None, as the default: found by
        structure, in the checkpoint and in the target; T5X's and Flax's count for new names.

    Example:
      >>> follow = ot.transforms.FollowOptimizer(ot.transforms.Rename([("target/old", "target/new")]))
      >>> follow({"target": {"old": np.ones(2)}, "state": {"param_states": {"old": {"m": np.zeros(2)}}}}, {})
      {'target': {'new': array([1., 1.])}, 'state': {'param_states': {'new': {'m': array([0., 0.])}}}}
    """

    transform: AnyTransform
    factors: Sequence[tuple[Pattern, Sequence[str]]] = ()
    roots: Sequence[tuple[str, str]] | None = STANDARD_ROOTS

    def __post_init__(self) -> None:
        given: Any = self.factors
        pairs = given.items() if isinstance(given, Mapping) else given
        factors = tuple((pattern, _checked_spec(spec)) for pattern, spec in pairs)
        for pattern, _ in factors:
            check_pattern(pattern, "FollowOptimizer")
        object.__setattr__(self, "factors", factors)
        # The default is written out, since records of runs have it so.
        object.__setattr__(self, "roots", STANDARD_ROOTS if self.roots is None else checked_roots(self.roots))

    def describe(self) -> str:
        """Returns a line for people."""
        return f"FollowOptimizer({describe_transform(self.transform)})"

    def digest(self) -> str | None:
        """Returns the transform's own digest, unless roots or factors are given."""
        is_given = bool(self.factors) or tuple(self.roots or ()) != tuple(STANDARD_ROOTS)
        return super().digest() if is_given else digest_of(self.transform)

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        # A leaf that an earlier FollowOptimizer reset still counts as a slot: under its new name it is reset, too.
        lost = [name for name, fidelity in diagnostics.fidelity.items() if fidelity == "reset" and name not in state]
        leaves = {**dict.fromkeys(lost), **state}
        given = None if self.roots == STANDARD_ROOTS else self.roots
        names, target_names = (self.slot_names(side) for side in (leaves, target))
        slots, target_slots = names.slots(leaves), target_names.slots(target)
        inner_target = {name: value for name, value in target.items() if name not in target_slots}
        symbols: dict[str, Any] = {}
        for name, value in state.items():
            if name not in slots:
                symbol = symbol_for(name, value) if slots and names.param(name) is not None else None
                symbols[name] = value if symbol is None else symbol
        moved = run_transforms((self.transform,), symbols, inner_target, is_resuming=False, diagnostics=diagnostics)
        if given is None:
            _check_clear(leaves, symbols, moved, diagnostics)
        if not slots:
            return moved
        places = Places(names, target_names, target_slots, target, moved, is_given=given is not None)
        following = _OptimizerMover(self, places, state, slots, target, moved, diagnostics)
        result = {name: following.parameter(value) for name, value in moved.items()}
        for name, value in moved.items():
            following.put(result, following.slots_of(name, value))
        following.finish()
        return following.with_counts(result) if given is None else result

    def slot_names(self, leaves: FlatState) -> SlotNames:
        """Finds the roots of leaves, unless they are given."""
        return SlotNames.among(leaves) if self.roots in (None, STANDARD_ROOTS) else SlotNames(self.roots)

    def rule_of(self, path: str, rank: int) -> tuple[FactorDim, ...] | None:
        """Returns the Adafactor rule for a parameter, or None."""
        for pattern, spec in self.factors:
            if len(spec) == rank and rule_table((pattern,)).first(path) is not None:
                return tuple(FactorDim[part] for part in spec)
        return None


def _checked_spec(spec: Sequence[Any]) -> Spec:
    """Normalizes the role of each dimension."""
    parts = tuple(str(getattr(part, "name", part)).upper() for part in spec)
    if not _PARTS.issuperset(parts) or not {"ROW", "COLUMN"} <= set(parts):
        raise ValueError(f"the dimensions of a factored parameter are ROW, COLUMN (both), or BATCH, not {spec!r}")
    return parts


def _check_clear(leaves: FlatState, before: FlatState, after: FlatState, diagnostics: Diagnostics) -> None:
    """Refuses changes to parameters with an unclear optimizer."""
    for container, roots in find_roots(leaves).unclear.items():
        changed = [
            name
            for name, value in before.items()
            if after.get(name) is not value and any(name.startswith(f"{root}/") for root in roots)
        ]
        if changed:
            owners = f"{listed(map(repr, roots), 4, separator=' or ')}, of which {changed[0]!r} is changed"
            message = f"the optimizer's leaves below {container!r} may belong to the parameters below {owners}"
            fix = Fix(f"say whose they are: FollowOptimizer(…, roots=[({roots[0]!r}, {container!r})])")
            diagnostics.problem("optimizer", None, message, fix)


class _OptimizerMover:
    """Mover of the optimizer's leaves in a run."""

    def __init__(
        self,
        owner: FollowOptimizer,
        places: Places,
        state: FlatState,
        slots: Mapping[str, Slot],
        target: FlatState,
        moved: FlatState,
        diagnostics: Diagnostics,
    ):
        self._owner = owner
        self._names = places.old
        self._places = places
        self._slots = slots
        # Slots of parameters that have no new name in a train state; and old directories of slots -> new ones.
        self._homeless: dict[str, str] = {}
        self._followed: set[str] = set()
        self._directories: dict[str, str] = {}
        self._state = state
        self._target = target
        self._diagnostics = diagnostics
        self._reset: dict[str, list[str]] = collections.defaultdict(list)
        # Slots that an earlier FollowOptimizer reset; there has been a warning for each.
        self._lost = slots.keys() - state.keys()
        # Slots that are approximate already: what is made of them is so, too.
        self._approximate = {name for name in slots if diagnostics.fidelity.get(name) == "approximate"}
        # How many new parameters each old one is copied to. With several, each will get only a part of the gradient.
        self._copies = collections.Counter(one.name for one in map(symbol_below, moved.values()) if one is not None)
        # position -> (state, parameter's path) -> kind -> name
        self._trees: dict[Position, dict[tuple[StateRoot, str], dict[str, str]]] = collections.defaultdict(dict)
        for tree, params in by_tree(slots).items():
            for param, kinds in params.items():
                self._trees[tree.path, tree.form][tree.state, param] = kinds
        self._not_in_use = self._kinds_not_in_use()

    def _kinds_not_in_use(self) -> dict[Position, frozenset[str]]:
        """Returns the kinds of which a parameter has a placeholder."""
        shapes = {self._names.param(name): getattr(value, "shape", None) for name, value in self._state.items()}
        return {
            tree: frozenset(
                kind
                for param, kinds in leaves_of.items()
                for kind, slot in kinds.items()
                if is_placeholder_for(self._state.get(slot), shapes.get(param))
            )
            for tree, leaves_of in self._trees.items()
        }

    def parameter(self, value: Any) -> Any:
        """Rebuilds a new parameter over the checkpoint's leaves instead of symbols."""
        # The state itself may be of symbols; step and counts were handed on as they are, perhaps under a new name.
        names = [symbol.name for symbol in symbols_of(value)]
        if not names or not self._state.keys() >= set(names):
            return value
        if is_symbol(value):
            return self._state[value.leaf.name]

        def real(symbol: Symbol, kept: KeptDims) -> View:
            return as_view(self._state[symbol.name], name=symbol.name)

        return Replay(real, of_parameters=True).build(value, frozenset(range(value.ndim)))

    def slots_of(self, name: str, value: Any) -> dict[str, Any]:
        """Returns the optimizer leaves of a new parameter, by their new names."""
        old = {symbol.name: self._names.param(symbol.name) for symbol in symbols_of(value)}
        result: dict[str, Any] = {}
        every: list[tuple[dict[str, str], MovedLeaves]] = []
        for position, leaves_of in self._trees.items():
            having = {old_name: leaves_of[key] for old_name, key in old.items() if key is not None and key in leaves_of}
            if not having:
                continue
            old_state, _ = old[next(iter(having))] or (StateRoot("", 0), "")
            found = self._places.of(name, old_state)
            names_of_slots = [slot for slots in having.values() for slot in slots.values()]
            if found is None:
                self._homeless.update(dict.fromkeys(names_of_slots, name))
                continue
            self._followed.update(names_of_slots)
            kinds = list(dict.fromkeys(kind for kinds in having.values() for kind in kinds))
            old_tree = SlotTree(old_state, *position)
            tree, new_kinds = self._places.tree(found, old_tree, kinds, self._trees.keys())
            self._directories[self._names.directory(old_tree)] = found.names.directory(tree)
            new = {
                kind: found.names.slot_name(Slot(tree, named, found.path))
                for kind, named in zip(kinds, new_kinds, strict=True)
            }
            if all(set(having.get(old_name, ())) == set(kinds) for old_name in old):
                lost = self._lost_kinds(having)
                new_param = NewParameter(
                    value,
                    found.path,
                    {old_name: key[1] for old_name, key in old.items() if key is not None},
                    {
                        old_name: {kind: self._state[slot] for kind, slot in slots.items() if kind not in lost}
                        for old_name, slots in having.items()
                    },
                    self._wanted(name, value, new),
                    tree.kind_first,
                    self._not_in_use[position],
                    frozenset(
                        (old_name, kind)
                        for old_name, slots in having.items()
                        for kind, slot in slots.items()
                        if slot in self._approximate
                    ),
                )
                moved = move_leaves(new_param, self._owner.rule_of)
                if (copied := symbol_below(value)) is not None and self._copies[copied.name] > 1:
                    moved.approximate.update(moved.leaves)
                moved.reset.update(lost)
            else:
                moved = MovedLeaves(reset=dict.fromkeys(kinds, "not all of its parameters have this state"))
            every.append((new, moved))
        is_factored_anew = any(_FACTORS & (moved.approximate | moved.reset.keys()) for _, moved in every)
        for new, moved in every:
            if is_factored_anew:
                # A placeholder is no momentum.
                shapes = {kind: getattr(moved.leaves[kind], "shape", (1,)) for kind in _MOMENTUM & moved.leaves.keys()}
                moved.approximate.update(kind for kind, shape in shapes.items() if tuple(shape) != (1,))
            result.update((new[kind], leaf) for kind, leaf in moved.leaves.items())
            self._record(name, new, moved)
        return result

    def _wanted(self, name: str, value: View, slots: Mapping[str, str]) -> dict[str, Any]:
        """Returns the target's slots of a parameter of its shape."""
        shape = getattr(self._target.get(name), "shape", None)
        if shape is not None and tuple(shape) != tuple(value.shape):
            return {}
        return {kind: self._target[slot] for kind, slot in slots.items() if slot in self._target}

    def _lost_kinds(self, having: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
        """Returns the kinds that were reset before, with reasons."""
        lost = {kind: slot for slots in having.values() for kind, slot in slots.items() if slot not in self._state}
        return {kind: self._diagnostics.rule_for[slot].removeprefix(_RESET) for kind, slot in lost.items()}

    def _record(self, name: str, new: Mapping[str, str], moved: MovedLeaves) -> None:
        rule = self._diagnostics.rule_for.get(name)
        for kind in moved.leaves:
            fidelity = "approximate" if kind in moved.approximate else "exact"
            self._diagnostics.fidelity[new[kind]] = fidelity
            if rule is not None:
                self._diagnostics.rule_for[new[kind]] = f"{rule}; followed ({fidelity})"
        for kind, reason in moved.reset.items():
            self._diagnostics.fidelity[new[kind]] = "reset"
            self._diagnostics.rule_for[new[kind]] = f"{_RESET}{reason}"
            # Where the target has no such leaf, nothing is missing.
            if new[kind] not in self._lost and (not self._target or new[kind] in self._target):
                self._reset[reason].append(new[kind])

    def put(self, result: dict[str, Any], leaves: Mapping[str, Any]) -> None:
        """Adds slots to a state; a taken name is a problem."""
        for name, value in leaves.items():
            if name in result:
                message = f"a leaf of the optimizer and another leaf both become {name!r}"
                self._diagnostics.problem("optimizer", name, message, _GIVE_ROOTS)
            result[name] = value

    def with_counts(self, result: dict[str, Any]) -> dict[str, Any]:
        """Renames step and counts beside slots that moved."""
        renames = rename_counts(result, self._target, self._directories)
        rule = "with its optimizer's leaves"
        self._diagnostics.record_origins({new: (old, rule) for old, new in renames.items()})
        return {renames.get(name, name): value for name, value in result.items()}

    def finish(self) -> None:
        """Records warnings and problems of the whole run."""
        homeless = {slot: param for slot, param in self._homeless.items() if slot not in self._followed}
        if homeless:
            became = listed(map(repr, dict.fromkeys(homeless.values())), 3)
            message = (
                f"{leaves_text(len(homeless))} of the optimizer have no parameter under these names: their parameters "
                f"became {became}, below none of the roots"
            )
            self._diagnostics.problem("optimizer", None, message, _GIVE_ROOTS)
        for reason, names in self._reset.items():
            count = f"{len(names)} optimizer leaves are" if len(names) > 1 else "one optimizer leaf is"
            text = f"FollowOptimizer: {count} reset ({reason}): {listed(map(repr, names), 1)}"
            if self._target or self._diagnostics.allows_unmapped:
                self._diagnostics.warnings.append(f"{text}; give them by fallback=")
            else:
                self._diagnostics.problem("optimizer", None, text, _DROP_FIRST)
