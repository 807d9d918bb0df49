"""Hypothesis: the names are other ones throughout, and shapes, structure and words give every leaf one reading."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from orbax_t5x.errors import RestorePlanError
from orbax_t5x.restoring.diagnose.hypothesis import Hypothesis, Remedy, UnmatchedLeaves
from orbax_t5x.rules.finding import find_rules

# Fewer are explained one by one.
_LEAST_MISSING = 8
_LET_AUTO_FIND = 'if the two are one model, pass transforms="auto" (on the command line: --rules auto)'


@dataclasses.dataclass(frozen=True)
class OtherNames(Hypothesis):
    """Rules that `"auto"` would find for the whole model: advice, since names alone do not show that they are right."""

    def remedies(self, unmatched: UnmatchedLeaves) -> Iterator[Remedy]:
        if unmatched.transforms or len(unmatched.missing) < _LEAST_MISSING:
            return
        try:
            found = find_rules(unmatched.arrays, unmatched.target.original)
        except RestorePlanError:
            return
        if found.is_whole:
            reason = "the names differ, and shapes, structure and words give each one reading"
            yield Remedy(found.parts, reason, _LET_AUTO_FIND)
