"""Finds names that are close to a missing name.

Comparing text is slow (difflib needs milliseconds for a few dozen names), so only names that share most parts of
their path are compared.
"""

from __future__ import annotations

import difflib
import functools
import heapq
import re
from collections.abc import Iterable

from orbax_t5x import on_demand

# difflib compares this many at most; more have never changed the best three, and cost linearly.
_COMPARED = 32
# Names looked at for shared parts; beyond it only the first ones count.
_LOOKED_AT = 20_000
_CUTOFF = 0.5

may_be_moment = on_demand.function("orbax_t5x.optim.optimizer_names", "may_be_moment")
_PART = re.compile(r"[A-Za-z]+|\d+")


def _name_parts(name: str) -> frozenset[str]:
    return frozenset(_PART.findall(name))


class ClosestNames:
    """Look-up of close names among many."""

    def __init__(self, names: Iterable[str]):
        self._names = names

    @functools.cached_property
    def _candidates(self) -> list[tuple[str, frozenset[str]]]:
        return [(name, _name_parts(name)) for _, name in zip(range(_LOOKED_AT), self._names, strict=False)]

    @functools.cached_property
    def _of_models(self) -> list[tuple[str, frozenset[str]]]:
        return [candidate for candidate in self._candidates if not may_be_moment(candidate[0])]

    def to(self, name: str, count: int = 3) -> list[str]:
        """Returns the names closest to a name or pattern."""
        # A pattern's escapes and quantifiers are no part of a name; \d+ is some number.
        plain = re.sub(r"\\d[+*]?|\[0-9\][+*]?", "0", name)
        plain = re.sub(r"\\[a-zA-Z]|[\\^$|?*+(){}\[\]]|\.(?=\*)", "", plain)
        wanted = _name_parts(plain)
        candidates = self._candidates if may_be_moment(name) else self._of_models

        def rank(candidate: tuple[str, frozenset[str]]) -> tuple[int, int, int]:
            shared = len(wanted & candidate[1])
            return -shared, len(candidate[1]) - shared, abs(len(candidate[0]) - len(plain))

        likely = heapq.nsmallest(_COMPARED, candidates, key=rank)
        return difflib.get_close_matches(plain, [name for name, _ in likely], n=count, cutoff=_CUTOFF)
