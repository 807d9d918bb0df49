"""Joins fixes that add transforms of one kind, so that each has those of all problems."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Collection, Hashable, Sequence
from typing import Any

from orbax_t5x.errors import Fix, Problem
from orbax_t5x.trees.subtrees import exact_patterns


def with_joined_fixes(problems: Sequence[Problem], names: Collection[str]) -> list[Problem]:
    """Returns problems whose ways of one kind add the transforms of all.

    Args:
      problems: in order.
      names: of all leaves that the transforms may meet; a pattern for several leaves matches none of the others.
    """
    leaves: dict[Hashable, dict[tuple[Any, ...], list[str]]] = collections.defaultdict(dict)
    for problem in problems:
        for way in problem.fix.ways if problem.fix else ():
            if way.transforms:
                leaves[_kind(way)].setdefault(way.transforms, []).append(problem.leaf or "")
    joined = {kind: _joined(transforms, names) for kind, transforms in leaves.items() if len(transforms) > 1}
    if not joined:
        return list(problems)
    return [_with_ways(problem, joined) for problem in problems]


def _kind(way: Fix) -> Hashable:
    """Returns what ways have in common that can be followed at once."""
    return tuple((type(transform), getattr(transform, "value", None)) for transform in way.transforms), way.words


def _with_ways(problem: Problem, joined: dict[Hashable, tuple[Any, ...]]) -> Problem:
    if problem.fix is None:
        return problem
    ways: list[Fix] = []
    for way in problem.fix.ways:
        transforms = joined.get(_kind(way)) if way.transforms else None
        if transforms is not None:
            added = Fix.adding(*transforms, to_others=way.to_others)
            way = added.also_setting(way.words, **way.arguments) if way.arguments else added
        ways.append(way)
    return dataclasses.replace(problem, fix=Fix.any_of(*ways))


def _joined(leaves_of: dict[tuple[Any, ...], list[str]], names: Collection[str]) -> tuple[Any, ...]:
    """Returns the transforms, with one for all leaves that need the same."""
    joined: list[Any] = []
    leaves_alike: dict[Any, list[str]] = {}
    for transforms, leaves in leaves_of.items():
        for transform in transforms:
            if getattr(transform, "pattern", None) == re.escape(leaves[0]):
                alike = dataclasses.replace(transform, pattern="")
                if alike not in leaves_alike:
                    joined.append(alike)
                leaves_alike.setdefault(alike, []).append(leaves[0])
            elif transform not in joined:
                joined.append(transform)
    return tuple(
        dataclasses.replace(transform, pattern=pattern) if pattern else transform
        for transform in joined
        for pattern in (
            exact_patterns(leaves_alike[transform], names, subtrees=False) if transform in leaves_alike else [""]
        )
    )
