"""The one leaf of a checkpoint that a missing leaf of the target can only mean.

A wrong rule that runs gives wrong weights, so names may differ in next to nothing: shape, dtype and all numbers are
equal, and of the words one is missing, additional or misspelt by one letter. The last part has the same words (`v` is
no `v_row`). A leaf that could mean two others, or two that could mean the same, get no answer.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

from orbax_t5x.restoring.target_leaf import TargetLeaf

# A run of capitals or small letters, one capital before small ones, or a number: `mlpBlock_03` is mlp, block, 03.
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
SLOT_WORDS = frozenset({"m", "v", "mu", "nu", "ema", "trace", "momentum", "grad", "acc"})
"""Optimizers keep a leaf like each parameter under a name with one of these more; it is another quantity."""
# Shorter words that differ in one letter are other words: `mu` and `nu`, `row` and `rot`.
_LEAST_MISSPELT = 4
# Leaves with equal shape, dtype, numbers and last part that are compared; a model with more has no telling names.
_MOST_COMPARED = 256

Words = tuple[str, ...]


class Named(NamedTuple):
    """A leaf by what may not differ.

    Attributes:
      name: '/'-joined.
      shape, dtype: of the array.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Hashable


class Similar:
    """Looks up leaves of a checkpoint by leaves of a target.

    Args:
      missing: leaves of the target that nothing fills.
      free: leaves of the state dict that no leaf of the target takes.
    """

    def __init__(self, missing: Iterable[Named], free: Iterable[Named]):
        self._missing = _by_key(missing)
        self._free = _by_key(free)

    def to(self, leaf: Named) -> str | None:
        """The name of the leaf that a missing one can only mean; None where that is not certain."""
        words = _words(leaf.name)
        key = _key(leaf, words)
        found = self._related(words, self._free.get(key, {}))
        if len(found) != 1:
            return None
        (name,) = found
        return name if self._related(found[name], self._missing.get(key, {})).keys() == {leaf.name} else None

    def _related(self, words: Words, others: Mapping[str, Words]) -> dict[str, Words]:
        if len(others) > _MOST_COMPARED:
            return {}
        return {name: other for name, other in others.items() if _nearly_equal(words, other)}


def named(leaves: Mapping[str, TargetLeaf] | Mapping[str, Any]) -> list[Named]:
    """Leaves that have a shape and a dtype."""
    return [
        Named(name, tuple(leaf.shape), str(leaf.dtype))
        for name, leaf in leaves.items()
        if getattr(leaf, "shape", None) is not None and getattr(leaf, "dtype", None) is not None
    ]


def _by_key(leaves: Iterable[Named]) -> dict[Hashable, dict[str, Words]]:
    found: dict[Hashable, dict[str, Words]] = {}
    for leaf in leaves:
        words = _words(leaf.name)
        found.setdefault(_key(leaf, words), {})[leaf.name] = words
    return found


def _words(name: str) -> Words:
    """The words of a name in small letters, numbers without leading zeros."""
    found = _WORD.findall(name)
    return tuple([str(int(word)) if word.isdecimal() else word.lower() for word in found])


def _key(leaf: Named, words: Words) -> Hashable:
    """What is equal in two leaves that may be one."""
    numbers = tuple([word for word in words if word.isdecimal()])
    return leaf.shape, leaf.dtype, numbers, _words(leaf.name.rpartition("/")[2])


def _nearly_equal(one: Words, other: Words) -> bool:
    if one == other:
        return True
    short, long = sorted((one, other), key=len)
    start = next((at for at, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    if len(long) - len(short) == 1:
        return short[start:] == long[start + 1 :] and long[start] not in SLOT_WORDS
    return len(long) == len(short) and short[start + 1 :] == long[start + 1 :] and _misspelt(short[start], long[start])


def _misspelt(one: str, other: str) -> bool:
    """Whether one letter is missing, additional or another, or two neighbours are swapped."""
    if one.isdecimal() or min(len(one), len(other)) < _LEAST_MISSPELT or abs(len(one) - len(other)) > 1:
        return False
    short, long = sorted((one, other), key=len)
    start = next((at for at, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    if len(long) > len(short):
        return short[start:] == long[start + 1 :]
    if short[start + 1 :] == long[start + 1 :]:
        return True
    return short[start : start + 2] == long[start : start + 2][::-1] and short[start + 2 :] == long[start + 2 :]
