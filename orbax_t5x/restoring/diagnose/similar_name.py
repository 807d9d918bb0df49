"""Hypothesis: a missing leaf is stored under a name that can only mean the same leaf.

A wrong rule that runs gives wrong weights, so names may differ in next to nothing: shape, dtype and all numbers are
equal, and of the words one is missing, additional or misspelt by one letter. The last part has the same words (`v` is
no `v_row`). A leaf that could mean two others, or two that could mean the same, get no rule.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from orbax_t5x.errors import Fix, Problem
from orbax_t5x.restoring.diagnose.hypothesis import SLOT_WORDS, Explanation, Hypothesis, UnmatchedLeaves, as_template
from orbax_t5x.transforms import AssignmentMap

# A run of capitals or small letters, one capital before small ones, or a number: `mlpBlock_03` is mlp, block, 03.
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
# Shorter words that differ in one letter are other words: `mu` and `nu`, `row` and `rot`.
_LEAST_MISSPELT = 4
# Leaves with equal shape, dtype, numbers and last part that are compared; a model with more has no telling names.
_MOST_COMPARED = 256
# Missing leaves that are looked up.
_LOOKUPS = 20

Words = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class SimilarName(Hypothesis):
    """A rule for each of the first missing leaves that one free leaf alone can mean."""

    def explanations(self, unmatched: UnmatchedLeaves) -> Iterator[Explanation]:
        if not unmatched.takes_rules:
            return
        names = SimilarNames({name: one.leaf for name, one in unmatched.wanted.items()}, unmatched.free)
        for name in itertools.islice(unmatched.wanted, _LOOKUPS):
            same = names.to(name)
            if same is not None:
                fix = Fix.adding(AssignmentMap(((re.escape(name), as_template(same)),)))
                message = f"the checkpoint has no such leaf; {same!r} has its shape and dtype"
                yield Explanation(Problem("missing", name, message, fix), (name,))


class SimilarNames:
    """Look-up of leaves that no leaf of the target takes by leaves that nothing fills, with shape and dtype."""

    def __init__(self, missing: Mapping[str, Any], free: Mapping[str, Any]):
        self._leaves = missing
        self._missing = _by_key(missing)
        self._free = _by_key(free)

    def to(self, name: str) -> str | None:
        """Returns the name of the leaf that a missing one can only mean; None where that is not certain."""
        words = _words(name)
        key = _key(name, self._leaves[name], words)
        found = _related(words, self._free.get(key, {}))
        if len(found) != 1:
            return None
        (other,) = found
        return other if _related(found[other], self._missing.get(key, {})).keys() == {name} else None


def _related(words: Words, others: Mapping[str, Words]) -> dict[str, Words]:
    if len(others) > _MOST_COMPARED:
        return {}
    return {name: other for name, other in others.items() if _nearly_equal(words, other)}


def _by_key(leaves: Mapping[str, Any]) -> dict[Hashable, dict[str, Words]]:
    found: dict[Hashable, dict[str, Words]] = {}
    for name, leaf in leaves.items():
        words = _words(name)
        found.setdefault(_key(name, leaf, words), {})[name] = words
    return found


def _words(name: str) -> Words:
    """Returns the words of a name in small letters, numbers without leading zeros."""
    found = _WORD.findall(name)
    return tuple([str(int(word)) if word.isdecimal() else word.lower() for word in found])


def _key(name: str, leaf: Any, words: Words) -> Hashable:
    """Returns what is equal in two leaves that may be one."""
    numbers = tuple([word for word in words if word.isdecimal()])
    return tuple(leaf.shape), str(leaf.dtype), numbers, _words(name.rpartition("/")[2])


def _nearly_equal(one: Words, other: Words) -> bool:
    if one == other:
        return True
    short, long = sorted((one, other), key=len)
    start = _first_difference(short, long)
    if len(long) - len(short) == 1:
        # A single word, such as `kernel`, is the end of too many names.
        return len(short) > 1 and short[start:] == long[start + 1 :] and long[start] not in SLOT_WORDS
    return (
        len(long) == len(short) and short[start + 1 :] == long[start + 1 :] and _is_misspelt(short[start], long[start])
    )


def _is_misspelt(one: str, other: str) -> bool:
    """Returns True if one letter is missing, additional or another, or two neighbours are swapped."""
    if one.isdecimal() or min(len(one), len(other)) < _LEAST_MISSPELT or abs(len(one) - len(other)) > 1:
        return False
    short, long = sorted((one, other), key=len)
    start = _first_difference(short, long)
    if len(long) > len(short):
        return short[start:] == long[start + 1 :]
    if short[start + 1 :] == long[start + 1 :]:
        return True
    return short[start : start + 2] == long[start : start + 2][::-1] and short[start + 2 :] == long[start + 2 :]


def _first_difference(short: Words | str, long: Words | str) -> int:
    return next((at for at, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
