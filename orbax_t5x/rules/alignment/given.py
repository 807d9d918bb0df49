"""Answers of a user about leaves that nothing else tells apart."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from orbax_t5x.rules.alignment.evidence import counterparts
from orbax_t5x.rules.alignment.tree import NamedLeaf

_NUMBER = "{}"


def given_pairs(given: Mapping[str, str], ours: Sequence[NamedLeaf], theirs: Sequence[NamedLeaf]) -> dict[str, str]:
    """Returns what answers say of all layers, and of the other arrays of a module: sources by the names of targets.

    Raises:
      ValueError: a name is unknown, a pair has not one shape, or answers contradict each other.
    """
    sources, targets = ({item.names[0]: item for item in side} for side in (ours, theirs))
    found: dict[str, str] = {}
    for pattern, wanted in given.items():
        told = _told(pattern, wanted, sources)
        for old, new in told.items():
            if new not in targets:
                raise ValueError(f"given={{{pattern!r}: {wanted!r}}}: the target has no parameter {new!r}")
            if not _are_alike(sources[old].shape, targets[new].shape):
                raise ValueError(
                    f"given={{{pattern!r}: {wanted!r}}}: {old!r} has shape {sources[old].shape}, {new!r} has "
                    f"{targets[new].shape}"
                )
            if found.get(new, old) != old:
                raise ValueError(f"given= has two leaves for {new!r}: {found[new]!r} and {old!r}")
            found[new] = old
    for new, old in list(found.items()):
        for one, other in counterparts(old, new, ours, theirs):
            if found.get(other, one) != one:
                raise ValueError(f"given= has two leaves for {other!r}: {found[other]!r}, {one!r} as in other layers")
            if one not in found.values() and _are_alike(sources[one].shape, targets[other].shape):
                found[other] = one
    if len(set(found.values())) < len(found):
        twice = next(old for old in found.values() if list(found.values()).count(old) > 1)
        raise ValueError(f"given= has two places for {twice!r}")
    return found


def _told(pattern: str, wanted: str, sources: Mapping[str, Any]) -> dict[str, str]:
    """Returns the target's names by the source's, of one answer."""
    if pattern.count(_NUMBER) > 1 or wanted.count(_NUMBER) > pattern.count(_NUMBER):
        raise ValueError(f"given={{{pattern!r}: {wanted!r}}}: one {{}} stands for a layer's number, on both sides")
    regex = re.compile(re.escape(pattern).replace(re.escape(_NUMBER), r"(\d+)"))
    found = {old: match for old in sources if (match := regex.fullmatch(old)) is not None}
    if not found:
        raise ValueError(f"given={{{pattern!r}: {wanted!r}}}: the source has no parameter {pattern!r}")
    return {old: wanted.replace(_NUMBER, match[1]) if match.groups() else wanted for old, match in found.items()}


def _are_alike(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return one == other or (len(one) == 2 and one == other[::-1])
