"""The one transform that explains why leaves are missing, found by matching again with it.

Names of Hugging Face without the pack, a scanned target, `params/` against `target/`: each makes dozens of missing
leaves, and each is one mistake. What is proposed here was tried: the problems that come with it are those of the
checkpoint and the target after it. Only a plan that fails pays for that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from orbax_t5x.errors import Fix, Problem
from orbax_t5x.restoring.diagnose.proposals import (
    Proposal,
    is_optimizer_leaf,
    proposed_pack,
    proposed_prefix,
    proposed_translation,
)
from orbax_t5x.restoring.targets import Target
from orbax_t5x.text.wording import counted
from orbax_t5x.transforms import Transform


@dataclasses.dataclass(frozen=True)
class Matched:
    """A state dict, matched with the target.

    Attributes:
      state: what the transforms made, by name.
      unfilled: names of the target for which it has nothing of their shape.
      problems: gives what is wrong; closest names are looked up only when it is called.
    """

    state: Mapping[str, Any]
    unfilled: Collection[str]
    problems: Callable[[], list[Problem]]


def cured(
    outcome: Matched, target: Target, attempt: Callable[[Transform], Matched], fix: Callable[[str], Fix]
) -> list[Problem] | None:
    """The problems of a plan when one transform explains its missing leaves: that it lacks, then those with it.

    Args:
      outcome: without it.
      target: what is to be filled.
      attempt: runs one transform more and matches again.
      fix: what to pass, from the calls that make the transform.

    Returns:
      None where nothing was found.
    """
    best: tuple[Proposal, list[Problem]] | None = None
    for proposal in _proposals(outcome, target):
        after = attempt(proposal.transform)
        if not _explains(outcome.unfilled, after.unfilled):
            continue
        problems = after.problems()
        if best is None or len(problems) <= len(best[1]):
            best = proposal, problems
        if not problems:
            break
    if best is None:
        return None
    return [_problem(best[0], len(outcome.unfilled), len(best[1]), fix), *best[1]]


def _proposals(outcome: Matched, target: Target) -> Iterator[Proposal]:
    pack = proposed_pack(outcome.state, target.original) or proposed_translation(outcome.state)
    if pack is not None:
        yield pack
    # What has its own place in the target is no other leaf's.
    free = {
        name: value for name, value in outcome.state.items() if name not in target.leaves or name in outcome.unfilled
    }
    yield from proposed_prefix(free, {name: target.leaves[name] for name in outcome.unfilled})


def _explains(before: Collection[str], after: Collection[str]) -> bool:
    """Whether most of what was missing is there, and nothing that was there is missing.

    An optimizer's state may be missing for another reason, such as that nobody saved it.
    """
    if not set(after) <= set(before):
        return False
    model = [name for name in before if not is_optimizer_leaf(name)] or list(before)
    left = set(after).intersection(model)
    return 2 * len(left) < len(model)


def _problem(proposal: Proposal, unfilled: int, left: int, fix: Callable[[str], Fix]) -> Problem:
    has = "has no leaf" if unfilled == 1 else "have no leaf"
    message = f"{counted(unfilled, 'target leaf', 'target leaves')} {has} of their name and shape: {proposal.reason}"
    if left:
        message += f"; with the fix {counted(left, 'problem')} {'is' if left == 1 else 'are'} left, listed below"
    return Problem("missing", None, message, fix(proposal.description))
