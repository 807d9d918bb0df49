"""What a resumed state must hold, by NumPy and Optax alone; nothing here is of the package.

Each moment is a view of a hidden array of its parameter's shape: a moment of the parameter's own shape is that array, a
factored one its means over Optax's two largest dimensions, a number its sum. Rules act on parameters and on hidden
arrays alike, and the new optimizer's moments are views of what comes out. So a slot that follows by a wrong rule is
a wrong number. All hidden arrays are small integers: sums and means are exact in any order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

FACTORED = ("v_row", "v_col", "v")
# Name of the hidden array behind the three slots of a factored moment.
WHOLE = "v of three"
# Ending of the kind of an array that is one of several, but of the parameter's own shape.
_ONE = " of one dimension"

Path = tuple[str, ...]
Tree = dict[str, np.ndarray]
# A rule: new parameter -> (function of arrays and of what new elements hold, old parameters).
Moves = dict[str, tuple[Callable[..., np.ndarray], tuple[str, ...]]]


@dataclasses.dataclass(frozen=True)
class Slot:
    """One leaf of an optimizer's state.

    Attributes:
      node: Path of the named tuple that holds it.
      kind: Field of the named tuple, with further keys if the leaf is a number in a dict.
      parameter: Name of its parameter, or None for a number or key of the node.
      shape: Shape of the leaf.
      dtype: Dtype of the leaf.
      hidden: Kind of the hidden array that it is a view of.
      averaged: Dimension of the hidden array that a factored slot averages.
      is_placeholder: Whether it holds nothing.
      index: Last key of one of several arrays of a parameter whose form nobody knows (SM3's).
      leading: Whether it has a dimension before the parameter's (L-BFGS's memory).
    """

    node: Path
    kind: str
    parameter: str | None
    shape: tuple[int, ...]
    dtype: Any
    hidden: str = ""
    averaged: int | None = None
    is_placeholder: bool = False
    index: str = ""
    leading: bool = False

    @property
    def is_odd(self) -> bool:
        """Whether nobody knows how it follows: SM3's sums over all but one dimension of two and more."""
        return bool(self.index) and not self.hidden.endswith(_ONE)

    def name_of(self, parameter: str) -> str:
        """Returns the name below the optimizer's root of the same slot of a parameter."""
        return "/".join(filter(None, (*self.node, self.kind.partition("#")[0], parameter, self.index)))

    def has_shape_of(self, hidden: np.ndarray, parameter: np.ndarray) -> bool:
        """Returns True if the hidden array has the shape that goes with its parameter's."""
        if self.is_odd:
            return True
        return (hidden.shape[1:] if self.leading else hidden.shape) == parameter.shape

    def view(self, hidden: np.ndarray) -> np.ndarray:
        """Returns the slot's values as they follow from the hidden array."""
        if self.is_placeholder:
            return np.zeros(self.shape, self.dtype)
        if self.averaged is not None:
            value = hidden.astype(np.float64).mean(axis=self.averaged)
        elif self.shape == () != hidden.shape:
            value = hidden.sum()
        else:
            value = hidden
        assert value.shape == self.shape, (self, value.shape)
        return value.astype(self.dtype)


def key_text(key: Any) -> str:
    """Returns a key of a tree's path as text."""
    for field in ("key", "idx", "name"):
        if hasattr(key, field):
            return str(getattr(key, field))
    raise TypeError(key)


def key_name(path: Path) -> str:
    return "/".join(map(key_text, path))


def optimizer_slots(transformation: Any, parameters: Mapping[str, Any]) -> dict[str, Slot]:
    """Returns the slots of Optax's own state for parameters, by their names below the optimizer's root.

    A moment's path is its node's, one field of a named tuple, and then the parameter's; which is which is read from
    the kinds of keys that JAX gives.
    """
    abstract = jax.eval_shape(transformation.init, nested(parameters))
    paths = {tuple(name.split("/")) for name in parameters}
    slots = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract):
        keys = tuple(map(key_text, path))
        fields = [index for index, key in enumerate(path) if hasattr(key, "name")]
        owner = next((index for index in fields if keys[index + 1 :] in paths), None)
        ends = [(start, end) for start in fields for end in range(len(keys)) if keys[start + 1 : end] in paths]
        if owner is None and ends:
            start, end = ends[-1]
            index = "/".join(keys[end:])
            slots["/".join(keys)] = Slot(
                keys[:start],
                f"{keys[start]}#{index}",
                "/".join(keys[start + 1 : end]),
                leaf.shape,
                leaf.dtype,
                index=index,
            )
            continue
        if owner is None:
            node, kind, parameter = keys[: fields[-1]], "/".join(keys[fields[-1] :]), None
        else:
            node, kind, parameter = keys[:owner], keys[owner], "/".join(keys[owner + 1 :])
        slots["/".join(keys)] = Slot(node, kind, parameter, tuple(leaf.shape), leaf.dtype)
    return with_views(slots, {name: tuple(leaf.shape) for name, leaf in parameters.items()}, factored_dims)


def with_views(
    slots: Mapping[str, Slot],
    shapes: Mapping[str, tuple[int, ...]],
    dims: Callable[[str, tuple[int, ...]], tuple[int, int]],
) -> dict[str, Slot]:
    """Adds what each slot shows of its parameter's hidden array.

    Args:
      slots: Slots by name.
      shapes: Shapes of the parameters.
      dims: Function of a parameter's name and shape to its row and column dimension, if it is factored.
    """
    places = {(slot.node, slot.kind, slot.parameter): slot for slot in slots.values()}
    result = {}
    for name, slot in slots.items():
        if slot.parameter is None:
            result[name] = slot
            continue
        shape = shapes[slot.parameter]
        trio = [places.get((slot.node, kind, slot.parameter)) for kind in FACTORED]
        hidden, averaged, is_placeholder = slot.kind, None, False
        if slot.kind in FACTORED and all(trio):
            hidden = WHOLE
            row, _, whole = trio
            is_factored = whole.shape == (1,) != row.shape
            is_placeholder = is_factored == (slot.kind == "v")
            if is_factored and not is_placeholder:
                averaged = dims(slot.parameter, shape)[1 if slot.kind == "v_row" else 0]
        elif slot.index and slot.shape == shape:
            hidden += _ONE
        elif slot.shape == (1,) != shape:
            is_placeholder = True
        leading = not slot.index and slot.shape[1:] == shape and len(slot.shape) > len(shape) > 0
        result[name] = dataclasses.replace(
            slot, hidden=hidden, averaged=averaged, is_placeholder=is_placeholder, leading=leading
        )
    return result


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split("/")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[last] = value
    return tree


def factored_dims(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns Optax's two factored dimensions: the second largest and the largest, of equal ones the later."""
    order = np.argsort(shape, kind="stable")
    return int(order[-2]), int(order[-1])


@dataclasses.dataclass
class Optimizer:
    """Hidden arrays and numbers of one optimizer.

    Attributes:
      slots: Slots by their names below the optimizer's root.
      hidden: (node, hidden kind) -> arrays by parameter.
      numbers: (node, kind) -> number or key.
      missing: Slots that the checkpoint lacks.
    """

    slots: dict[str, Slot]
    hidden: dict[tuple[Path, str], Tree]
    numbers: dict[tuple[Path, str], Any]
    missing: set[str] = dataclasses.field(default_factory=set)

    def apply(self, moves: Moves) -> None:
        """Applies a rule to all moments."""
        odd = {(slot.node, slot.hidden) for slot in self.slots.values() if slot.is_odd}
        leading = {(slot.node, slot.hidden) for slot in self.slots.values() if slot.leading}
        self.hidden = {
            place: moved(tree, moves, is_odd=place in odd, leading=place in leading)
            for place, tree in self.hidden.items()
        }

    def value(self, name: str) -> Any:
        slot = self.slots[name]
        if slot.parameter is None:
            return self.numbers[slot.node, slot.kind]
        return slot.view(self.hidden[slot.node, slot.hidden][slot.parameter])


def new_optimizer(
    slots: dict[str, Slot], shapes: Mapping[str, tuple[int, ...]], random: np.random.Generator, has_equal_counts: bool
) -> Optimizer:
    """Fills an optimizer with numbers that differ from leaf to leaf."""
    hidden: dict[tuple[Path, str], Tree] = {}
    numbers = {}
    count = int(random.integers(100, 1000))
    for slot in slots.values():
        if slot.parameter is not None:
            tree = hidden.setdefault((slot.node, slot.hidden), {})
            if slot.parameter not in tree:
                has_own_shape = slot.is_odd or slot.leading
                tree[slot.parameter] = integers(random, slot.shape if has_own_shape else shapes[slot.parameter])
        else:
            numbers[slot.node, slot.kind] = new_number(slot, random, count if has_equal_counts else None)
    return Optimizer(slots, hidden, numbers)


def new_number(slot: Slot, random: np.random.Generator, count: int | None) -> Any:
    if jax.dtypes.issubdtype(slot.dtype, jax.dtypes.prng_key):
        return new_key(random)
    if slot.dtype == bool:
        return np.asarray(random.integers(0, 2), bool)
    if count is not None and slot.dtype.kind == "i":
        return np.asarray(count, slot.dtype)
    return random.integers(1, 100_000, slot.shape).astype(slot.dtype)


def new_key(random: np.random.Generator) -> Any:
    return jax.random.wrap_key_data(random.integers(0, 2**32, 2, dtype=np.uint32))


def integers(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return random.integers(-(2**15), 2**15, shape).astype(np.float32)


def same(arrays: list[np.ndarray], fill: float) -> np.ndarray:
    """What a rule does that only gives another name."""
    return arrays[0]


def moved(
    tree: Mapping[str, Any], moves: Moves, fill: float = 0.0, *, is_odd: bool = False, leading: bool = False
) -> dict[str, Any]:
    """Applies a rule to a tree that may lack some parameters; what lacks a part of its sources is lost.

    Args:
      tree: Arrays by their parameters' names.
      moves: The rule.
      fill: What new elements hold.
      is_odd: Whether nobody knows what the arrays are, so that they have no more than a name.
      leading: Whether the arrays have a dimension before the parameters'.
    """
    result = {}
    for name, (function, sources) in moves.items():
        if not all(source in tree for source in sources) or (is_odd and function is not same):
            continue
        arrays = [tree[source] for source in sources]
        if leading and function is not same:
            result[name] = np.stack([function(list(parts), fill) for parts in zip(*arrays, strict=True)])
        else:
            result[name] = function(arrays, fill)
    return result


@dataclasses.dataclass
class Expected:
    """What one leaf of the target may hold.

    Attributes:
      values: Right values; none if only a new value is right.
      may_be_new: Whether a value of the fallback is right, too.
      needs: Names of checkpoint leaves that the value is made of.
      is_moment: Whether it is an optimizer's leaf.
      group: What the slots of one hidden array have in common: one approximate slot makes all of them so.
      counts: For a count whose moments come from several nodes: a moment's name, and the count of its node.
      alike: Values of leaves of the same kind elsewhere in the optimizer.
    """

    values: list[Any]
    may_be_new: bool = False
    needs: frozenset[str] = frozenset()
    is_moment: bool = False
    group: Any = None
    counts: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    alike: list[Any] = dataclasses.field(default_factory=list)
