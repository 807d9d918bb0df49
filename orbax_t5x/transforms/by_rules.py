"""Bases of transforms with patterns of whole names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from orbax_t5x.errors import Fix
from orbax_t5x.lazy import View
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.patterns.table import Pattern, compile_pattern, pattern_text, rule_table
from orbax_t5x.transforms.patterns.unused import note_unused
from orbax_t5x.transforms.state import NewState, view_of
from orbax_t5x.trees.flat import FlatState

Matches = Mapping[str, tuple[int, re.Match[str]]]
"""Name -> (index of the first rule that matches it, its match), for the names that a rule matches."""


class ByRules(Transform):
    """Base of transforms with rules in order of precedence."""

    require_match: bool

    def _patterns(self) -> tuple[Pattern, ...]:
        """Returns the patterns, in order of precedence."""
        raise NotImplementedError

    def _place(self, rule: int, match: re.Match[str], value: Any, new: NewState, diagnostics: Diagnostics) -> None:
        """Puts the results for a leaf into the new state."""
        raise NotImplementedError

    def _build(self, state: FlatState, matches: Matches, new: NewState, diagnostics: Diagnostics) -> None:
        for name, value in state.items():
            if name in matches:
                self._place(*matches[name], value, new, diagnostics)
            else:
                new.put(name, value, name)

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        table = rule_table(self._patterns())
        matches = {name: found for name in state if (found := table.first(name)) is not None}
        new = NewState(diagnostics)
        self._build(state, matches, new, diagnostics)
        used = {rule for rule, _ in matches.values()}
        note_unused(table, used, state, diagnostics, owner=type(self).__name__, required=self.require_match)
        return new.finish()


class OnePattern(ByRules):
    """Base of transforms of each leaf that matches a pattern."""

    pattern: Pattern

    def _set(self, **fields: Any) -> None:
        """Checks the pattern and sets fields of the frozen dataclass."""
        compile_pattern(self.pattern, type(self).__name__)
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _rule(self) -> str:
        """Returns the rule as plans and errors show it."""
        return f"{type(self).__name__} {pattern_text(self.pattern)!r}"

    def _patterns(self) -> tuple[Pattern, ...]:
        return (self.pattern,)

    def _axis_of(self, view: View, axis: int, name: str, diagnostics: Diagnostics) -> int | None:
        """Counts an axis from 0, or records a problem."""
        if -view.ndim <= axis < view.ndim:
            return axis % view.ndim
        diagnostics.problem("shape", name, f"{self._rule()}: there is no axis {axis} in shape {view.shape}")
        return None

    def _make(self, match: re.Match[str], view: View, diagnostics: Diagnostics) -> Iterable[tuple[str, View]] | None:
        """Returns new names and views, or None with a problem."""
        raise NotImplementedError

    def _place(self, rule: int, match: re.Match[str], value: Any, new: NewState, diagnostics: Diagnostics) -> None:
        name = match.string
        view = None if value is None else view_of(name, value, diagnostics)
        made = None if view is None else self._make(match, view, diagnostics)
        if made is None:
            new.put(name, value, name)
            return
        for new_name, result in made:
            new.put(new_name, result, name, self._rule())


class InPlace(OnePattern):
    """Base of transforms that compute each matching leaf and keep its name."""

    def _compute(self, view: View) -> View:
        """Returns the new leaf."""
        raise NotImplementedError

    def _make(self, match: re.Match[str], view: View, diagnostics: Diagnostics) -> Iterable[tuple[str, View]] | None:
        try:
            return [(match.string, self._compute(view))]
        except (ValueError, TypeError, IndexError) as error:
            message = f"{self._rule()}: {error}"
            diagnostics.problem("shape", match.string, message, Fix("leave the leaf out of the pattern"))
            return None
