"""Hypothesis: parts of the names are other words on either side: `decoder` and `dec`, `layers_i` and `block_i`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator

from orbax_t5x import on_demand
from orbax_t5x.restoring.diagnose.hypothesis import (
    SLOT_WORDS,
    Hypothesis,
    Remedy,
    UnmatchedLeaves,
    as_template,
    model_leaves,
)
from orbax_t5x.text.wording import listed
from orbax_t5x.transforms import AssignmentMap, Rename

# A single leaf shows no consistent renaming.
_LEAST_ALIKE = 2
# Abbreviations of fewer letters stand for too many words: `k` is a key's or a kernel's.
_LEAST_LETTERS = 3
_WORD = re.compile(r"[A-Za-z]+|\d+")
# Words for one of several layers, of which a model has one kind.
_LAYER_WORDS = frozenset({"layer", "layers", "block", "blocks", "h"})
# Of several renamed parts.
_SHOWN_PARTS = 3
# In place of a number that is the same on both sides.
_NUMBER = "#"
_moves_between = on_demand.function("orbax_t5x.rules.alignment.moves", "moves_between")

Parts = tuple[str, str]
"""A part of names in a checkpoint, and the part in its place in a target, with `#` for a number that both have."""


@dataclasses.dataclass(frozen=True)
class RenamedPart(Hypothesis):
    """Other parts in all missing names, as an alignment pairs them; code only where all are abbreviations.

    The pairs may contradict what is known of the words, as `encoder` and `decoder` do: a single one is advice.
    """

    def remedies(self, unmatched: UnmatchedLeaves) -> Iterator[Remedy]:
        if not unmatched.missing:  # a rule of the caller is known to be wrong
            return
        missing = model_leaves(unmatched.unfilled)
        renamed = _renamed_parts(unmatched, missing) if len(missing) >= _LEAST_ALIKE else ()
        is_known = all(_is_abbreviated(*pair) for pair in renamed)
        if not renamed or not (is_known or len(renamed) == 1):
            return
        theirs, ours = (
            listed([repr(pair[side].replace(_NUMBER, "i")) for pair in renamed], _SHOWN_PARTS) for side in (0, 1)
        )
        reason = f"where the target's names have {ours}, the checkpoint's have {theirs}"
        advice = None
        if not is_known:
            advice = "if the two are the same module, map the names with a rule of AssignmentMap or Rename"
        yield Remedy(tuple([Rename((_rule(old, new),)) for old, new in renamed]), reason, advice)
        if len(renamed) == 1:
            yield Remedy((AssignmentMap((_rule(*reversed(renamed[0])),)),), reason, advice)


def _renamed_parts(unmatched: UnmatchedLeaves, missing: Collection[str]) -> tuple[Parts, ...]:
    """Returns the pairs of parts that give every missing leaf a free one; none where names differ in something else."""
    free = {name: unmatched.free[name] for name in model_leaves(unmatched.free)}
    wanted = {name: unmatched.target.leaves[name] for name in missing}
    moves = _moves_between(free, wanted, may_contradict=True)
    found: dict[Parts, None] = {}
    for move in moves.values():
        pairs = None if moves.open or move.axis is not None else _differing_parts(move.sources[0], move.targets[0])
        if pairs is None:
            return ()
        found.update(dict.fromkeys(pairs))
    return tuple(found)


def _differing_parts(theirs: str, ours: str) -> list[Parts] | None:
    """Returns the parts in which two names differ; None where these are numbers or slots, or not as many."""
    if theirs.count("/") != ours.count("/"):
        return None
    found: list[Parts] = []
    for pair in zip(theirs.split("/"), ours.split("/"), strict=True):
        one, another = map(_numbers_in, pair)
        if pair[0] == pair[1]:
            continue
        if not SLOT_WORDS.isdisjoint(pair) or _NUMBER in "".join(pair) or (one and another and one != another):
            return None
        is_numbered = one == another and len(one) == 1
        found.append((re.sub(r"\d+", _NUMBER, pair[0]), re.sub(r"\d+", _NUMBER, pair[1])) if is_numbered else pair)
    return found


def _rule(old: str, new: str) -> tuple[str, str]:
    """Returns the rule for a part of a whole name."""
    pattern = re.escape(old).replace(re.escape(_NUMBER), r"(\d+)")
    if _NUMBER in old:
        return f"(.*/|){pattern}(/.*|)", f"\\g<1>{as_template(new).replace(_NUMBER, chr(92) + 'g<2>')}\\3"
    return f"(.*/|){pattern}(/.*|)", f"\\g<1>{as_template(new)}\\2"


def _numbers_in(part: str) -> list[int]:
    return [int(word) for word in re.findall(r"\d+", part)]


def _is_abbreviated(one: str, other: str) -> bool:
    """Returns True if the words of two parts are equal, or each is the other with letters left out."""
    if _LAYER_WORDS.issuperset(word for part in (one, other) for word in re.findall("[a-z]+", part.lower())):
        return True
    if re.sub(r"[_\d]+", "", one) == re.sub(r"[_\d]+", "", other):  # `wi` and `wi_0`
        return True
    words = list(zip(_WORD.findall(one.lower()), _WORD.findall(other.lower()), strict=False))
    same_length = len(_WORD.findall(one)) == len(_WORD.findall(other)) == len(words)
    return same_length and all(_is_short_for(*sorted(pair, key=len)) for pair in words)


def _is_short_for(short: str, long: str) -> bool:
    letters = iter(long)
    return short == long or (
        len(short) >= _LEAST_LETTERS and short[0] == long[0] and all(letter in letters for letter in short)
    )
