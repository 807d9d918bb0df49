"""Transforms that compute leaves from leaves: cut, join, reshape, transpose, cast, repeat. All stay lazy views;
nothing is read.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from orbax_t5x.lazy import View, concatenate, repeat
from orbax_t5x.transforms._base import Notes, Transform
from orbax_t5x.transforms._patterns import (
    Pattern,
    compile_pattern,
    expand,
    note_bad_group,
    note_unused,
    pattern_text,
    pattern_tuple,
    rule_table,
)
from orbax_t5x.transforms._state import NewState, normal_axis, view_of


def as_dtype(dtype: Any) -> np.dtype:
    """A NumPy dtype from whatever names one, `ml_dtypes`' names included.

    Raises:
      TypeError: it names none.
    """
    if isinstance(dtype, str) and hasattr(ml_dtypes, dtype):
        return np.dtype(getattr(ml_dtypes, dtype))
    return np.dtype(dtype)


class _OnePattern(Transform):
    """Maps each leaf whose name matches one pattern to views under new names, or to one under its own name."""

    pattern: Pattern
    require_match: bool

    def _set(self, **fields: Any) -> None:
        compile_pattern(self.pattern, type(self).__name__)
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _rule(self) -> str:
        return f"{type(self).__name__} {pattern_text(self.pattern)!r}"

    def _make(self, match: re.Match[str], view: View, notes: Notes) -> Iterable[tuple[str, View]] | None:
        """New names and views; None where a problem was noted."""
        raise NotImplementedError

    def apply(self, source: dict[str, Any], target: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
        """See `Transform.apply`."""
        table = rule_table((self.pattern,))
        state = NewState(notes)
        used: set[int] = set()
        for name, value in source.items():
            match = table.match(name)
            if match is None or value is None:
                state.put(name, value, name)
                continue
            used.add(0)
            view = view_of(name, value, notes)
            made = None if view is None else self._make(match, view, notes)
            if made is None:
                state.put(name, value, name)
                continue
            for new, result in made:
                state.put(new, result, name, self._rule())
        note_unused(table, used, source, type(self).__name__, notes, required=self.require_match, what="the state dict")
        return state.finish()

    def _in_place(
        self, match: re.Match[str], function: Callable[[], View], notes: Notes
    ) -> Iterable[tuple[str, View]] | None:
        """The leaf under its own name, computed; NumPy's complaint about shapes as a problem."""
        name = match.string
        try:
            return [(name, function())]
        except (ValueError, TypeError, IndexError) as error:
            notes.problem("shape", name, f"{self._rule()}: {error}", "leave the leaf out of the pattern")
            return None


@dataclasses.dataclass(frozen=True)
class Reshape(_OnePattern):
    """Gives leaves another shape, in C order.

    Attributes:
      pattern: a regex that must match a whole name.
      shape: the new shape; one size may be -1 and is worked out.
      require_match: whether it is an error that no name matches.
    """

    pattern: Pattern
    shape: tuple[int, ...]
    require_match: bool = True

    def __post_init__(self) -> None:
        shape: Any = (self.shape,) if hasattr(self.shape, "__index__") else self.shape
        self._set(shape=tuple(operator.index(size) for size in shape))

    def _make(self, match: re.Match[str], view: View, notes: Notes) -> Iterable[tuple[str, View]] | None:
        return self._in_place(match, lambda: view.reshape(self.shape), notes)


@dataclasses.dataclass(frozen=True)
class Transpose(_OnePattern):
    """Reorders the dimensions of leaves.

    Attributes:
      pattern: a regex that must match a whole name.
      axes: the old axis for each new one, as NumPy takes them; None reverses them.
      require_match: whether it is an error that no name matches.
    """

    pattern: Pattern
    axes: tuple[int, ...] | None = None
    require_match: bool = True

    def __post_init__(self) -> None:
        self._set(axes=None if self.axes is None else tuple(operator.index(axis) for axis in self.axes))

    def _make(self, match: re.Match[str], view: View, notes: Notes) -> Iterable[tuple[str, View]] | None:
        return self._in_place(match, lambda: view.transpose(self.axes) if self.axes is not None else view.T, notes)


@dataclasses.dataclass(frozen=True)
class Cast(_OnePattern):
    """Gives leaves another dtype, as NumPy's `astype` does; values may be lost, since it was asked for.

    Attributes:
      pattern: a regex that must match a whole name.
      dtype: anything that names a NumPy dtype, `"bfloat16"` included.
      require_match: whether it is an error that no name matches.
    """

    pattern: Pattern
    dtype: np.dtype
    require_match: bool = True

    def __post_init__(self) -> None:
        self._set(dtype=as_dtype(self.dtype))

    def _make(self, match: re.Match[str], view: View, notes: Notes) -> Iterable[tuple[str, View]] | None:
        return self._in_place(match, lambda: view.astype(self.dtype), notes)


@dataclasses.dataclass(frozen=True)
class Repeat(_OnePattern):
    """Repeats leaves along a new axis: one dense layer for every expert, one bias for every layer. Each is read once.

    Attributes:
      pattern: a regex that must match a whole name.
      times: the size of the new axis.
      axis: where it stands in the result.
      require_match: whether it is an error that no name matches.
    """

    pattern: Pattern
    times: int
    axis: int
    require_match: bool = True

    def __post_init__(self) -> None:
        times = operator.index(self.times)
        if times < 0:
            raise ValueError(f"Repeat: times must not be negative, not {times}")
        self._set(times=times, axis=operator.index(self.axis))

    def _make(self, match: re.Match[str], view: View, notes: Notes) -> Iterable[tuple[str, View]] | None:
        return self._in_place(match, lambda: repeat(view, self.times, self.axis), notes)


@dataclasses.dataclass(frozen=True)
class Split(_OnePattern):
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

    def _make(self, match: re.Match[str], view: View, notes: Notes) -> Iterable[tuple[str, View]] | None:
        name = match.string
        axis = normal_axis(self.axis, view.ndim)
        if axis is None:
            notes.problem("shape", name, f"{self._rule()}: there is no axis {self.axis} in shape {view.shape}")
            return None
        size, count = view.shape[axis], len(self.into)
        sizes = self.sizes if self.sizes is not None else (size // count,) * count
        if sum(sizes) != size:
            parts = f"{count} equal parts" if self.sizes is None else f"parts of {sizes}"
            notes.problem(
                "shape",
                name,
                f"{self._rule()}: axis {axis} of shape {view.shape} is not made of {parts}",
                f"give sizes= that add up to {size}",
            )
            return None
        made = []
        start = 0
        for template, part in zip(self.into, sizes, strict=True):
            new = expand(match, template, self._rule(), notes)
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

    def apply(self, source: dict[str, Any], target: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
        """See `Transform.apply`."""
        table = rule_table(self.patterns)
        used: set[int] = set()
        state = NewState(notes)
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
                note_bad_group(f"Concat {pattern_text(self.patterns[index])!r}", error, name, notes)
                continue
            parts = groups.setdefault(new, {})
            if index in parts:
                message = f"Concat: {parts[index][0]!r} and {name!r} are both part {index} of {new!r}"
                notes.problem("duplicate", new, message, "tell them apart by a group of the pattern that `into` uses")
            else:
                parts[index] = (name, value)
        for new, parts in groups.items():
            joined = self._join(new, parts, notes)
            if joined is not None:
                state.put(new, joined, parts[min(parts)][0], f"Concat of {len(parts)} into {self.into!r}")
        note_unused(table, used, source, "Concat", notes, required=self.require_match, what="the state dict")
        return state.finish()

    def _join(self, new: str, parts: Mapping[int, tuple[str, Any]], notes: Notes) -> View | None:
        lacking = [pattern_text(pattern) for index, pattern in enumerate(self.patterns) if index not in parts]
        notes.explained.add(new)
        if lacking:
            message = f"Concat: nothing matches {lacking} for {new!r}, which has {[parts[i][0] for i in sorted(parts)]}"
            notes.problem("missing", new, message, "give it all its parts, or narrow the patterns")
            return None
        views = [view_of(*parts[index], notes) for index in sorted(parts)]
        if any(view is None for view in views):
            return None
        try:
            joined = concatenate(views, self.axis)
        except ValueError as error:
            notes.problem("shape", new, f"Concat: {error}", "cast or reshape the parts first")
            return None
        notes.explained.discard(new)
        return joined
