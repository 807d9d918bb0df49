"""Pairs T5X's Adafactor slots with `optax.adafactor`'s leaves of equal values.

Both keep running means of the squared gradient over one dimension of each matrix. Optax always takes the two largest
dimensions: its v_row lacks the largest, its v_col the second largest. T5X does so for matrices by size; under logical
axis rules it may exchange the two, or average over other dimensions or groups of them. So a slot is equal to the slot
of the same name in the other library, or to the other one, or to none; then nothing is converted and the problem has
the reason.
Names and shapes only: nothing here reads a value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from orbax_t5x.errors import Fix, Problem
from orbax_t5x.optim.factor_rules import FactorDim
from orbax_t5x.optim.factored_dims import Shape, dims_by_size, possible_dims
from orbax_t5x.optim.moments import find_optimizer, plain_name
from orbax_t5x.optim.optimizer_names import is_step

_SLOTS = ("v_row", "v_col", "v")
_PLACEHOLDER: Shape = (1,)
STEPS = ("state/step", "step")
"""The step in T5X's train states, and in Flax's."""
_RESET = Fix.setting("start the optimizer anew: Drop the optimizer's leaves and give {} values for them", fallback=...)


@dataclasses.dataclass
class SlotConversion:
    """Sources of a library's state in the other library's.

    Attributes:
      renames: for each leaf of the target's state, the source leaf with the same values.
      placeholders: leaves of the target that are zeros of shape (1,) and have no source.
      unused: source leaves to drop: placeholders, and counters that are the other library's step.
      problems: the leaves that cannot be converted exactly, and why.
    """

    renames: dict[str, str] = dataclasses.field(default_factory=dict)
    placeholders: list[str] = dataclasses.field(default_factory=list)
    unused: list[str] = dataclasses.field(default_factory=list)
    problems: list[Problem] = dataclasses.field(default_factory=list)


def match_slots(
    shape: Shape, t5x: Mapping[str, Shape], optax: Mapping[str, Shape], rule: Sequence[FactorDim] | None = None
) -> dict[str, str]:
    """Finds the T5X slot of equal values for each Optax slot.

    Shapes decide. Without T5X's rule the shapes decide, which are ambiguous where dimensions of a parameter of rank 3
    and above are equal: a ValueError, and so are values that are not the same.
    """
    same = {slot: slot for slot in _SLOTS}
    t5x_whole, optax_whole = _is_whole(t5x, shape), _is_whole(optax, shape)
    if t5x_whole and optax_whole:
        return same
    if t5x_whole:
        raise ValueError("T5X keeps the second moment whole and Optax factored; raise Optax's min_dim_size_to_factor")
    if optax_whole:
        raise ValueError("T5X has factored the second moment and Optax keeps it whole, which cannot be recovered")
    largest = dims_by_size(shape)
    if largest is None or (optax["v_row"], optax["v_col"]) != largest.slot_shapes(shape):
        raise ValueError(f"Optax's v_row {optax['v_row']} and v_col {optax['v_col']} are not those of shape {shape}")
    orders = {(largest.row, largest.column): "same", (largest.column, largest.row): "swapped"}
    t5x_dims = possible_dims(shape, t5x["v_row"], t5x["v_col"], None if rule is None else tuple(rule))
    answers = {orders.get((dims.row, dims.column), "other") for dims in t5x_dims}
    if answers == {"same"}:
        return same
    if answers == {"swapped"}:
        return {"v_row": "v_col", "v_col": "v_row", "v": "v"}
    if len(answers) > 1:
        raise ValueError(f"the shapes leave open which dimensions of {shape} T5X has averaged over; give its rule")
    raise ValueError(
        f"T5X has averaged over other dimensions than the two largest of {shape}, {(*largest.row, *largest.column)}"
    )


def convert_slots(
    source: Mapping[str, Any], target: Mapping[str, Any], rules: Mapping[str, Sequence[FactorDim]] | None = None
) -> SlotConversion:
    """Pairs T5X's Adafactor slots on one side with `optax.adafactor`'s state on the other.

    The states may be anywhere in source and target. Which of the two is T5X's decides the direction; nothing is paired
    where neither, or both, are.

    Args:
      source: Leaves of the checkpoint by name.
      target: Leaves of the target by name.
      rules: T5X's rules by the parameters' paths below their root.
    """
    old, new = _Side(source), _Side(target)
    # A state of an optimizer alone is that of the other side's parameters.
    if not new.parameters:
        new = _Side({**{name: old.leaves[name] for name in old.parameters.values()}, **target})
    elif not old.parameters:
        old = _Side({**{name: new.leaves[name] for name in new.parameters.values()}, **source})
    for t5x, optax in ((old, new), (new, old)):
        if t5x.slots and optax.chains:
            pairing = _Pairing(SlotConversion(), t5x, optax, rules or {}, to_optax=t5x is old)
            for node, slots in optax.chains.items():
                pairing.convert(node, slots)
            return pairing.result
    return SlotConversion()


class _Side:
    """Adafactor's state among leaves.

    Attributes:
      names: Names of the leaves.
      leaves: Leaves by plain name.
      slots: T5X's slots by kind and the parameters' paths.
      chains: Optax's factored slots by node, and the same by kind and path.
      fields: Names of the other leaves of optimizers by directory and field.
      parameters: Names of the parameters by path.
    """

    def __init__(self, leaves: Mapping[str, Any]):
        self.names = tuple(leaves)
        self.leaves = {plain_name(name): leaf for name, leaf in leaves.items()}
        self.slots: dict[str, dict[str, str]] = {}
        self.chains: dict[str, dict[str, dict[str, str]]] = {}
        self.parameters: dict[str, str] = {}
        optimizer = find_optimizer(leaves)
        self.fields = optimizer.fields
        nodes: dict[str, dict[str, dict[str, str]]] = {}
        for moments in optimizer.moments:
            start = len(moments.root) + 1 if moments.root else 0
            by_path = {parameter[start:]: slot for parameter, slot in moments.slots.items()}
            self.parameters.update({parameter[start:]: parameter for parameter in moments.slots})
            if moments.form == "kind last":
                self.slots[moments.kind] = by_path
            elif moments.form == "kind first":
                nodes.setdefault(moments.node, {})[moments.kind] = by_path
        is_factored = set(_SLOTS).issubset
        self.slots = self.slots if is_factored(self.slots) else {}
        self.chains = {node: kinds for node, kinds in nodes.items() if is_factored(kinds)}
        chains = {node.rpartition("/")[0] for node in self.chains}
        self.momentum = {
            node.rpartition("/")[0]: kinds["ema"]
            for node, kinds in nodes.items()
            if "ema" in kinds and node.rpartition("/")[0] in chains
        }

    def shape(self, name: str) -> Shape:
        return tuple(self.leaves[plain_name(name)].shape)

    def shape_of(self, path: str) -> Shape | None:
        """Returns the shape of a parameter, or None."""
        name = self.parameters.get(path)
        return None if name not in self.leaves else self.shape(name)

    def counters(self, node: str) -> list[str]:
        """Lists the counters of a factored state's chain, its own first."""
        chain = node.rpartition("/")[0]
        directories = [node, *(path for path in self.fields if path != node and path.rpartition("/")[0] == chain)]
        return [self.fields[path]["count"] for path in directories if "count" in self.fields.get(path, {})]

    @property
    def step(self) -> str | None:
        """Name of the step, T5X's or Flax's first."""
        return next((name for name in (*STEPS, *filter(is_step, self.names)) if name in self.names), None)


@dataclasses.dataclass
class _Pairing:
    """Pairs of the leaves of two sides; with `to_optax` T5X's side is the source."""

    result: SlotConversion
    t5x: _Side
    optax: _Side
    rules: Mapping[str, Sequence[FactorDim]]
    to_optax: bool

    def convert(self, node: str, optax: Mapping[str, Mapping[str, str]]) -> None:
        """Adds the leaves of a factored Optax state to the result."""
        counters, step = self.optax.counters(node), self.t5x.step
        if self.to_optax:
            self.result.renames.update(dict.fromkeys(counters, step) if step is not None else {})
        else:
            # A T5X checkpoint of an Optax optimizer has the step itself, too.
            if step is not None and STEPS[0] not in self.optax.names and counters:
                self.result.renames[step] = counters.pop(0)
            self.result.unused.extend(counters)
        for path in optax[_SLOTS[0]]:
            self._convert_parameter(path, node, optax)

    def _convert_parameter(self, path: str, node: str, optax: Mapping[str, Mapping[str, str]]) -> None:
        shape = self.t5x.shape_of(path) or self.optax.shape_of(path)
        absent = [kind for kind in _SLOTS if path not in self.t5x.slots[kind] or path not in optax[kind]]
        if shape is None or absent:
            message = f"T5X's slots and Optax's are both needed to convert Adafactor's state of {path}"
            slots = next((slots[path] for slots in self.t5x.slots.values() if path in slots), path)
            leaf = f"{slots.rpartition('/')[0]}/{absent[0]}" if absent else slots
            self.result.problems.append(Problem("missing", leaf, message, _RESET))
            return
        try:
            matched = match_slots(
                shape,
                {kind: self.t5x.shape(self.t5x.slots[kind][path]) for kind in _SLOTS},
                {kind: self.optax.shape(optax[kind][path]) for kind in _SLOTS},
                self.rules.get(path),
            )
        except ValueError as error:
            self._problem((optax if self.to_optax else self.t5x.slots)["v_row"][path], str(error))
            return
        for optax_kind, t5x_kind in matched.items():
            self._pair(optax[optax_kind][path], self.t5x.slots[t5x_kind][path])
        self._convert_momentum(path, shape, node)

    def _convert_momentum(self, path: str, shape: Shape, node: str) -> None:
        """Pairs the state of Optax's `ema` with T5X's `m`, which is a placeholder if there is no momentum."""
        momentum = self.t5x.slots.get("m", {}).get(path)
        if momentum is None:
            return
        ema = self.optax.momentum.get(node.rpartition("/")[0], {}).get(path)
        keeps_momentum = self.t5x.shape(momentum) == shape and (shape != _PLACEHOLDER or ema is not None)
        if ema is not None and keeps_momentum:
            self._pair(ema, momentum)
        elif ema is None and not keeps_momentum:
            (self.result.unused if self.to_optax else self.result.placeholders).append(momentum)
        else:
            self._problem(ema or momentum, "only one of T5X (beta1) and Optax (momentum) keeps momentum")

    def _pair(self, optax_name: str, t5x_name: str) -> None:
        to, origin = (optax_name, t5x_name) if self.to_optax else (t5x_name, optax_name)
        self.result.renames[to] = origin

    def _problem(self, leaf: str, message: str) -> None:
        self.result.problems.append(Problem("optimizer", leaf, f"no exact conversion: {message}", _RESET))


def _is_whole(slots: Mapping[str, Shape], shape: Shape) -> bool:
    return tuple(slots["v"]) == tuple(shape)
