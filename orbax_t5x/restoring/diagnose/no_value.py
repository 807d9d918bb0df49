"""Hypothesis: there is no value on purpose: the checkpoint has None, or a transform resets a slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from orbax_t5x.errors import Fix, Problem
from orbax_t5x.restoring.diagnose.hypothesis import Explanation, Hypothesis, UnmatchedLeaves
from orbax_t5x.restoring.diagnose.unexplained import give_values

_NONE = "the checkpoint has None there: that part of the state was not in use when it was saved"
_RESET = "the optimizer's state of this parameter has no counterpart in the new layout and is reset"


@dataclasses.dataclass(frozen=True)
class NoValue(Hypothesis):
    """A leaf that the checkpoint knows and has no value of."""

    def explanations(self, unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
        for one in unmatched.missing:
            if one.is_none:
                fix = Fix.any_of(
                    Fix.by_target("put None in the target there"), Fix.setting("give {} values", fallback=...)
                )
                yield Explanation(Problem("missing", one.name, _NONE, fix), (one.name,))
            elif one.is_reset:
                yield Explanation(Problem("missing", one.name, _RESET, give_values(one)), (one.name,))
