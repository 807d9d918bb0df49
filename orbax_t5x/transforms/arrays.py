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

from orbax_t5x.lazy import View, repeat
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.patterns.table import (
    Pattern,
    compile_pattern,
    note_unused,
    pattern_text,
    rule_table,
)
from orbax_t5x.transforms.state import NewState, view_of


def as_dtype(dtype: Any) -> np.dtype:
    """A NumPy dtype from whatever names one, `ml_dtypes`' names included.

    Raises:
      TypeError: it names none.
    """
    if isinstance(dtype, str) and hasattr(ml_dtypes, dtype):
        return np.dtype(getattr(ml_dtypes, dtype))
    return np.dtype(dtype)


class OnePattern(Transform):
    """Maps each leaf whose name matches one pattern to views under new names, or to one under its own name."""

    pattern: Pattern
    require_match: bool

    def _set(self, **fields: Any) -> None:
        compile_pattern(self.pattern, type(self).__name__)
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _rule(self) -> str:
        return f"{type(self).__name__} {pattern_text(self.pattern)!r}"

    def _make(self, match: re.Match[str], view: View, diagnostics: Diagnostics) -> Iterable[tuple[str, View]] | None:
        """New names and views; None where a problem was noted."""
        raise NotImplementedError

    def apply(self, source: dict[str, Any], target: Mapping[str, Any], diagnostics: Diagnostics) -> dict[str, Any]:
        """See `Transform.apply`."""
        table = rule_table((self.pattern,))
        state = NewState(diagnostics)
        used: set[int] = set()
        for name, value in source.items():
            match = table.match(name)
            if match is None or value is None:
                state.put(name, value, name)
                continue
            used.add(0)
            view = view_of(name, value, diagnostics)
            made = None if view is None else self._make(match, view, diagnostics)
            if made is None:
                state.put(name, value, name)
                continue
            for new, result in made:
                state.put(new, result, name, self._rule())
        note_unused(
            table, used, source, type(self).__name__, diagnostics, required=self.require_match, what="the state dict"
        )
        return state.finish()

    def _in_place(
        self, match: re.Match[str], function: Callable[[], View], diagnostics: Diagnostics
    ) -> Iterable[tuple[str, View]] | None:
        """The leaf under its own name, computed; NumPy's complaint about shapes as a problem."""
        name = match.string
        try:
            return [(name, function())]
        except (ValueError, TypeError, IndexError) as error:
            diagnostics.problem("shape", name, f"{self._rule()}: {error}", "leave the leaf out of the pattern")
            return None


@dataclasses.dataclass(frozen=True)
class Reshape(OnePattern):
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

    def _make(self, match: re.Match[str], view: View, diagnostics: Diagnostics) -> Iterable[tuple[str, View]] | None:
        return self._in_place(match, lambda: view.reshape(self.shape), diagnostics)


@dataclasses.dataclass(frozen=True)
class Transpose(OnePattern):
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

    def _make(self, match: re.Match[str], view: View, diagnostics: Diagnostics) -> Iterable[tuple[str, View]] | None:
        return self._in_place(
            match, lambda: view.transpose(self.axes) if self.axes is not None else view.T, diagnostics
        )


@dataclasses.dataclass(frozen=True)
class Cast(OnePattern):
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

    def _make(self, match: re.Match[str], view: View, diagnostics: Diagnostics) -> Iterable[tuple[str, View]] | None:
        return self._in_place(match, lambda: view.astype(self.dtype), diagnostics)


@dataclasses.dataclass(frozen=True)
class Repeat(OnePattern):
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

    def _make(self, match: re.Match[str], view: View, diagnostics: Diagnostics) -> Iterable[tuple[str, View]] | None:
        return self._in_place(match, lambda: repeat(view, self.times, self.axis), diagnostics)
