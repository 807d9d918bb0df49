"""Hypothesis: leftover leaves are other models of a bundle, beside the one below a prefix that the target takes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from orbax_t5x.errors import Fix, Problem
from orbax_t5x.lazy import LazyArray, as_view
from orbax_t5x.restoring.diagnose.hypothesis import Explanation, Hypothesis, UnmatchedLeaves
from orbax_t5x.text.wording import leaves_text, listed
from orbax_t5x.transforms import Keep

_SHOWN_NAMES = 5


@dataclasses.dataclass(frozen=True)
class OtherModels(Hypothesis):
    """All that the target takes is below one prefix, as in a text encoder of a diffusion model's bundle."""

    def explanations(self, unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
        prefix = _prefix_taken(unmatched) if unmatched.leftovers and unmatched.takes_rules else ""
        # Leftovers that a transform has named otherwise are no model beside the one that it translates.
        names = [name for name in unmatched.leftovers if name in unmatched.source and not name.startswith(prefix)]
        if prefix and names:
            message = (
                f"the target takes what is below {prefix!r}; {leaves_text(len(names))} of the checkpoint beside it "
                f"{'has' if len(names) == 1 else 'have'} no place there: {listed(names, _SHOWN_NAMES)}"
            )
            keep = Keep((f"{re.escape(prefix)}.*",))
            fix = Fix.any_of(
                Fix.setting("pass {} to leave them unread", strict=False),
                Fix.setting("keep the one model: pass {}", transforms=(keep, *unmatched.transforms)),
            )
            yield Explanation(Problem("leftover", names[0] if len(names) == 1 else None, message, fix), names)


def _prefix_taken(unmatched: UnmatchedLeaves) -> str:
    """Returns the prefix that all leaves have which the target takes; empty where there is none."""
    names = {leaf: name for name, value in unmatched.source.items() for leaf in _leaf_count(value)}
    taken = unmatched.target.leaves.keys() - set(unmatched.unfilled)
    found = [names[leaf] for name in taken for leaf in _leaf_count(unmatched.stored.get(name)) if leaf in names]
    if len(found) < 2:
        return ""
    # What all names begin with, the first and the last of them begin with.
    first, last = min(found), max(found)
    common = next((first[:at] for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), "")
    # Of PyTorch's names; what a train state has beside its parameters is no other model.
    return common[: common.rfind(".") + 1]


def _leaf_count(value: object) -> tuple[object, ...]:
    return as_view(value).leaves() if isinstance(value, LazyArray) else ()
