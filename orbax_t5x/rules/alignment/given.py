"""Answers of a user about leaves that nothing else tells apart."""

from __future__ import annotations

import re
from collections.abc import Mapping

from orbax_t5x.rules.alignment.kinds import LeafKind, Sides

_NUMBER = "{}"


def given_pairs(given: Mapping[str, str], sides: Sides) -> dict[LeafKind, LeafKind]:
    """Returns sources by targets that answers name, in all layers.

    Raises:
      ValueError: a name is unknown, a pair has not one shape, or answers contradict each other.
    """
    ours, theirs = ({name: kind for (name, _), kind in tree.kind_of.items()} for tree in (sides.source, sides.target))
    found: dict[LeafKind, tuple[LeafKind, str, str]] = {}
    for pattern, wanted in given.items():
        about = f"given={{{pattern!r}: {wanted!r}}}"
        if pattern.count(_NUMBER) > 1 or wanted.count(_NUMBER) > 1 or (_NUMBER in wanted and _NUMBER not in pattern):
            raise ValueError(f"{about}: one {{}} stands for a layer's number, on both sides")
        names, places = _named(pattern, ours), _named(wanted, theirs)
        for text, those, side in ((pattern, names, "source"), (wanted, places, "target")):
            if not those:
                raise ValueError(f"{about}: the {side} has no parameter {text!r}")
        numbers = names.keys() & places.keys() if None not in (*names, *places) else {None}
        if not numbers:
            raise ValueError(f"{about}: no layer has one number on both sides")
        for number in numbers:
            old = names.get(number) or next(iter(names.values()))
            new = places.get(number) or next(iter(places.values()))
            one, other = ours[old], theirs[new]
            if one.bag != other.bag or not sides.may_be_one(one, other):
                raise ValueError(f"{about}: {old!r} has shape {one.shape}, {new!r} has {other.shape}")
            if found.setdefault(other, (one, old, new))[0] is not one:
                raise ValueError(
                    f"given= has two leaves for {new!r}: {found[other][1]!r} and {old!r}, as in other layers"
                )
    for target, (source, old, new) in found.items():
        twice = [new for it, (its, _, new) in found.items() if its is source and it is not target]
        if twice:
            raise ValueError(f"given= has two places for {old!r}: {new!r} and {twice[0]!r}")
    return {target: source for target, (source, _, _) in found.items()}


def _named(pattern: str, names: Mapping[str, LeafKind]) -> dict[str | None, str]:
    """Returns the names of a pattern by their layers' numbers."""
    if _NUMBER not in pattern:
        return {None: pattern} if pattern in names else {}
    regex = re.compile(re.escape(pattern).replace(re.escape(_NUMBER), r"(\d+)"))
    return {match[1]: name for name in names if (match := regex.fullmatch(name)) is not None}
