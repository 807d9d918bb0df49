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

from orbax_t5x.errors import Fix, Problem
from orbax_t5x.optim.containers import STANDARD_ROOTS, is_step
from orbax_t5x.optim.factor_rules import FactorDim
from orbax_t5x.optim.factored_dims import Shape, dims_by_size, possible_dims
from orbax_t5x.optim.moments import GLUED, SlotNames

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


def t5x_to_optax(
    source: Mapping[str, Shape], target: Mapping[str, Shape], rules: Mapping[str, Sequence[FactorDim]] | None = None
) -> SlotConversion:
    """Fills `optax.adafactor`'s state from a T5X Adafactor checkpoint.

    Source and target are shapes by name; the states may be anywhere in them.
    """
    result = SlotConversion()
    names = _Names(source, target)
    for prefix, params in names.factored.items():
        pairing = _Pairing(result, source, target, prefix, _entries(target, prefix), rules or {}, names, to_optax=True)
        if _step(source) in source:
            result.renames.update(dict.fromkeys(pairing.counters(), _step(source)))
        for param in params:
            pairing.convert(param)
    return result


def optax_to_t5x(
    source: Mapping[str, Shape], target: Mapping[str, Shape], rules: Mapping[str, Sequence[FactorDim]] | None = None
) -> SlotConversion:
    """Fills a T5X Adafactor target from `optax.adafactor`'s state.

    See `t5x_to_optax`.
    """
    result = SlotConversion()
    names = _Names(target, source)
    for prefix, params in names.factored.items():
        pairing = _Pairing(result, target, source, prefix, _entries(source, prefix), rules or {}, names, to_optax=False)
        counter, *others = pairing.counters()
        # A T5X checkpoint of an Optax optimizer has the step itself, too.
        if STEPS[0] in source:
            result.unused.append(counter)
        else:
            result.renames[STEPS[0]] = counter
        result.unused.extend(others)
        for param in params:
            pairing.convert(param)
    return result


@dataclasses.dataclass
class _Pairing:
    """Matcher of a factored Optax state with T5X's slots.

    `to_optax`: T5X's side is the source.
    """

    result: SlotConversion
    t5x: Mapping[str, Shape]
    optax: Mapping[str, Shape]
    prefix: str
    entries: list[str]
    rules: Mapping[str, Sequence[FactorDim]]
    names: _Names
    to_optax: bool

    def counters(self) -> list[str]:
        """Lists the step counters of the chain, the factored state's own first."""
        others = (f"{entry}count" for entry in self.entries if entry != self.prefix)
        return [f"{self.prefix}count", *(name for name in others if name in self.optax)]

    def convert(self, param: str) -> None:
        """Adds the leaves of a parameter to the result."""
        slots_of = self.names.t5x.get(param, f"{self.names.t5x_root}/{param}")
        t5x_names = {slot: f"{slots_of}/{slot}" for slot in _SLOTS}
        optax_names = {slot: f"{self.prefix}{slot}/{self.names.inner}{param}" for slot in _SLOTS}
        shape = self.names.shapes.get(param)
        absent = [name for name in t5x_names.values() if name not in self.t5x] or ([param] if shape is None else [])
        if shape is None or absent:
            message = f"needed to convert Adafactor's state of {param}"
            self.result.problems.append(Problem("missing", absent[0], message, _RESET))
            return
        try:
            matched = match_slots(
                shape,
                {slot: self.t5x[name] for slot, name in t5x_names.items()},
                {slot: self.optax[name] for slot, name in optax_names.items()},
                self.rules.get(param),
            )
        except ValueError as error:
            self._problem((optax_names if self.to_optax else t5x_names)["v_row"], str(error))
            return
        for optax_slot, t5x_slot in matched.items():
            self._pair(optax_names[optax_slot], t5x_names[t5x_slot])
        self._convert_momentum(param, shape)

    def _convert_momentum(self, param: str, shape: Shape) -> None:
        """Adds the momentum.

        It is the state of Optax's `ema`, and T5X's m, which is a placeholder if there is no momentum.
        """
        m = f"{self.names.t5x.get(param)}/m"
        if m not in self.t5x:
            return
        in_entries = (f"{entry}ema/{self.names.inner}{param}" for entry in self.entries)
        ema = next((name for name in in_entries if name in self.optax), None)
        keeps_momentum = self.t5x[m] == shape and (shape != _PLACEHOLDER or ema is not None)
        if ema is not None and keeps_momentum:
            self._pair(ema, m)
        elif ema is None and not keeps_momentum:
            (self.result.unused if self.to_optax else self.result.placeholders).append(m)
        else:
            self._problem(ema or m, "only one of T5X (beta1) and Optax (momentum) keeps momentum")

    def _pair(self, optax_name: str, t5x_name: str) -> None:
        to, origin = (optax_name, t5x_name) if self.to_optax else (t5x_name, optax_name)
        self.result.renames[to] = origin

    def _problem(self, leaf: str, message: str) -> None:
        self.result.problems.append(Problem("optimizer", leaf, f"no exact conversion: {message}", _RESET))


def _step(names: Mapping[str, Shape]) -> str:
    """Returns the name of the step, T5X's or Flax's first."""
    return next((name for name in (*STEPS, *filter(is_step, names)) if name in names), STEPS[0])


def _is_whole(slots: Mapping[str, Shape], shape: Shape) -> bool:
    return tuple(slots["v"]) == tuple(shape)


class _Names:
    """Parameters with T5X's slots and with Optax's.

    Attributes:
      t5x: the path of each parameter's slots in T5X's state, which is `t5x_root`.
      factored: the parameters of each factored Optax state, by its fields' prefix; `inner` is before their paths.
      shapes: of parameters.
    """

    def __init__(self, t5x: Mapping[str, Shape], optax: Mapping[str, Shape]):
        self.t5x: dict[str, str] = {}
        self.t5x_root = STANDARD_ROOTS[0][1]
        self.factored: dict[str, list[str]] = {}
        self.inner = ""
        self.shapes: dict[str, Shape] = {}
        for leaves in (optax, t5x):
            known = SlotNames.among(leaves)
            for name, slot in known.slots(leaves).items():
                if slot.kind != _SLOTS[0] or slot.tree.form == GLUED or (slot.tree.kind_first and leaves is t5x):
                    continue
                self.shapes.setdefault(slot.param, leaves[known.param_name(slot)])
                if not slot.tree.kind_first:
                    self.t5x[slot.param] = name.removesuffix(f"/{slot.kind}")
                    continue
                fields = f"{known.directory(slot.tree)}/"
                if f"{fields}count" in leaves and all(known.slot_name(slot._replace(kind=k)) in leaves for k in _SLOTS):
                    self.factored.setdefault(fields, []).append(slot.param)
                    self.inner = name.removeprefix(f"{fields}{slot.kind}/").removesuffix(slot.param)


def _entries(names: Mapping[str, Shape], prefix: str) -> list[str]:
    """Lists the entries' prefixes of a factored state's chain."""
    chain = prefix[: prefix.rstrip("/").rfind("/") + 1]
    entries = (name[len(chain) :].partition("/")[0] for name in names if name.startswith(chain))
    return [f"{chain}{entry}/" for entry in dict.fromkeys(entries)]
