"""Cutting leaves into parts and joining parts into leaves along an axis; nothing is read."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any

from orbax_t5x.lazy import View, concatenate
from orbax_t5x.transforms.arrays import OnePattern
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.patterns.table import (
    Pattern,
    expand,
    note_bad_group,
    note_unused,
    pattern_text,
    pattern_tuple,
    rule_table,
)
from orbax_t5x.transforms.state import NewState, normal_axis, view_of


@dataclasses.dataclass(frozen=True)
class Split(OnePattern):
    """Cuts leaves into several along an axis.

    Attributes:
      pattern: a regex that must match a whole name.
      into: the new names in order; each may use the pattern's groups.
      axis: along which to cut.
      sizes: of the parts, in order; None for equal parts. They must add up to the axis.
      require_match: whether it is an error that no name matches.
    """

    pattern: Pattern
    into: tuple[str, ...]
    axis: int
    sizes: tuple[int, ...] | None = None
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
        axis = normal_axis(self.axis, view.ndim)
        if axis is None:
            diagnostics.problem("shape", name, f"{self._rule()}: there is no axis {self.axis} in shape {view.shape}")
            return None
        size, count = view.shape[axis], len(self.into)
        sizes = self.sizes if self.sizes is not None else (size // count,) * count
        if sum(sizes) != size:
            parts = f"{count} equal parts" if self.sizes is None else f"parts of {sizes}"
            diagnostics.problem(
                "shape",
                name,
                f"{self._rule()}: axis {axis} of shape {view.shape} is not made of {parts}",
                f"give sizes= that add up to {size}",
            )
            return None
        made = []
        start = 0
        for template, part in zip(self.into, sizes, strict=True):
            new = expand(match, template, self._rule(), diagnostics)
            if new is None:
                return None
            made.append((new, view[(slice(None),) * axis + (slice(start, start + part),)]))
            start += part
        return made


@dataclasses.dataclass(frozen=True)
class Concat(Transform):
    """Joins leaves along an axis, in the order of the patterns.

    Attributes:
      patterns: one regex per part, in order; each must match a whole name.
      into: the new name; it may use the groups of each pattern. Leaves that give the same new name are joined.
      axis: along which to join.
      require_match: whether it is an error that a pattern matches no name.
    """

    patterns: tuple[Pattern, ...]
    into: str
    axis: int
    require_match: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "patterns", pattern_tuple(self.patterns, "Concat"))
        object.__setattr__(self, "axis", operator.index(self.axis))
        if not isinstance(self.into, str):
            raise TypeError(f"Concat: into is a name, not {self.into!r}")

    def apply(self, source: dict[str, Any], target: Mapping[str, Any], diagnostics: Diagnostics) -> dict[str, Any]:
        """See `Transform.apply`."""
        table = rule_table(self.patterns)
        used: set[int] = set()
        state = NewState(diagnostics)
        groups: dict[str, dict[int, tuple[str, Any]]] = {}
        for name, value in source.items():
            found = table.first(name)
            if found is None:
                state.put(name, value, name)
                continue
            index = found[0]
            used.add(index)
            try:
                new = table.expand(found, name, self.into)
            except ValueError as error:
                note_bad_group(f"Concat {pattern_text(self.patterns[index])!r}", error, name, diagnostics)
                continue
            parts = groups.setdefault(new, {})
            if index in parts:
                message = f"Concat: {parts[index][0]!r} and {name!r} are both part {index} of {new!r}"
                diagnostics.problem(
                    "duplicate", new, message, "tell them apart by a group of the pattern that `into` uses"
                )
            else:
                parts[index] = (name, value)
        for new, parts in groups.items():
            joined = self._join(new, parts, diagnostics)
            if joined is not None:
                state.put(new, joined, parts[min(parts)][0], f"Concat of {len(parts)} into {self.into!r}")
        note_unused(table, used, source, "Concat", diagnostics, required=self.require_match, what="the state dict")
        return state.finish()

    def _join(self, new: str, parts: Mapping[int, tuple[str, Any]], diagnostics: Diagnostics) -> View | None:
        lacking = [pattern_text(pattern) for index, pattern in enumerate(self.patterns) if index not in parts]
        diagnostics.explained.add(new)
        if lacking:
            message = f"Concat: nothing matches {lacking} for {new!r}, which has {[parts[i][0] for i in sorted(parts)]}"
            diagnostics.problem("missing", new, message, "give it all its parts, or narrow the patterns")
            return None
        views = [view_of(*parts[index], diagnostics) for index in sorted(parts)]
        if any(view is None for view in views):
            return None
        try:
            joined = concatenate(views, self.axis)
        except ValueError as error:
            diagnostics.problem("shape", new, f"Concat: {error}", "cast or reshape the parts first")
            return None
        diagnostics.explained.discard(new)
        return joined
