"""Hypotheses on single leaves, in the end unexplained leaves."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from orbax_t5x import transforms
from orbax_t5x.errors import Fix, Problem
from orbax_t5x.restoring.diagnose.hypothesis import Explanation, Hypothesis, UnmatchedLeaves, as_template
from orbax_t5x.restoring.targets import MissingLeaf
from orbax_t5x.text.wording import leaves_text, listed
from orbax_t5x.transforms.patterns.closest import ClosestNames

_NONE = "the checkpoint has None there: that part of the state was not in use when it was saved"
_RESET = "the optimizer's state of this parameter has no counterpart in the new layout and is reset"
NO_NAME = "a single array, which has no name"
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


@dataclasses.dataclass(frozen=True)
class SingleArray(Hypothesis):
    """An array without a container, as the target or as the checkpoint."""

    def explanations(self, unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
        if "" not in unmatched.wanted and (not unmatched.wanted or list(unmatched.arrays) != [""]):
            return
        arrays = [(name, tuple(array.shape), str(array.dtype)) for name, array in unmatched.arrays.items()]
        for name, missing in unmatched.wanted.items():
            message = f"the checkpoint has no such leaf: the {'checkpoint' if name else 'target'} is {NO_NAME}"
            fix = Fix.by_target("pass the target's leaf by itself" if name else "name the target's leaf, {name: leaf}")
            if [array[1:] for array in arrays] == [(missing.leaf.shape, str(missing.leaf.dtype))]:
                fix = Fix.adding(transforms.AssignmentMap(((re.escape(name), as_template(arrays[0][0])),)))
            yield Explanation(Problem("missing", name, message, fix), (name,))


@dataclasses.dataclass(frozen=True)
class Unexplained(Hypothesis):
    """Leaves that a side lacks, with close names."""

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
