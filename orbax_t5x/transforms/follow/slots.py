"""Optimizer state by parameter: which leaf of an optimizer's tree belongs to which parameter, and what it is called.

Found by names alone. Parameters stand under `target/` with `state/param_states/` beside it (T5X), or `params/` with
`opt_state/` (Flax, Optax), each perhaps below the name of a source. A leaf of the optimizer belongs to the
parameter whose path its own path ends with, possibly followed by one more part: `0/mu/<path>`,
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


class Place(NamedTuple):
    """Where the parameters of one state, or the leaves of its optimizer, stand.

    Attributes:
      source: the name of a source with '/', or ''.
      root: the index in the roots.
    """

    source: str
    root: int


class Tree(NamedTuple):
    """One optimizer's leaves.

    Attributes:
      place: whose optimizer.
      path: what stands between the optimizer's root and the kinds, or the parameters' paths.
      kind_first: whether a leaf is called `<path>/<kind>/<parameter>` (Optax), not `<path>/<parameter>/<kind>`
        (T5X's Adafactor).
    """

    place: Place
    path: str
    kind_first: bool


class Slot(NamedTuple):
    """The optimizer leaf of one kind ("mu", "v_row", …) for one parameter."""

    tree: Tree
    kind: str
    param: str


@dataclasses.dataclass(frozen=True)
class Names:
    """Finds parameters and slots among names, and makes names of them.

    Attributes:
      roots: pairs (root of parameters, root of the optimizer's state).
    """

    roots: Roots = STANDARD_ROOTS

    def _split(self, name: str, side: int) -> tuple[Place, str] | None:
        """Where a name stands and its path there."""
        for source in ("", name.split("/", 1)[0] + "/"):
            for number, root in enumerate(self.roots):
                start = f"{source}{root[side]}/"
                if name.startswith(start) and len(name) > len(start):
                    return Place(source, number), name[len(start) :]
        return None

    def param(self, name: str) -> tuple[Place, str] | None:
        """A parameter's place and path; None for other names."""
        return self._split(name, 0)

    def param_name(self, place: Place, path: str) -> str:
        """The name of a parameter."""
        return f"{place.source}{self.roots[place.root][0]}/{path}"

    def slot_name(self, slot: Slot) -> str:
        """The name of an optimizer leaf."""
        place, path, kind_first = slot.tree
        parts = (slot.kind, slot.param) if kind_first else (slot.param, slot.kind)
        return "/".join(part for part in (place.source + self.roots[place.root][1], path, *parts) if part)

    def slots(self, names: Iterable[str]) -> dict[str, Slot]:
        """The slots among names, by name."""
        names = list(names)
        params: dict[Place, set[str]] = {}
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
        # A path may end with two parameters' paths, one within the other: what more of its neighbours agree with is
        # right.
        votes = collections.Counter((slot.tree, slot.kind) for readings in options.values() for slot in readings)
        return {
            name: max(readings, key=lambda slot: (votes[slot.tree, slot.kind], len(slot.param)))
            for name, readings in options.items()
        }


def _readings(place: Place, parts: Sequence[str], params: set[str]) -> list[Slot]:
    readings = []
    for start in range(len(parts)):
        path = "/".join(parts[start:])
        if path in params:
            kind = parts[start - 1] if start else ""
            readings.append(Slot(Tree(place, "/".join(parts[: max(start - 1, 0)]), True), kind, path))
        path = "/".join(parts[start:-1])
        if path in params:
            readings.append(Slot(Tree(place, "/".join(parts[:start]), False), parts[-1], path))
    return readings


def by_tree(slots: Mapping[str, Slot]) -> dict[Tree, dict[str, dict[str, str]]]:
    """Tree -> parameter -> kind -> name."""
    trees: dict[Tree, dict[str, dict[str, str]]] = {}
    for name, slot in slots.items():
        trees.setdefault(slot.tree, {}).setdefault(slot.param, {})[slot.kind] = name
    return trees


def checked_roots(roots: Iterable[Sequence[str]]) -> Roots:
    """Pairs of names without slashes at their ends."""
    return tuple((re.sub("/+$", "", params), re.sub("/+$", "", state)) for params, state in roots)
