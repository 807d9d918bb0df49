"""Cuts leaves into parts and joins parts into leaves."""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any

from orbax_t5x.errors import Fix
from orbax_t5x.lazy import View
from orbax_t5x.lazy.several import concatenate
from orbax_t5x.transforms.base import Given
from orbax_t5x.transforms.by_rules import ByRules, Matches, OnePattern
from orbax_t5x.transforms.diagnostics import Diagnostics, NewState, combine_leaves
from orbax_t5x.transforms.patterns.table import Pattern, new_name, pattern_text, pattern_tuple
from orbax_t5x.trees.flat import FlatState


@dataclasses.dataclass(frozen=True)
class Split(OnePattern):
    r"""Split of leaves into several along an axis.

    Attributes:
      pattern: a regex that must match a whole name.
      into: the new names in order; each may use the pattern's groups.
      axis: along which to cut.
      sizes: of the parts, in order; None for equal parts. They must add up to the axis.
      require_match: whether it is an error that no name matches.

    Example:
      >>> split = ot.transforms.Split("(.*)/qkv", [r"\1/q", r"\1/k", r"\1/v"], axis=0)
      >>> jax.tree.map(np.shape, split({"attention": {"qkv": np.ones((6, 4))}}, {}))
      {'attention': {'k': (2, 4), 'q': (2, 4), 'v': (2, 4)}}
    """

    pattern: Pattern
    into: Given[Iterable[str], tuple[str, ...]]
    axis: int
    sizes: Sequence[int] | None = None
    require_match: bool = True

    def __post_init__(self) -> None:
        into = tuple(self.into)
        if isinstance(self.into, str) or not into or not all(isinstance(item, str) for item in into):
            raise ValueError(f"Split: into is the names of the parts, not {self.into!r}")
        sizes = None if self.sizes is None else tuple(operator.index(size) for size in self.sizes)
        if sizes is not None and (len(sizes) != len(into) or min(sizes) < 0):
            raise ValueError(f"Split: {len(into)} names and sizes {sizes}")
        self._set(into=into, axis=operator.index(self.axis), sizes=sizes)

    def _make(self, match: re.Match[str], view: View, diagnostics: Diagnostics) -> Iterable[tuple[str, View]] | None:
        name = match.string
        axis = self._axis_of(view, self.axis, name, diagnostics)
        if axis is None:
            return None
        size, count = view.shape[axis], len(self.into)
        sizes = self.sizes if self.sizes is not None else (size // count,) * count
        if sum(sizes) != size:
            parts = f"{count} equal parts" if self.sizes is None else f"parts of {sizes}"
            message = f"{self._rule()}: axis {axis} of shape {view.shape} is not made of {parts}"
            diagnostics.problem("shape", name, message, Fix(f"give sizes= that add up to {size}"))
            return None
        made = []
        start = 0
        for template, part in zip(self.into, sizes, strict=True):
            new = new_name(match, template, self._rule(), diagnostics)
            if new is None:
                return None
            made.append((new, view[(slice(None),) * axis + (slice(start, start + part),)]))
            start += part
        return made


@dataclasses.dataclass(frozen=True)
class Concat(ByRules):
    r"""Concatenation of leaves along an axis, in the order of the patterns.

    Attributes:
      patterns: one regex per part, in order; each must match a whole name.
      into: the new name; it may use the groups of each pattern. Leaves that give the same new name are joined.
      axis: along which to join.
      require_match: whether it is an error that a pattern matches no name.

    Example:
      >>> join = ot.transforms.Concat(["(.*)/wi_0", "(.*)/wi_1"], r"\1/wi", axis=1)
      >>> join({"mlp": {"wi_0": np.ones((4, 8)), "wi_1": np.ones((4, 8))}}, {})["mlp"]["wi"].shape
      (4, 16)
    """

    patterns: Given[Pattern | Iterable[Pattern], tuple[Pattern, ...]]
    into: str
    axis: int
    require_match: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "patterns", pattern_tuple(self.patterns, "Concat"))
        object.__setattr__(self, "axis", operator.index(self.axis))
        if not isinstance(self.into, str):
            raise TypeError(f"Concat: into is a name, not {self.into!r}")

    def _patterns(self) -> tuple[Pattern, ...]:
        return self.patterns

    def _build(self, state: FlatState, matches: Matches, new: NewState, diagnostics: Diagnostics) -> None:
        groups: dict[str, dict[int, str]] = {}
        for name, value in state.items():
            if name not in matches:
                new.put(name, value, name)
                continue
            index, match = matches[name]
            joined = new_name(match, self.into, f"Concat {pattern_text(self.patterns[index])!r}", diagnostics)
            if joined is None:
                continue
            other = groups.setdefault(joined, {}).setdefault(index, name)
            if other != name:
                message = f"Concat: {other!r} and {name!r} are both part {index} of {joined!r}"
                fix = "distinguish them by a group of the pattern that `into` uses"
                diagnostics.problem("duplicate", joined, message, Fix(fix))
        for joined, parts in groups.items():
            value = self._join(joined, [(i, parts[i], state[parts[i]]) for i in sorted(parts)], diagnostics)
            if value is not None:
                new.put(joined, value, parts[min(parts)], f"Concat of {len(parts)} into {self.into!r}")

    def _join(self, joined: str, parts: Sequence[tuple[int, str, Any]], diagnostics: Diagnostics) -> View | None:
        """Joins leaves, or records a problem."""
        present = {index for index, _, _ in parts}
        lacking = [pattern_text(pattern) for index, pattern in enumerate(self.patterns) if index not in present]
        if lacking:
            message = f"Concat: nothing matches {lacking} for {joined!r}, which has {[name for _, name, _ in parts]}"
            diagnostics.problem("missing", joined, message, Fix("give it all its parts, or narrow the patterns"))
            return None
        leaves, join = [part[1:] for part in parts], functools.partial(concatenate, axis=self.axis)
        advice = "cast or reshape the inputs first"
        return combine_leaves(leaves, join, diagnostics, becomes=joined, rule="Concat", advice=advice)
