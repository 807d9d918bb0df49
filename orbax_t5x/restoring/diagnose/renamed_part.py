"""Hypothesis: one part of the names is another word on either side, such as `decoder` and `dec`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from orbax_t5x.restoring.diagnose.hypothesis import Hypothesis, Remedy, Shapes, UnmatchedLeaves, as_template
from orbax_t5x.restoring.diagnose.slots import SLOT_WORDS, model_leaves
from orbax_t5x.transforms import AssignmentMap, Rename

# A single leaf shows no consistent renaming.
_LEAST_ALIKE = 2
# Abbreviations of fewer letters stand for too many words: `k` is a key's or a kernel's.
_LEAST_LETTERS = 3
_WORD = re.compile(r"[A-Za-z]+|\d+")

Parts = tuple[str, str]
"""A part of names in a checkpoint, and the part in its place in a target."""


@dataclasses.dataclass(frozen=True)
class RenamedPart(Hypothesis):
    """One part for another in all missing names; code only where one is an abbreviation of the other."""

    def remedies(self, unmatched: UnmatchedLeaves) -> Iterator[Remedy]:
        missing = {name: unmatched.unfilled_shapes[name] for name in model_leaves(unmatched.unfilled)}
        found = _renamings(unmatched.free_shapes, missing) if len(missing) >= _LEAST_ALIKE else []
        if len(found) != 1:
            return
        theirs, ours = found[0]
        reason = f"where the target's names have {ours!r}, the checkpoint's have {theirs!r}"
        advice = None
        if not _is_abbreviated(theirs, ours):
            advice = "if the two are the same module, map the names with a rule of AssignmentMap or Rename"
        for kind, old, new in ((AssignmentMap, ours, theirs), (Rename, theirs, ours)):
            rule = (f"(.*/|){re.escape(old)}(/.*|)", f"\\g<1>{as_template(new)}\\2")
            yield Remedy((kind((rule,)),), reason, advice)


def _renamings(free: Shapes, missing: Shapes) -> list[Parts]:
    """Returns the pairs of parts that give every missing name that of a free leaf of its shape."""

    def fits(name: str, renaming: Parts) -> bool:
        theirs, ours = renaming
        parts = name.split("/")
        return (
            parts.count(ours) == 1
            and free.get("/".join([theirs if part == ours else part for part in parts])) == missing[name]
        )

    first, *others = missing
    found = [pair for pair in _differences(free, first) if fits(first, pair)]
    for name in others:
        found = [pair for pair in found if fits(name, pair)]
    return found


def _differences(free: Shapes, name: str) -> Iterator[Parts]:
    """Yields the part in which a name differs from a free one, where that is one only and no number or slot."""
    parts = name.split("/")
    for other in free:
        theirs = other.split("/")
        if len(theirs) != len(parts):
            continue
        pairs = [pair for pair in zip(theirs, parts, strict=True) if pair[0] != pair[1]]
        if len(pairs) == 1 and SLOT_WORDS.isdisjoint(pairs[0]) and _numbers(pairs[0][0]) == _numbers(pairs[0][1]):
            yield pairs[0]


def _numbers(part: str) -> list[int]:
    return [int(word) for word in re.findall(r"\d+", part)]


def _is_abbreviated(one: str, other: str) -> bool:
    """Returns True if the words of two parts are equal, or each is the other with letters left out."""
    words = list(zip(_WORD.findall(one.lower()), _WORD.findall(other.lower()), strict=False))
    same_length = len(_WORD.findall(one)) == len(_WORD.findall(other)) == len(words)
    return same_length and all(_is_short_for(*sorted(pair, key=len)) for pair in words)


def _is_short_for(short: str, long: str) -> bool:
    letters = iter(long)
    return short == long or (
        len(short) >= _LEAST_LETTERS and short[0] == long[0] and all(letter in letters for letter in short)
    )
