"""A state dict whose optimizer follows the transforms of its parameters.

While transforms run, parameters that an optimizer has slots for are symbols, so that the state's own values record
what became of them, through any number of rules; the slots themselves are taken out. `joined` puts both together
again: parameters are computed over their real arrays, and each slot as its parameter was, over the slots of the
parameters that it was made of. The optimizer is looked for once: the names that rules give decide nothing.

A rule whose patterns match slots by their own names acts on those as on any leaf, once; the others follow.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from orbax_t5x.errors import Fix
from orbax_t5x.lazy import View, as_view
from orbax_t5x.optim.moments import Moments, OptimizerStructure, Shape, find_optimizer, is_below, plain_name
from orbax_t5x.text.wording import leaves_text, listed
from orbax_t5x.transforms.by_rules import ByRules
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.follow.slots import FACTORS, NewParameter, NewSlots, RuleOf, follow_parameter, is_placeholder
from orbax_t5x.transforms.follow.trace import KeptDims, Replay, Symbol, is_symbol, symbol_below, symbol_for, symbols_of
from orbax_t5x.trees.flat import FlatState

Roots = tuple[tuple[str, str], ...]


class _NewLeaf(NamedTuple):
    """A leaf of the state over symbols, and the plain names of the parameters that these stand for."""

    name: str
    plain: str
    view: View
    parameters: tuple[str, ...]


def _no_rule(name: str, rank: int) -> None:
    return None


class FollowedState:
    """Parameters and slots of a state, while transforms run on the rest.

    Attributes:
      visible: The leaves that transforms get: symbols of parameters with slots, and everything but slots.
      optimizer: Structure of the optimizers.
    """

    def __init__(self, state: FlatState, roots: Roots | None = None, rule_of: RuleOf = _no_rule):
        self.optimizer = find_optimizer(state, roots)
        self.roots = roots
        self._rule_of = rule_of
        self._state = state
        slots = {name for moments in self.optimizer.moments for name in moments.slots.values()}
        followed = {name for moments in self.optimizer.moments for name in moments.slots}
        followed.update(self.optimizer.unknown.values())
        self._parameters: dict[str, Any] = {}
        self.visible: dict[str, Any] = {}
        for name, value in state.items():
            if name in slots or name in self.optimizer.unknown:
                continue
            plain = plain_name(name)
            symbol = symbol_for(plain, value) if plain in followed else None
            if symbol is not None:
                self._parameters[plain] = value
            self.visible[name] = value if symbol is None else symbol

    # -- rules

    def take_out(self, rules: ByRules) -> None:
        """Makes the slots that rules match by their own names ordinary leaves, which follow no parameter."""
        for moments in self.optimizer.moments:
            names = rules.matching(moments.slots.values())
            self.visible.update((name, self._state[name]) for name in moments.slots.values() if name in names)
            moments.slots = {param: slot for param, slot in moments.slots.items() if slot not in names}

    def changed(self, state: FlatState) -> set[str]:
        """Returns the plain names of parameters that are not under their names, as they are."""
        unchanged = {plain_name(name) for name, value in state.items() if _is_unchanged(name, value)}
        return self._parameters.keys() - unchanged

    def check_clear(self, before: FlatState, after: FlatState, diagnostics: Diagnostics) -> None:
        """Refuses changes of parameters that may or may not be those of an optimizer."""
        for directory, roots in self.optimizer.unclear.items():
            changed = [
                name
                for name, value in before.items()
                if after.get(name) is not value and any(is_below(name, root) for root in roots)
            ]
            if changed and not any(directory in problem.message for problem in diagnostics.problems):
                owners = listed(map(repr, roots), 4, separator=" or ")
                message = (
                    f"the moments in {directory!r} may be those of the parameters in {owners}, of which {changed[0]!r} "
                    "is changed"
                )
                fix = Fix(f"say which: FollowOptimizer(…, roots=[(root of the parameters, {directory!r})])")
                diagnostics.problem("optimizer", None, message, fix)

    def current_slots(self, state: FlatState) -> dict[str, str]:
        """Returns the names that slots have after the rules so far, and their parameters' plain names."""
        leaves, slots = self._leaves(state), dict[str, str]()
        for group in _by_node(self.optimizer.moments):
            own = _made_of(leaves, {parameter for moments in group for parameter in moments.slots})
            root = _new_root(group[0].root, own)
            for moments in group:
                slots.update((_name_of(leaf, moments, root), leaf.plain) for leaf in _made_of(own, moments.slots))
        return slots

    def _leaves(self, state: FlatState) -> list[_NewLeaf]:
        """Returns the leaves that are made of parameters with slots."""
        return [
            _NewLeaf(name, plain_name(name), value, names)
            for name, value in state.items()
            if isinstance(value, View)
            and (names := tuple(symbol.name for symbol in symbols_of(value)))
            and not self._parameters.keys().isdisjoint(names)
        ]

    # -- the whole state

    def joined(
        self, state: FlatState, target: OptimizerStructure, shapes: FlatState, diagnostics: Diagnostics
    ) -> dict[str, Any]:
        """Returns the state with its parameters computed and its slots moved; `optimizer` becomes that of the result.

        Args:
          state: What the transforms made of `visible`.
          target: Structure of the target's optimizers.
          shapes: Leaves of the target.
          diagnostics: Takes problems, and slots that cannot follow.
        """
        result = {name: self._computed(value) for name, value in state.items()}
        leaves = self._leaves(state)
        changed = self.changed(state)
        for slot, parameter in self.optimizer.unknown.items():
            if parameter in changed:
                diagnostics.lost[slot] = f"it belongs to {parameter!r}, which changed, in a form that is not known"
            else:
                result[slot] = self._state[slot]
        wanted = _wanted_shapes(target, shapes)
        moved: list[Moments] = []
        for group in _by_node(self.optimizer.moments):
            moved += self._follow(group, leaves, changed, wanted, result, diagnostics)
        self.optimizer.moments = moved
        return result

    def _computed(self, value: Any) -> Any:
        """Computes a leaf over the checkpoint's arrays instead of symbols."""
        names = [symbol.name for symbol in symbols_of(value)]
        if not names or not self._parameters.keys() >= set(names):
            return value
        if is_symbol(value):
            return self._parameters[value.leaf.name]

        def array_of(symbol: Symbol, kept: KeptDims) -> View:
            return as_view(self._parameters[symbol.name], name=symbol.name)

        return Replay(array_of, of_parameters=True).build(value, frozenset(range(value.ndim)))

    def _follow(
        self,
        group: Sequence[Moments],
        leaves: Sequence[_NewLeaf],
        changed: Collection[str],
        wanted: Mapping[tuple[str, Shape], Mapping[str, Shape]],
        result: dict[str, Any],
        diagnostics: Diagnostics,
    ) -> list[Moments]:
        """Adds the slots of one node to the result; returns the node's new moments."""
        old = {parameter for moments in group for parameter in moments.slots}
        own = _made_of(leaves, old)
        kept = {parameter for leaf in own for parameter in leaf.parameters}
        root = _new_root(group[0].root, own)
        is_root_dropped = not any(is_below(name, group[0].root) for leaf in leaves for name in leaf.parameters)
        new = {id(moments): dataclasses.replace(moments, slots={}, root=root) for moments in group}
        for moments in group:
            for parameter, slot in moments.slots.items():
                # A copy stays where its parameter is dropped, and so do all moments of a root that is dropped.
                stays = parameter not in changed or (parameter not in kept and (moments.is_copy or is_root_dropped))
                if stays:
                    new[id(moments)].slots[parameter] = slot
                    self._put(slot, self._state[slot], result, diagnostics)
        uses = collections.Counter(symbol.name for leaf in own if (symbol := symbol_below(leaf.view)) is not None)
        unused_kinds = self._unused_kinds(group)
        for leaf in own:
            if _is_unchanged(leaf.name, leaf.view):
                continue
            kinds = {
                moments.kind: {
                    name: self._state[moments.slots[name]] for name in leaf.parameters if name in moments.slots
                }
                for moments in group
            }
            parameter = NewParameter(
                leaf.plain,
                leaf.view,
                {kind: slots for kind, slots in kinds.items() if slots},
                wanted.get((leaf.plain, tuple(leaf.view.shape)), {}),
                is_by_size=group[0].form == "kind first",
                is_copy=group[0].is_copy,
                is_first=group[0].form != "kind first" or _is_first(group[0].node),
                unused_kinds=unused_kinds,
            )
            slots = follow_parameter(parameter, self._rule_of)
            symbol = symbol_below(leaf.view)
            if symbol is not None and uses[symbol.name] > 1:
                # Each of several parameters made of one gets only a part of the gradient.
                slots.approximate.update(slots.views)
            for moments in group:
                if kinds[moments.kind]:
                    origin = _origin(leaf, moments)
                    name = _name_of(leaf, moments, root)
                    self._record(moments.kind, name, origin, leaf, slots, result, diagnostics)
                    new[id(moments)].slots[leaf.plain] = name
        return list(new.values())

    def _unused_kinds(self, group: Iterable[Moments]) -> frozenset[str]:
        """Returns the kinds of which some parameter has a placeholder."""
        shapes = {name: getattr(value, "shape", None) for name, value in self._parameters.items()}
        return frozenset(
            moments.kind
            for moments in group
            if moments.kind not in (*FACTORS, "v")
            and any(is_placeholder(self._state[slot], shapes.get(name)) for name, slot in moments.slots.items())
        )

    def _record(
        self,
        kind: str,
        name: str,
        origin: str,
        leaf: _NewLeaf,
        slots: NewSlots,
        result: dict[str, Any],
        diagnostics: Diagnostics,
    ) -> None:
        if kind in slots.lost:
            diagnostics.lost[name] = f"{slots.lost[kind]} (its parameter became {leaf.plain!r})"
        elif kind in slots.views:
            self._put(name, slots.views[kind], result, diagnostics)
            is_exact = kind not in slots.approximate and diagnostics.fidelity.get(origin) != "approximate"
            fidelity = "exact" if is_exact else "approximate"
            rule = diagnostics.rule_for.get(leaf.name)
            diagnostics.record_origins({name: (origin, f"{rule}; followed ({fidelity})" if rule else "followed")})
            diagnostics.fidelity[name] = fidelity

    def _put(self, name: str, value: Any, result: dict[str, Any], diagnostics: Diagnostics) -> None:
        if name in result:
            message = f"a leaf of the optimizer and another leaf both become {name!r}"
            fix = Fix("give FollowOptimizer(…, roots=[(root of the parameters, root of their optimizer's state), …])")
            diagnostics.problem("optimizer", name, message, fix)
        result[name] = value


def _made_of(leaves: Iterable[_NewLeaf], parameters: Collection[str]) -> list[_NewLeaf]:
    """Returns the leaves that are made of some parameters."""
    return [leaf for leaf in leaves if any(name in parameters for name in leaf.parameters)]


def _origin(leaf: _NewLeaf, moments: Moments) -> str:
    """Returns the first slot that the slot of a leaf is made of."""
    return next(moments.slots[parameter] for parameter in leaf.parameters if parameter in moments.slots)


def _name_of(leaf: _NewLeaf, moments: Moments, root: str) -> str:
    """Returns the name of a leaf's slot."""
    origin = _origin(leaf, moments)
    return origin if _is_unchanged(leaf.name, leaf.view) else moments.name_for(leaf.plain, root, origin)


def _is_unchanged(name: str, value: Any) -> bool:
    return is_symbol(value) and value.leaf.name == plain_name(name)


def _is_first(node: str) -> bool:
    """Returns True if nothing stands before a node in its chains."""
    return not any(part.isdecimal() and int(part) for part in node.split("/"))


def _by_node(moments: Iterable[Moments]) -> list[list[Moments]]:
    """Groups moments by the node whose kinds belong together."""
    groups: dict[Any, list[Moments]] = collections.defaultdict(list)
    for one in moments:
        groups[one.node, one.root, one.form, one.kind if one.is_copy else None].append(one)
    return list(groups.values())


def _wanted_shapes(target: OptimizerStructure, leaves: FlatState) -> dict[tuple[str, Shape], dict[str, Shape]]:
    """Returns the shapes of the target's slots by parameter, its shape and kind, where only one is of that kind."""
    found: dict[tuple[str, str], set[Shape]] = collections.defaultdict(set)
    for moments in target.moments:
        for parameter, slot in moments.slots.items():
            if (shape := getattr(leaves[slot], "shape", None)) is not None:
                found[parameter, moments.kind].add(tuple(shape))
    shapes = {plain_name(name): tuple(getattr(leaf, "shape", ())) for name, leaf in leaves.items()}
    wanted: dict[tuple[str, Shape], dict[str, Shape]] = collections.defaultdict(dict)
    for (parameter, kind), of_kind in found.items():
        if len(of_kind) == 1:
            wanted[parameter, shapes[parameter]][kind] = next(iter(of_kind))
    return wanted


def _new_root(root: str, leaves: Sequence[_NewLeaf]) -> str:
    """Returns the root of the parameters after rules, the old one unless all of them left it."""
    outside = [leaf for leaf in leaves if not is_below(leaf.plain, root)]
    if not outside or len(outside) < len(leaves):
        return root
    votes: collections.Counter[str] = collections.Counter()
    for leaf in outside:
        for parameter in leaf.parameters:
            path = parameter.removeprefix(f"{root}/") if root else parameter
            if leaf.plain.endswith(f"/{path}"):
                votes[leaf.plain.removesuffix(f"/{path}")] += 1
    firsts = {leaf.plain.partition("/")[0] for leaf in outside}
    likely = [*(found for found, _ in votes.most_common(1)), *(firsts if len(firsts) == 1 else ())]
    return next((found for found in likely if all(leaf.plain.startswith(f"{found}/") for leaf in outside)), "")


def note_lost(diagnostics: Diagnostics, target: FlatState) -> None:
    """Records slots that cannot follow: a problem where the target wants them, else one warning."""
    wanted = {name: reason for name, reason in diagnostics.lost.items() if name in target}
    for name, reason in wanted.items():
        diagnostics.fidelity[name] = "reset"
        diagnostics.rule_for[name] = f"reset: {reason}"
    others = [name for name in diagnostics.lost if name not in target]
    if others:
        reason = diagnostics.lost[others[0]]
        diagnostics.warnings.append(
            f"{leaves_text(len(others))} of the optimizer cannot follow and are dropped: "
            f"{listed(map(repr, others), 2)}: {reason}"
        )
