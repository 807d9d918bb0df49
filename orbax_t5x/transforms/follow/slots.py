"""Assignment of an optimizer's leaves to parameters, by their names.

Parameters are below `target/` and their optimizer's state below `state/param_states/` (T5X), or
below `params/` and `opt_state/` (Flax, Optax); with several sources both are below a source's name. A leaf of the
optimizer belongs to the parameter whose path its own path ends with, or ends with but for one more part: `0/mu/<path>`,
`inner_states/a/inner_state/0/trace/<path>`, `<path>/v_row`.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

Roots = tuple[tuple[str, str], ...]

STANDARD_ROOTS: Roots = (("target", "state/param_states"), ("params", "opt_state"))


class StateRoot(NamedTuple):
    """A train state: its source, and the pair of roots that its names have.

    Attributes:
      source: the name of a source with '/', or ''.
      number: the index of the pair in `SlotNames.roots`.
    """

    source: str
    number: int


class SlotTree(NamedTuple):
    """A part of an optimizer's state that has slots for the parameters.

    Attributes:
      state: the train state that it belongs to.
      path: its path below the root of the optimizer's state.
      kind_first: whether a leaf is named `<path>/<kind>/<parameter>` (Optax), not `<path>/<parameter>/<kind>`
        (T5X's Adafactor).
    """

    state: StateRoot
    path: str
    kind_first: bool


class Slot(NamedTuple):
    """The optimizer leaf of one kind ("mu", "v_row", …) for one parameter."""

    tree: SlotTree
    kind: str
    param: str


@dataclasses.dataclass(frozen=True)
class SlotNames:
    """Finder of parameters and slots among names, and of the names of slots.

    Attributes:
      roots: pairs (root of parameters, root of the optimizer's state).
    """

    roots: Roots = STANDARD_ROOTS

    def _split(self, name: str, side: int) -> tuple[StateRoot, str] | None:
        """Splits a name into its train state and its path below the root of a side (0: parameters, 1: state)."""
        for source in ("", name.split("/", 1)[0] + "/"):
            for number, root in enumerate(self.roots):
                start = f"{source}{root[side]}/"
                if name.startswith(start) and len(name) > len(start):
                    return StateRoot(source, number), name[len(start) :]
        return None

    def param(self, name: str) -> tuple[StateRoot, str] | None:
        """Returns the state and the path of a parameter; None for other names."""
        return self._split(name, 0)

    def slot_name(self, slot: Slot) -> str:
        """Returns the name of an optimizer leaf."""
        state, path, kind_first = slot.tree
        parts = (slot.kind, slot.param) if kind_first else (slot.param, slot.kind)
        return "/".join(part for part in (state.source + self.roots[state.number][1], path, *parts) if part)

    def slots(self, names: Iterable[str]) -> dict[str, Slot]:
        """Returns the slots among names, by name."""
        names = list(names)
        params: dict[StateRoot, set[str]] = {}
        for name in names:
            found = self.param(name)
            if found is not None:
                params.setdefault(found[0], set()).add(found[1])
        options: dict[str, list[Slot]] = {}
        for name in names:
            found = self._split(name, 1)
            if found is not None and found[0] in params:
                readings = _readings(found[0], found[1].split("/"), params[found[0]])
                if readings:
                    options[name] = readings
        # A path may end with the paths of two parameters, `w` and `mu/w`. The reading is taken whose tree and kind most
        # other leaves may have, too.
        votes = collections.Counter((slot.tree, slot.kind) for readings in options.values() for slot in readings)
        return {
            name: max(readings, key=lambda slot: (votes[slot.tree, slot.kind], len(slot.param)))
            for name, readings in options.items()
        }


def _readings(state: StateRoot, parts: Sequence[str], params: set[str]) -> list[Slot]:
    """Lists all slots that a path may be."""
    readings: list[Slot] = []
    for start in range(len(parts)):
        path = "/".join(parts[start:])
        if path in params:
            kind = parts[start - 1] if start else ""
            readings.append(Slot(SlotTree(state, "/".join(parts[: max(start - 1, 0)]), True), kind, path))
        path = "/".join(parts[start:-1])
        if path in params:
            readings.append(Slot(SlotTree(state, "/".join(parts[:start]), False), parts[-1], path))
    return readings


def by_tree(slots: Mapping[str, Slot]) -> dict[SlotTree, dict[str, dict[str, str]]]:
    """Groups slots: tree -> parameter -> kind -> name."""
    trees: dict[SlotTree, dict[str, dict[str, str]]] = {}
    for name, slot in slots.items():
        trees.setdefault(slot.tree, {}).setdefault(slot.param, {})[slot.kind] = name
    return trees


def checked_roots(roots: Iterable[Sequence[str]]) -> Roots:
    """Pairs of names without slashes at their ends."""
    return tuple((re.sub("/+$", "", params), re.sub("/+$", "", state)) for params, state in roots)
