"""Hypothesis: the target has the names that the checkpoint has before the transforms."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from orbax_t5x.restoring.diagnose.hypothesis import Hypothesis, Remedy, UnmatchedLeaves


@dataclasses.dataclass(frozen=True)
class NeedlessRules(Hypothesis):
    """Transforms that take away the names of the target, such as `Translate` for a target in the bundle's own names."""

    def remedies(self, unmatched: UnmatchedLeaves) -> Iterator[Remedy]:
        if unmatched.transforms and any(name in unmatched.source for name in unmatched.unfilled):
            yield Remedy(
                (), "the target has the names of the checkpoint as they are without the transforms", is_instead=True
            )
