"""Several transforms as a single transform."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from orbax_t5x.transforms.base import AnyTransform, Given, Transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.run import run_transforms
from orbax_t5x.trees.flat import FlatState


@dataclasses.dataclass(frozen=True)
class Chain(Transform):
    """Sequence of transforms, run in order.

    Attributes:
      steps: transforms, or plain functions of T5X's protocol.

    Example:
      >>> both = ot.transforms.Chain([ot.transforms.Drop("head/.*"), ot.transforms.Rename([("w", "kernel")])])
      >>> both({"w": 1, "head": {"b": 2}}, {})
      {'kernel': 1}
    """

    steps: Given[Iterable[AnyTransform], tuple[AnyTransform, ...]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(self.steps))

    @property
    def only_selects(self) -> bool:
        return all(getattr(step, "only_selects", False) for step in self.steps)

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        return run_transforms(self.steps, state, target, is_resuming=False, diagnostics=diagnostics)
