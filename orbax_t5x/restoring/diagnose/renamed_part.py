"""Hypothesis: a part of the names is another word on either side: `decoder` and `dec`, `layers_i` and `block_i`."""

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
# Words for one of several layers, of which a model has one kind.
_LAYER_WORDS = frozenset({"layer", "layers", "block", "blocks", "h"})
# In place of a number that is the same on both sides.
_NUMBER = "#"

Parts = tuple[str, str]
"""A part of names in a checkpoint, and the part in its place in a target, with `#` for a number that both have."""


@dataclasses.dataclass(frozen=True)
class RenamedPart(Hypothesis):
    """One part for another in all missing names; code only where one is an abbreviation of the other."""

    def remedies(self, unmatched: UnmatchedLeaves) -> Iterator[Remedy]:
        if not unmatched.missing:  # a rule of the caller is known to be wrong
            return
        missing = {name: unmatched.unfilled_shapes[name] for name in model_leaves(unmatched.unfilled)}
        found = _renamings(unmatched.free_shapes, missing) if len(missing) >= _LEAST_ALIKE else []
        if len(found) != 1:
            return
        theirs, ours = found[0]
        shown = [part.replace(_NUMBER, "i") for part in (ours, theirs)]
        reason = f"where the target's names have {shown[0]!r}, the checkpoint's have {shown[1]!r}"
        advice = None
        if not _is_abbreviated(theirs, ours):
            advice = "if the two are the same module, map the names with a rule of AssignmentMap or Rename"
        for kind, old, new in ((Rename, theirs, ours), (AssignmentMap, ours, theirs)):
            yield Remedy((kind((_rule(old, new),)),), reason, advice)


def _renamings(free: Shapes, missing: Shapes) -> list[Parts]:
    """Returns the pairs of parts that give every missing name that of a free leaf of its shape."""

    def fits(name: str, renaming: Parts) -> bool:
        theirs, ours = renaming
        parts = name.split("/")
        pattern = re.compile(re.escape(ours).replace(re.escape(_NUMBER), r"(\d+)"))
        found = [(at, match) for at, part in enumerate(parts) if (match := pattern.fullmatch(part)) is not None]
        if len(found) != 1:
            return False
        at, match = found[0]
        parts[at] = theirs.replace(_NUMBER, match[1]) if _NUMBER in ours else theirs
        return free.get("/".join(parts)) == missing[name]

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
        if len(pairs) == 1 and SLOT_WORDS.isdisjoint(pairs[0]) and _NUMBER not in "".join(pairs[0]):
            one, another = (_numbers(part) for part in pairs[0])
            if one == another and len(one) == 1:
                yield re.sub(r"\d+", _NUMBER, pairs[0][0]), re.sub(r"\d+", _NUMBER, pairs[0][1])
            elif one == another or not (one and another):
                yield pairs[0]


def _rule(old: str, new: str) -> tuple[str, str]:
    """Returns the rule for a part of a whole name."""
    pattern = re.escape(old).replace(re.escape(_NUMBER), r"(\d+)")
    if _NUMBER in old:
        return f"(.*/|){pattern}(/.*|)", f"\\g<1>{as_template(new).replace(_NUMBER, chr(92) + 'g<2>')}\\3"
    return f"(.*/|){pattern}(/.*|)", f"\\g<1>{as_template(new)}\\2"


def _numbers(part: str) -> list[int]:
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
