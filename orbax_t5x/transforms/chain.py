"""Several transforms as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.run import run_transforms


@dataclasses.dataclass(frozen=True)
class Chain(Transform):
    """Runs transforms in order, as one.

    Attributes:
      steps: transforms, or plain functions of T5X's protocol.
    """

    steps: tuple[Transform | Callable[..., Any], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(self.steps))

    def apply(self, source: dict[str, Any], target: Mapping[str, Any], diagnostics: Diagnostics) -> dict[str, Any]:
        """See `Transform.apply`."""
        return run_transforms(self.steps, source, target, is_resuming=False, diagnostics=diagnostics)
