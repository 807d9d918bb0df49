"""Conversion between T5X's and Optax's state of Adafactor."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from orbax_t5x.errors import Fix
from orbax_t5x.optim.factor_rules import FactorDim
from orbax_t5x.optim.factored_state import SlotConversion, convert_slots
from orbax_t5x.optim.optimizer_names import is_step
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.trees.flat import FlatState


@dataclasses.dataclass(frozen=True)
class AdafactorSlots(Transform):
    """Conversion of T5X's Adafactor slots to `optax.adafactor`'s factored state, or back.

    The target decides the direction; the factored state may be anywhere in it. Counters come from the step. Where the
    two libraries have averaged over different dimensions, or only one has factored or keeps momentum, nothing is
    converted and the problem has the reason. The step stays. Run it before transforms that rename parameters.

    Attributes:
      rules: pairs (parameter name, T5X's rule for it as FactorDims) for parameters of rank 3 and more whose shapes do
        not show which dimensions were averaged over.

    Example:
      >>> params = {"w": jnp.ones((256, 128))}
      >>> state = ot.adafactor.Adafactor(1e-3).create(params).state_dict()
      >>> optax_state = flax.serialization.to_state_dict(optax.adafactor(1e-3).init(params))
      >>> converted = ot.transforms.AdafactorSlots()(state, {"target": params, "opt_state": optax_state})
      >>> jax.tree.map(np.shape, converted["opt_state"]["0"]["v_row"])
      {'w': (128,)}
    """

    rules: Sequence[tuple[str, Sequence[FactorDim]]] = ()

    def __post_init__(self) -> None:
        given: Any = self.rules
        pairs = given.items() if isinstance(given, Mapping) else given
        object.__setattr__(self, "rules", tuple((str(name), tuple(map(FactorDim, rule))) for name, rule in pairs))

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        found = convert_slots(_arrays(state), _arrays(target), dict(self.rules))
        diagnostics.problems.extend(found.problems)
        if found.problems:
            return dict(state)
        if not found.renames:
            message = (
                "AdafactorSlots: the target has not optax.adafactor's state for T5X's slots in the checkpoint, nor "
                "T5X's slots for Optax's state there"
            )
            fix = Fix("remove it, or check that the names still are those that the libraries gave")
            diagnostics.problem("unused_rule", None, message, fix)
            return dict(state)
        return self._renamed(state, target, found, diagnostics)

    def _renamed(
        self, state: FlatState, target: FlatState, found: SlotConversion, diagnostics: Diagnostics
    ) -> dict[str, Any]:
        # The step is also the train state's: it stays, and the caller's other transforms decide about it.
        leaving = (*found.renames.values(), *found.unused)
        moved = {name for name in leaving if (name not in target or name in found.renames) and not is_step(name)}
        result = {name: value for name, value in state.items() if name not in moved}
        result.update({to: state[origin] for to, origin in found.renames.items()})
        result.update({name: np.zeros((1,), np.float32) for name in found.placeholders})
        diagnostics.record_origins({to: (origin, self.describe()) for to, origin in found.renames.items()})
        before = dict(diagnostics.fidelity)
        for to, origin in found.renames.items():
            diagnostics.fidelity[to] = "approximate" if before.get(origin) == "approximate" else "exact"
        return result


def _arrays(leaves: FlatState) -> FlatState:
    return {name: leaf for name, leaf in leaves.items() if hasattr(leaf, "shape")}
