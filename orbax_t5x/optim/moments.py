"""Finds an optimizer's moments by structure.

A leaf belongs to a parameter if it is in a tree of the parameters' names: `0/mu/<path>`, `0/mu/params/<path>`,
`inner_states/a/inner_state/0/trace/<path>`, `<path>/v_row`, and in bundles `<path>_slot_vr`.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from orbax_t5x.optim.containers import SLOT_MAP, STANDARD_ROOTS, base_of, find_roots, is_counted

KIND_FIRST, KIND_LAST, GLUED = "{kind}/{param}", "{param}/{kind}", "{param}_slot"
"""Forms of a slot's name: Optax's, T5X's and Mesh TensorFlow's."""
_INNER = "params"
_KIND_FIRST_INNER = f"{{kind}}/{_INNER}/{{param}}"


class StateRoot(NamedTuple):
    """A train state: its source and the index of its roots."""

    source: str
    number: int


class SlotTree(NamedTuple):
    """A path of slots in an optimizer, and their names' form."""

    state: StateRoot
    path: str
    form: str

    @property
    def kind_first(self) -> bool:
        """True for Optax's names."""
        return self.form.startswith(KIND_FIRST[:6])


class Slot(NamedTuple):
    """An optimizer's leaf of a kind (`mu`) for a parameter."""

    tree: SlotTree
    kind: str
    param: str


@dataclasses.dataclass(frozen=True)
class SlotNames:
    """Finder of parameters and slots among names.

    Attributes:
      roots: pairs (root of parameters, root of the optimizer's state).
    """

    roots: Sequence[tuple[str, str]] = STANDARD_ROOTS

    @classmethod
    def among(cls, leaves: Mapping[str, Any]) -> SlotNames:
        """Finds the roots of leaves by structure."""
        standard = cls()
        found = [pair for pair in find_roots(leaves).pairs if pair not in STANDARD_ROOTS and any(pair)]
        # Standard roots below a source's name are the same pair for every source.
        found = [pair for pair in found if not standard._have(*pair)]
        is_bundle = any(base_of(name) in leaves for name in leaves if "_slot_" in name)
        return cls((*found, *STANDARD_ROOTS, *((("", ""),) if is_bundle else ())))

    def _have(self, params: str, state: str) -> bool:
        found = [self._split(f"{root}/-", side) for side, root in enumerate((params, state))]
        return all(one is not None and one[1] == "-" for one in found) and found[0] == found[1]

    def _split(self, name: str, side: int) -> tuple[StateRoot, str] | None:
        """Splits a name at a root: of parameters (0) or state (1)."""
        for source in ("", name.split("/", 1)[0] + "/"):
            for number, root in enumerate(self.roots):
                start = f"{source}{root[side]}/" if root[side] else source
                # In a bundle slots are beside parameters, and found by their names' ends.
                is_apart = any(root) or (side == 0 and not source)
                if is_apart and name.startswith(start) and len(name) > len(start):
                    if not _is_of(name, source, root, 1 - side):
                        return StateRoot(source, number), name[len(start) :]
        return None

    def param(self, name: str) -> tuple[StateRoot, str] | None:
        """Returns a parameter's state and path, or None."""
        return self._split(name, 0)

    def param_name(self, slot: Slot) -> str:
        """Returns the name of a slot's parameter."""
        state = slot.tree.state
        return "/".join(filter(None, (state.source + self.roots[state.number][0], slot.param)))

    def directory(self, tree: SlotTree) -> str:
        """Returns the path of a tree of slots."""
        return "/".join(filter(None, (tree.state.source + self.roots[tree.state.number][1], tree.path)))

    def slot_name(self, slot: Slot) -> str:
        """Returns the name of an optimizer leaf."""
        if slot.tree.form == GLUED:
            return slot.param + next((end for end, kind in SLOT_MAP.items() if kind == slot.kind), f"_slot_{slot.kind}")
        rest = slot.tree.form.format(kind=slot.kind, param=slot.param).strip("/")
        return "/".join(filter(None, (self.directory(slot.tree), rest)))

    def slots(self, leaves: Mapping[str, Any]) -> dict[str, Slot]:
        """Returns the slots among leaves, by name."""
        result = dict(self._glued(leaves))
        params: dict[StateRoot, dict[str, Any]] = {}
        for name, value in leaves.items():
            found = self.param(name) if name not in result else None
            if found is not None:
                params.setdefault(found[0], {})[found[1]] = value
        states = {state: _StateSlots(state, of_state) for state, of_state in params.items()}
        for name, value in leaves.items():
            found = self._split(name, 1)
            if found is not None and found[0] in states:
                states[found[0]].add(name, found[1].split("/"), value)
        for state, slots in states.items():
            result.update(slots.found(is_t5x=self.roots[state.number][1].endswith("param_states")))
        return result

    def _glued(self, leaves: Mapping[str, Any]) -> Iterator[tuple[str, Slot]]:
        """Yields the slots of a bundle."""
        for name in leaves if ("", "") in self.roots else ():
            base = base_of(name)
            if base in leaves:
                tree = SlotTree(StateRoot("", self.roots.index(("", ""))), "", GLUED)
                yield name, Slot(tree, SLOT_MAP[name[len(base) :]], base)


class _SlotReading(NamedTuple):
    """A leaf as a slot.

    `is_scalar`: a number for an array; `fits`: its dimensions are some of its parameter's.
    """

    slot: Slot
    is_number: bool
    is_scalar: bool
    fits: bool


class _StateSlots:
    """Finder of a train state's slots by structure.

    Slots form trees: below `<path>/<kind>/` are the names of parameters (of all kinds of one path together), or below
    `<path>/` are the names of parameters with a kind each. The tree that takes most leaves counts first, and no other
    tree has leaves inside it or around it. So `0/count` is no slot of a parameter `0`, nor `0/mu/nu` one of `mu`.
    """

    def __init__(self, state: StateRoot, params: Mapping[str, Any]):
        self._state = state
        self._params = {path: _shape_and_dtype(value) for path, value in params.items()}
        self._paths: dict[str, str] = {}
        self._sizes: collections.Counter[str] = collections.Counter()
        # tree -> the directory with names of parameters -> name -> reading
        self._trees: dict[SlotTree, dict[str, dict[str, _SlotReading]]] = {}

    def add(self, name: str, parts: Sequence[str], value: Any) -> None:
        """Adds a leaf of the optimizer, by the parts of its path."""
        leaf = _shape_and_dtype(value)
        self._paths[name] = "/".join(parts)
        self._sizes.update("/".join(parts[:end]) for end in range(len(parts)))
        for start in range(len(parts)):
            above, param = list(parts[:start]), "/".join(parts[start:])
            form = KIND_FIRST
            if len(above) > 1 and above[-1] == _INNER and not above[-2].isdecimal():
                form = _KIND_FIRST_INNER
                above.pop()
            tree = SlotTree(self._state, "/".join(above[:-1]), form)
            self._read(name, Slot(tree, above[-1] if above else "", param), "/".join(parts[:start]), leaf)
            directory = "/".join(parts[:start])
            tree = SlotTree(self._state, directory, KIND_LAST)
            self._read(name, Slot(tree, parts[-1], "/".join(parts[start:-1])), directory, leaf)

    def _read(self, name: str, slot: Slot, directory: str, leaf: _ShapeAndDtype | None) -> None:
        if slot.param not in self._params:
            return
        param = self._params[slot.param]
        is_number = leaf is not None and leaf.shape == ()
        is_scalar, fits = False, True
        if leaf is not None and param is not None:
            if is_number and is_counted(leaf) and not is_counted(param):
                return  # a counter
            is_scalar = is_number and param.shape != ()
            # Factored moments have some of the dimensions.
            dims = collections.Counter(leaf.shape) - collections.Counter((*param.shape, 1))
            fits = not is_scalar and not dims
        if not is_scalar or slot.tree.kind_first:
            self._trees.setdefault(slot.tree, {}).setdefault(directory, {})[name] = _SlotReading(
                slot, is_number, is_scalar, fits
            )

    def found(self, *, is_t5x: bool) -> dict[str, Slot]:
        """Returns the slots by name."""

        def order(tree: SlotTree) -> tuple[Any, ...]:
            fitting = sum(reading.fits for readings in self._trees[tree].values() for reading in readings.values())
            others = sum(self._sizes[directory] - len(readings) for directory, readings in self._trees[tree].items())
            is_usual = not (tree.kind_first or tree.path) if is_t5x else tree.kind_first
            return -fitting, others, not is_usual

        result: dict[str, Slot] = {}
        taken: set[str] = set()
        for tree in sorted(self._trees, key=order):
            free = {
                path: {
                    name: one
                    for name, one in readings.items()
                    if name not in result and not _is_inside(self._paths[name], taken)
                }
                for path, readings in self._trees[tree].items()
                if is_t5x or not any(_is_inside(one, {path}) for one in taken)
            }
            # A scalar belongs to an array only beside other state of the same array, as in Novograd.
            arrays = {one.slot.param for found in free.values() for one in found.values() if not one.is_scalar}
            slots = {
                name: reading.slot
                for found in free.values()
                for name, reading in found.items()
                if reading.slot.param in arrays
            }
            # Hyperparameters and fields of a state may have the name of a parameter that is a number.
            may_be_others = any(
                path.endswith("hyperparams") or self._sizes[path] > len(found) for path, found in free.items() if found
            ) and all(one.is_number for found in free.values() for one in found.values())
            if slots and (not may_be_others or arrays == self._params.keys()):
                result.update(slots)
                taken.update(path for path in free if path)
        return result


class _ShapeAndDtype(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def _shape_and_dtype(value: Any) -> _ShapeAndDtype | None:
    """Returns an array's shape and dtype, or None."""
    if isinstance(value, bool | int | float | complex):
        value = np.asarray(value)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    try:
        return None if shape is None or dtype is None else _ShapeAndDtype(tuple(shape), np.dtype(dtype))
    except TypeError:  # a typed PRNG key
        return None


def _is_inside(path: str, directories: set[str]) -> bool:
    """Tests whether a path is in some directories."""
    return any(not one or path == one or path.startswith(f"{one}/") for one in directories)


def _is_of(name: str, source: str, root: tuple[str, str], side: int) -> bool:
    """Reports whether a name is below the inner of two roots."""
    outer = root[1 - side]
    inside = root[side] != outer and (not outer or root[side].startswith(f"{outer}/"))
    return inside and name.startswith(f"{source}{root[side]}/")


def by_tree(slots: Mapping[str, Slot]) -> dict[SlotTree, dict[str, dict[str, str]]]:
    """Groups slots: tree -> parameter -> kind -> name."""
    trees: dict[SlotTree, dict[str, dict[str, str]]] = {}
    for name, slot in slots.items():
        trees.setdefault(slot.tree, {}).setdefault(slot.param, {})[slot.kind] = name
    return trees
