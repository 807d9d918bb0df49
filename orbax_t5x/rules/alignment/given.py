"""Answers of a user about leaves that nothing else tells apart."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from orbax_t5x.rules.alignment.kinds import LeafKind, Sides

_NUMBER = "{}"


class GivenError(ValueError):
    """A wrong answer.

    Attributes:
      answers: pairs of names that are wrong, or contradict each other.
      reason: why, without the answers.
    """

    def __init__(self, answers: Sequence[tuple[str, str]], reason: str):
        self.answers, self.reason = tuple(answers), reason
        super().__init__(self.answers, reason)

    def __str__(self) -> str:
        pairs = ", ".join(f"{old!r}: {new!r}" for old, new in self.answers)
        return f"given={{{pairs}}}: {self.reason}"


def given_pairs(given: Mapping[str, str], sides: Sides) -> dict[LeafKind, LeafKind]:
    """Returns sources by targets that answers name, in all layers.

    Raises:
      GivenError: a name is unknown, a pair has not one shape, or answers contradict each other.
    """
    ours, theirs = ({name: kind for (name, _), kind in tree.kind_of.items()} for tree in (sides.source, sides.target))
    found: dict[LeafKind, tuple[LeafKind, str, str]] = {}
    for pattern, wanted in given.items():
        answer = ((pattern, wanted),)
        if pattern.count(_NUMBER) > 1 or wanted.count(_NUMBER) > 1 or (_NUMBER in wanted and _NUMBER not in pattern):
            raise GivenError(answer, "one {} stands for a layer's number, on both sides")
        names, places = _named(pattern, ours), _named(wanted, theirs)
        for text, those, side in ((pattern, names, "source"), (wanted, places, "target")):
            if not those:
                raise GivenError(answer, f"the {side} has no parameter {text!r}")
        numbers = names.keys() & places.keys() if None not in (*names, *places) else {None}
        if not numbers:
            raise GivenError(answer, "no layer has one number on both sides")
        for number in numbers:
            old = names.get(number) or next(iter(names.values()))
            new = places.get(number) or next(iter(places.values()))
            one, other = ours[old], theirs[new]
            if one.bag != other.bag or not sides.may_be_one(one, other):
                raise GivenError(answer, f"{old!r} has shape {one.shape}, {new!r} has {other.shape}")
            if found.setdefault(other, (one, old, new))[0] is not one:
                pairs = (found[other][1:], (old, new))
                raise GivenError(pairs, f"{new!r} has two leaves, as in other layers")
    for target, (source, old, new) in found.items():
        twice = [other for it, (its, _, other) in found.items() if its is source and it is not target]
        if twice:
            raise GivenError(((old, new), (old, twice[0])), f"{old!r} has two places")
    return {target: source for target, (source, _, _) in found.items()}


def _named(pattern: str, names: Mapping[str, LeafKind]) -> dict[str | None, str]:
    """Returns the names of a pattern by their layers' numbers."""
    if _NUMBER not in pattern:
        return {None: pattern} if pattern in names else {}
    regex = re.compile(re.escape(pattern).replace(re.escape(_NUMBER), r"(\d+)"))
    return {match[1]: name for name in names if (match := regex.fullmatch(name)) is not None}
