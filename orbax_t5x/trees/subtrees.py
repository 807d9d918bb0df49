"""Names of many as whole subtrees, and as patterns that match no other name."""

from __future__ import annotations

import collections
import re
from collections.abc import Collection, Iterable, Sequence

from orbax_t5x.trees.flat import parents

# In an escaped name, a number that ends a part, as a layer's does.
_NUMBER = re.compile(r"(?<![0-9])[0-9]+(?=/|\\\.|$)")


def whole_subtrees(names: Sequence[str], every: Iterable[str]) -> dict[str, int]:
    """Counts names of many by the whole subtrees `dec/**` that they are, or by themselves."""
    totals = collections.Counter(parent for name in every for parent in parents(name))
    counts = collections.Counter(parent for name in names for parent in parents(name))
    subtrees: dict[str, int] = {}
    for name in names:
        whole = next((parent for parent in parents(name) if counts[parent] == totals[parent] > 1), None)
        subtrees[name if whole is None else f"{whole}/**"] = 1 if whole is None else counts[whole]
    return subtrees


def exact_patterns(names: Sequence[str], every: Collection[str], *, subtrees: bool = True) -> list[str]:
    """Returns regexes that match exactly these names of many; one for all layers where that is possible."""
    found = whole_subtrees(names, every) if subtrees else names
    by_pattern: dict[str, list[str]] = {}
    for name in found:
        pattern = re.escape(name.removesuffix("**")) + (".*" if name.endswith("/**") else "")
        by_pattern.setdefault(_NUMBER.sub(r"\\d+", pattern), []).append(pattern)
    wanted = set(names)
    patterns: list[str] = []
    for general, literal in by_pattern.items():
        is_exact = len(literal) > 1 and wanted.issuperset(filter(re.compile(general).fullmatch, every))
        patterns += [general] if is_exact else literal
    return patterns
