"""Names that are close to one that is missing, at a bounded cost.

Comparing text is slow (difflib needs milliseconds for a few dozen names), so only names that share most parts of
their path are compared.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

# difflib compares this many at most; more candidates have never changed the best three in practice, and cost linearly.
_COMPARED = 48
# Names looked at for shared parts; beyond it the first ones stand for all.
_LOOKED_AT = 20_000
_CUTOFF = 0.5

_PART = re.compile(r"[A-Za-z]+|\d+")


def _parts(name: str) -> frozenset[str]:
    return frozenset(_PART.findall(name))


def closest_names(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """The names most like `name`, best first; `name` may also be a pattern.

    Args:
      name: what is missing.
      candidates: the names there are.
      count: how many at most.
    """
    # A pattern's escapes and quantifiers are no part of a name; \d+ stands for some number.
    plain = re.sub(r"\\d[+*]?|\[0-9\][+*]?", "0", name)
    plain = re.sub(r"\\[a-zA-Z]|[\\^$|?*+(){}\[\]]|\.(?=\*)", "", plain)
    wanted = _parts(plain)
    ranked = []
    for index, candidate in enumerate(candidates):
        if index >= _LOOKED_AT:
            break
        has = _parts(candidate)
        shared = len(wanted & has)
        ranked.append((-shared, len(has) - shared, abs(len(candidate) - len(plain)), index, candidate))
    ranked.sort()
    return difflib.get_close_matches(plain, [entry[-1] for entry in ranked[:_COMPARED]], n=count, cutoff=_CUTOFF)
