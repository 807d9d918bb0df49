"""Problems of leaves that no other hypothesis explains: one per missing leaf, and one for all leftovers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from orbax_t5x.errors import Fix, Problem
from orbax_t5x.restoring.diagnose.hypothesis import Explanation, Hypothesis, UnmatchedLeaves
from orbax_t5x.restoring.diagnose.single_array import NO_NAME
from orbax_t5x.restoring.target_leaf import MissingLeaf
from orbax_t5x.text.wording import leaves_text, listed
from orbax_t5x.transforms.patterns.closest import ClosestNames

# Names shown for a missing leaf, and missing leaves for which they are looked up: each look-up scans all names.
_CLOSEST = 3
_LOOKUPS = 20
# Leftover names shown in the one problem that counts them.
_SHOWN_LEFTOVERS = 5
_BARRED = "; no pattern of fallback_for lets the fallback fill it"

LEAVE_UNREAD = Fix.any_of(
    Fix.setting("pass {} to leave them unread", strict=False),
    Fix.in_program("put ot.transforms.Drop(pattern) into the rules"),
)
_GIVE_VALUES = Fix.any_of(
    Fix.setting("give {} values", fallback=...), Fix.by_target("put ... in the target to leave it out")
)
_LET_FILL = Fix.any_of(
    Fix.in_program("let the fallback fill it by a pattern of fallback_for"),
    Fix.by_target("put ... in the target to leave it out"),
)


def give_values(one: MissingLeaf) -> Fix:
    """Returns the advice for a leaf without a value in the checkpoint."""
    return _LET_FILL if one.is_barred else _GIVE_VALUES


@dataclasses.dataclass(frozen=True)
class Unexplained(Hypothesis):
    """Leaves that one side simply lacks; the closest names are listed for the first few."""

    def explanations(self, unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
        closest = ClosestNames(list(unmatched.free) or list(unmatched.stored))
        for place, (name, one) in enumerate(unmatched.wanted.items()):
            near = closest.to(name, _CLOSEST) if place < _LOOKUPS else []
            message = "the checkpoint has no such leaf" + (f"; closest: {', '.join(near)}" if near else "")
            message += _BARRED if one.is_barred else ""
            yield Explanation(Problem("missing", name, message, give_values(one)), (name,))
        names = unmatched.leftovers
        if len(names) == 1:
            message = "the target has no place for this leaf of the checkpoint"
            message += "" if names[0] else f", {NO_NAME}"
            yield Explanation(Problem("leftover", names[0], message, LEAVE_UNREAD), names)
        elif names:
            shown = listed(names, _SHOWN_LEFTOVERS)
            message = f"{leaves_text(len(names))} of the checkpoint have no place in the target: {shown}"
            yield Explanation(Problem("leftover", None, message, LEAVE_UNREAD), names)
