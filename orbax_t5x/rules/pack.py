"""A rule pack: one transform made of steps, with the way back."""

from __future__ import annotations

import dataclasses
from typing import Any

from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.chain import Chain
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.patterns.closest import ClosestNames
from orbax_t5x.trees.flat import FlatState


@dataclasses.dataclass(frozen=True, repr=False)
class RulePack(Chain):
    """Maps one model's tree to another's. A step may match nothing; it is a problem if none of them matches anything.

    Attributes:
      steps: forwards.
      back: the steps backwards.
      name: the function that made it, with its arguments, as text.
      example: a name as the pack expects it.
      found: what `infer` found in the checkpoint, as text; packs that differ in it alone are equal.
    """

    back: tuple[Transform, ...] = ()
    name: str = ""
    example: str = ""
    back_example: str = ""
    found: str = dataclasses.field(default="", compare=False)

    def inverse(self) -> RulePack:
        """The way back."""
        prefix = "inverse of "
        name = self.name.removeprefix(prefix) if self.name.startswith(prefix) else prefix + self.name
        return RulePack(self.back, self.steps, name, self.back_example, self.example)  # pyright: ignore[reportArgumentType]

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        """See `Transform.apply`."""
        before = len(diagnostics.problems)
        # The copy shares the caller's lists and dicts, so problems arrive there.
        result = super().apply(state, target, dataclasses.replace(diagnostics, warns_of_unused=False))
        same = result.keys() == state.keys() and all(result[name] is value for name, value in state.items())
        if self.steps and same and len(diagnostics.problems) == before:
            near = ClosestNames(state).to(self.example)
            diagnostics.problem(
                "unused_rule",
                None,
                f"{self.name}: no name is one of that layout's, such as {self.example!r}"
                + (f"; closest: {near}" if near else ""),
                "ot.rules.infer(source_leaves, target_leaves) finds the pack that fits",
            )
        return result

    def digest(self) -> str | None:
        """As `Transform.digest`; `found` does not count."""
        return super().digest() if not self.found else dataclasses.replace(self, found="").digest()

    def __repr__(self) -> str:
        return f"<RulePack {self.found or self.name}>"

    def describe(self) -> str:
        """One line for people."""
        return f"rules.{self.name}" if not self.name.startswith("inverse of ") else f"rules: {self.name}"
