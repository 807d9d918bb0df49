"""Names of the optimizer's leaves for new parameters."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from orbax_t5x.optim.containers import STANDARD_ROOTS
from orbax_t5x.optim.moments import Slot, SlotNames, SlotTree, StateRoot
from orbax_t5x.transforms.follow.trace import symbols_of
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
