"""What moves a parameter moves its optimizer state, too.

The transform runs once, on symbols of the parameters; its result is then replayed over each optimizer leaf that
belongs to them. Leaves of the parameter's shape (Adam's mu and nu, momentum, an unfactored second moment) are moved
exactly as the parameter was. A factored second moment keeps some of the parameter's dimensions; which, before and
after, is `_factoring`'s answer, and where rows become columns v_row and v_col change places. What cannot be moved
is reset: left out, with a warning, for `fallback` to give.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from orbax_t5x.lazy import View, as_view
from orbax_t5x.transforms._base import Notes, Transform, describe_transform, run_transforms
from orbax_t5x.transforms._factoring import Factoring, Shape, Spec, candidates, checked_spec
from orbax_t5x.transforms._patterns import Pattern, check_pattern, rule_table
from orbax_t5x.transforms._slots import STANDARD_ROOTS, Names, Place, Roots, Slot, Tree, by_tree, checked_roots
from orbax_t5x.transforms._trace import CannotFollowError, Kept, Replay, Symbol, is_symbol, symbol_for, symbols_of

_FACTORED = ("v_row", "v_col")
_PLACEHOLDER = (1,)


@dataclasses.dataclass(frozen=True)
class FollowOptimizer(Transform):
    """Runs a transform, and does to the optimizer's leaves what it does to their parameters.

    The transform sees parameters, step and counts, not the leaves that belong to parameters; its patterns are for
    the parameters. Each leaf that follows is classed in `Notes.classes`: "exact"; "approximate" (averaged,
    repeated, or a part of what was averaged over more); "reset": left out, because it has no counterpart. Casts are
    for parameters alone.

    Attributes:
      transform: any transform, or a plain function that renames or composes.
      factors: pairs (regex of a parameter's path, the part of each of its dimensions: "ROW", "COLUMN" or "BATCH"),
        as in T5X's factor_map, for parameters of rank 3 and more whose shapes do not tell. The first whose regex
        and rank fit counts.
      roots: pairs (where parameters stand, where their optimizer's state stands).
    """

    transform: Transform | Callable[..., Any]
    factors: tuple[tuple[Pattern, Spec], ...] = ()
    roots: Roots = STANDARD_ROOTS

    def __post_init__(self) -> None:
        given: Any = self.factors
        factors = tuple(
            (pattern, checked_spec(spec)) for pattern, spec in (given.items() if isinstance(given, Mapping) else given)
        )
        for pattern, _ in factors:
            check_pattern(pattern, "FollowOptimizer")
        object.__setattr__(self, "factors", factors)
        object.__setattr__(self, "roots", checked_roots(self.roots))

    def describe(self) -> str:
        """One line for people."""
        return f"FollowOptimizer({describe_transform(self.transform)})"

    def apply(self, source: dict[str, Any], target: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
        """See `Transform.apply`."""
        names = Names(self.roots)
        slots, target_slots = names.slots(source), names.slots(target)
        state: dict[str, Any] = {}
        for name, value in source.items():
            if name not in slots:
                symbol = symbol_for(name, value) if names.param(name) is not None else None
                state[name] = value if symbol is None else symbol
        inner_target = {name: value for name, value in target.items() if name not in target_slots}
        moved = run_transforms((self.transform,), state, inner_target, is_resuming=False, notes=notes)
        following = _Following(self, names, source, slots, target, notes)
        following.count_copies(moved)
        result = {name: following.parameter(value) for name, value in moved.items()}
        for name, value in moved.items():
            result.update(following.slots_of(name, value, moved))
        following.finish()
        return result

    def spec_of(self, path: str, rank: int) -> Spec | None:
        """The parts of a parameter's dimensions, where `factors` tells them."""
        for pattern, spec in self.factors:
            if len(spec) == rank and rule_table((pattern,)).first(path) is not None:
                return spec
        return None


@dataclasses.dataclass(frozen=True)
class _Move:
    """One parameter's way: what it became, from which parameters, and one tree's leaves on both sides.

    Attributes:
      view: the parameter as a graph over symbols.
      path: the new parameter's path.
      paths: old parameter's name -> its path.
      leaves: old parameter's name -> kind -> the leaf.
      wanted: kind -> the target's leaf, for the kinds that the target has.
      sizes_decide: whether the heuristic holds for every rank.
    """

    view: View
    path: str
    paths: Mapping[str, str]
    leaves: Mapping[str, Mapping[str, Any]]
    wanted: Mapping[str, Any]
    sizes_decide: bool

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(next(iter(self.leaves.values())))

    def shapes(self, kind: str) -> set[Shape | None]:
        return {_shape(leaves[kind]) for leaves in self.leaves.values()}

    def wanted_shape(self, kind: str) -> Shape | None:
        return _shape(self.wanted.get(kind))

    def first(self, kind: str) -> Any:
        return next(iter(self.leaves.values()))[kind]

    def has_param_shape(self, kind: str) -> bool:
        """Whether the old leaves of this kind have the shapes of their parameters."""
        symbols = {symbol.name: symbol.shape for symbol in symbols_of(self.view)}
        return all(_shape(leaves[kind]) == symbols[name] for name, leaves in self.leaves.items())


def _shape(value: Any) -> Shape | None:
    shape = getattr(value, "shape", None)
    return None if shape is None else tuple(shape)


class _Following:
    """The state of one run of `FollowOptimizer`."""

    def __init__(
        self,
        owner: FollowOptimizer,
        names: Names,
        source: Mapping[str, Any],
        slots: Mapping[str, Slot],
        target: Mapping[str, Any],
        notes: Notes,
    ):
        self._owner = owner
        self._names = names
        self._source = source
        self._slots = slots
        self._target = target
        self._notes = notes
        self._used: set[str] = set()
        self._copies: collections.Counter[str] = collections.Counter()
        self._why: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
        # (path in the optimizer, kind first) -> (place, parameter's path) -> kind -> name
        self._trees: dict[tuple[str, bool], dict[tuple[Place, str], dict[str, str]]] = collections.defaultdict(dict)
        for tree, params in by_tree(slots).items():
            for param, kinds in params.items():
                self._trees[tree.path, tree.kind_first][tree.place, param] = kinds

    def count_copies(self, moved: Mapping[str, Any]) -> None:
        """Sees which parameters stand under several names now: each will get but a part of the old one's gradient."""
        self._copies = collections.Counter(value.leaf.name for value in moved.values() if is_symbol(value))

    def parameter(self, value: Any) -> Any:
        """A result of the transform over the real leaves."""
        if is_symbol(value):
            return self._source[value.leaf.name]
        if not any(True for _ in symbols_of(value)):
            return value

        def real(symbol: Symbol, kept: Kept) -> View:
            return as_view(self._source[symbol.name], name=symbol.name)

        return Replay(real, casts=True).build(value, frozenset(range(value.ndim)))

    def slots_of(self, name: str, value: Any, moved: Mapping[str, Any]) -> dict[str, Any]:
        """The optimizer leaves of a result, by their new names."""
        symbols = list(symbols_of(value))
        found = self._names.param(name)
        if found is None or not symbols:
            return {}
        place, path = found
        result: dict[str, Any] = {}
        for (tree_path, kind_first), leaves_of in self._trees.items():
            old = {symbol.name: self._names.param(symbol.name) for symbol in symbols}
            having = {n: leaves_of[o] for n, o in old.items() if o is not None and o in leaves_of}
            if not having:
                continue
            self._used.update(slot for kinds in having.values() for slot in kinds.values())
            tree = Tree(place, tree_path, kind_first)
            kinds = list(dict.fromkeys(kind for kinds in having.values() for kind in kinds))
            new = {kind: self._names.slot_name(Slot(tree, kind, path)) for kind in kinds}
            if any(set(having.get(symbol, ())) != set(kinds) for symbol in old):
                self._reset(new.values(), "not all of its parameters have this state")
                continue
            wanted = {kind: self._target[slot] for kind, slot in new.items() if slot in self._target}
            leaves = {n: {kind: self._source[slot] for kind, slot in slots.items()} for n, slots in having.items()}
            paths = {n: o[1] for n, o in old.items() if o is not None}
            move = _Move(value, path, paths, leaves, wanted, kind_first)
            for kind, leaf in self._move(move, new).items():
                result[new[kind]] = leaf
                self._notes.classes.setdefault(new[kind], "exact")
                rule = self._notes.rule_for.get(name)
                if rule is not None:
                    self._notes.rule_for[new[kind]] = f"{rule}; followed ({self._notes.classes[new[kind]]})"
        return result

    def _move(self, move: _Move, new: Mapping[str, str]) -> dict[str, Any]:
        """The new leaves by kind; what is reset is left out and noted."""
        if is_symbol(move.view) and self._copies[next(iter(move.leaves))] > 1:
            self._notes.classes.update(dict.fromkeys(new.values(), "approximate"))
        if is_symbol(move.view) and all(
            move.wanted_shape(kind) in (None, _shape(move.first(kind))) for kind in move.kinds
        ):
            return dict(next(iter(move.leaves.values())))
        if all(kind in move.kinds for kind in _FACTORED):
            return self._move_adafactor(move, new)
        return {kind: leaf for kind in move.kinds if (leaf := self._move_one(move, kind, new[kind])) is not _RESET}

    def _move_one(self, move: _Move, kind: str, new: str) -> Any:
        """A leaf that is like the parameter, or None, or a placeholder."""
        if all(leaves[kind] is None for leaves in move.leaves.values()):
            return None
        if move.has_param_shape(kind):
            return self._replay(
                move, {kind: new}, lambda symbol, kept: _viewed(move.leaves[symbol.name][kind], symbol)
            )[kind]
        if move.shapes(kind) == {_PLACEHOLDER} and move.wanted_shape(kind) in (None, _PLACEHOLDER):
            return move.first(kind)
        self._reset([new], "its shape is not its parameter's")
        return _RESET

    def _replay(
        self, move: _Move, new: Mapping[str, str], leaf: Callable[[Symbol, Kept], View], kept: Kept | None = None
    ) -> dict[str, Any]:
        """One leaf of one kind over other leaves; `_RESET` where that cannot be."""
        ((kind, name),) = new.items()
        replay = Replay(leaf, casts=False)
        try:
            built = replay.build(move.view, frozenset(range(move.view.ndim)) if kept is None else kept)
        except ValueError as error:
            self._reset([name], str(error))
            return {kind: _RESET}
        if not replay.is_exact:
            self._notes.classes[name] = "approximate"
        return {kind: built}

    def _move_adafactor(self, move: _Move, new: Mapping[str, str]) -> dict[str, Any]:
        """Adafactor's leaves: unfactored ones as the parameter, factored ones by rows and columns, placeholders as
        they are.
        """
        was, becomes = self._is_factored(move)
        placeholder = next(
            (leaf for leaves in move.leaves.values() for leaf in leaves.values() if _shape(leaf) == _PLACEHOLDER), None
        )
        result: dict[str, Any] = {}
        for kind in move.kinds:
            if kind not in (*_FACTORED, "v"):
                result[kind] = self._move_one(move, kind, new[kind])
        live = _FACTORED if becomes else ("v",)
        if was is None or was != becomes:
            reason = "factored on one side only" if was is not None else "factored for some of its layers only"
            self._reset([new[kind] for kind in live if kind in new], reason)
        elif becomes:
            result.update(self._factored(move, new))
        else:
            result["v"] = self._move_one(move, "v", new["v"])
        for kind in (*_FACTORED, "v"):
            if kind in new and kind not in live and placeholder is not None:
                result[kind] = placeholder
        return {kind: leaf for kind, leaf in result.items() if leaf is not _RESET}

    def _is_factored(self, move: _Move) -> tuple[bool | None, bool]:
        """Whether the second moment is factored before and after; before: None where the old leaves disagree."""
        before = {_is_factored(leaves) for leaves in move.leaves.values()}
        was = before.pop() if len(before) == 1 else None
        if "v_row" in move.wanted:
            after = move.wanted_shape("v") != tuple(move.view.shape) if "v" in move.wanted else True
            if move.wanted_shape("v_row") == _PLACEHOLDER and move.wanted_shape("v_col") == _PLACEHOLDER:
                after = False
            return was, after
        return was, bool(was)

    def _factored(self, move: _Move, new: Mapping[str, str]) -> dict[str, Any]:
        """v_row and v_col, changed over where rows become columns; nothing where there is not just one way."""
        names = {kind: new[kind] for kind in _FACTORED}
        shape = tuple(move.view.shape)
        after = candidates(
            shape,
            move.wanted_shape("v_row"),
            move.wanted_shape("v_col"),
            self._owner.spec_of(move.path, len(shape)),
            move.sizes_decide,
        )
        solutions = [
            found
            for before in self._before(move)
            for then in after
            if (found := _solve(move, before, then)) is not None
        ]
        if len(solutions) == 1:
            leaves, is_exact = solutions[0]
            if not is_exact:
                self._notes.classes.update(dict.fromkeys(names.values(), "approximate"))
            return leaves
        if solutions:
            reason = "shapes do not tell rows from columns: give FollowOptimizer(…, factors=[(pattern, dimensions)])"
        else:
            reason = "its rows and columns are not those of the new parameter"
        self._reset(names.values(), reason)
        return {}

    def _before(self, move: _Move) -> Iterable[dict[str, Factoring]]:
        """All ways in which the old parameters may be factored; those of one shape in the same way."""
        groups: dict[Any, list[str]] = collections.defaultdict(list)
        for symbol in symbols_of(move.view):
            leaves = move.leaves[symbol.name]
            spec = self._owner.spec_of(move.paths[symbol.name], len(symbol.shape))
            groups[symbol.shape, _shape(leaves["v_row"]), _shape(leaves["v_col"]), spec].append(symbol.name)
        options = [candidates(*group, move.sizes_decide) for group in groups]
        for chosen in itertools.product(*options):
            yield {name: way for way, members in zip(chosen, groups.values(), strict=True) for name in members}

    def _reset(self, names: Iterable[str], reason: str) -> None:
        for name in names:
            if not self._target or name in self._target:
                self._notes.classes[name] = "reset"
                self._notes.rule_for[name] = f"reset: {reason}"
                self._why["reset", reason].append(name)

    def finish(self) -> None:
        """Notes what was dropped, and one warning per reason for what was reset."""
        self._notes.drop(name for name in self._slots if name not in self._used)
        for (_, reason), names in self._why.items():
            count = f"{len(names)} optimizer leaves are" if len(names) > 1 else "one optimizer leaf is"
            more = f"{names[0]!r} …" if len(names) > 1 else repr(names[0])
            self._notes.warnings.append(f"FollowOptimizer: {count} reset ({reason}): {more}; give them by fallback=")


_RESET = object()


def _viewed(leaf: Any, symbol: Symbol) -> View:
    if leaf is None:
        raise CannotFollowError("not all of its parameters have this state")
    return as_view(leaf, name=symbol.name)


def _is_factored(leaves: Mapping[str, Any]) -> bool:
    if "v" in leaves and _shape(leaves["v"]) != _PLACEHOLDER:
        return False
    return any(_shape(leaves[kind]) != _PLACEHOLDER for kind in _FACTORED)


def _solve(move: _Move, before: Mapping[str, Factoring], then: Factoring) -> tuple[dict[str, Any], bool] | None:
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
