"""Parameters with shardings, and the optimizer's slots of each.

A leaf belongs to the parameter whose name its own name contains: `opt_state/0/mu/encoder/kernel` and T5X's
`state/param_states/encoder/kernel/v_row` to `encoder/kernel`. A leaf of the parameter's shape is split as it is; one
that lacks some of the dimensions (a factored second moment), or has more in front (a stack), in those that both have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from jax.sharding import PartitionSpec

from orbax_t5x.optim.optax_axes import StateLeaf, slot_axes


class SplitParameter(NamedTuple):
    """A parameter and its split; `rule` is the deciding pattern."""

    shape: tuple[int, ...]
    spec: PartitionSpec
    rule: str | None = None
    by_axes: bool = False

    def spec_for(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        """Returns the split of a leaf that belongs to the parameter.

        A leaf of an unrelated shape is not split.
        """
        slot = StateLeaf(tuple(name.split("/")), shape)
        return slot_axes(slot, self.spec, self.shape) or PartitionSpec()


class SplitParameters:
    """Table of parameters by the words in names of other leaves."""

    def __init__(self, parameters: Mapping[str, SplitParameter]):
        self._by_parts = {tuple(name.split("/")): parameter for name, parameter in parameters.items()}
        self._longest = max(map(len, self._by_parts), default=0)

    def __bool__(self) -> bool:
        return bool(self._by_parts)

    def of(self, name: str) -> SplitParameter | None:
        """Returns the parameter with the longest name in a name.

        Of equally long names, the last in the name counts.
        """
        parts = tuple(name.split("/"))
        for length in range(min(self._longest, len(parts)), 0, -1):
            for start in range(len(parts) - length, -1, -1):
                found = self._by_parts.get(parts[start : start + length])
                if found is not None:
                    return found
        return None
