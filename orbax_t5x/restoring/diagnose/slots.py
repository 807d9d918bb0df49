"""Tells an optimizer's slots from a model's parameters by name: the two are never proposed for one another."""

from __future__ import annotations

import re
from collections.abc import Collection

SLOT_WORDS = frozenset({"m", "v", "mu", "nu", "ema", "trace", "momentum", "grad", "acc"})
"""Optimizers keep a leaf like each parameter under a name with one of these more; it is another quantity."""
# What the optimizer keeps, in T5X's and Flax's train states.
_OPTIMIZER = re.compile(r"(?:.*/)?(?:param_states|opt_state)/.*")


def is_in_optimizer_state(name: str) -> bool:
    """Returns True if a name is in the optimizer's state of a train state."""
    return _OPTIMIZER.fullmatch(name) is not None


def is_slot(name: str) -> bool:
    """Returns True if a name is that of an optimizer's slot or of an average of a parameter."""
    return is_in_optimizer_state(name) or not SLOT_WORDS.isdisjoint(name.split("/"))


def model_leaves(names: Collection[str]) -> list[str]:
    """Returns the names that belong to no optimizer's state; all of them where only such are given."""
    return [name for name in names if not is_in_optimizer_state(name)] or list(names)
