"""Bases of transforms with patterns of whole names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from orbax_t5x.errors import Fix
from orbax_t5x.lazy import View
from orbax_t5x.transforms.base import Following
from orbax_t5x.transforms.diagnostics import Diagnostics, NewState, view_of
from orbax_t5x.transforms.patterns.closest import ClosestNames, may_be_moment
from orbax_t5x.transforms.patterns.table import Pattern, RuleTable, compile_pattern, pattern_text, rule_table
from orbax_t5x.trees.flat import FlatState

Matches = Mapping[str, tuple[int, re.Match[str]]]
"""Name -> (index of the first rule that matches it, its match), for the names that a rule matches."""


class ByRules(Following):
    """Base of transforms with a pattern, or rules in order of precedence."""

    pattern: Pattern
    require_match: bool

    def _set(self, **fields: Any) -> None:
        """Checks the pattern and sets fields of the frozen dataclass."""
        compile_pattern(self.pattern, type(self).__name__)
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _rule(self) -> str:
        """Returns the rule as plans and errors show it."""
        return f"{type(self).__name__} {pattern_text(self.pattern)!r}"

    def _patterns(self) -> tuple[Pattern, ...]:
        """Returns the patterns, in order of precedence."""
        return (self.pattern,)

    def _place(self, rule: int, match: re.Match[str], value: Any, new: NewState, diagnostics: Diagnostics) -> None:
        """Puts the results for a leaf into the new state."""
        raise NotImplementedError

    def _build(self, state: FlatState, matches: Matches, new: NewState, diagnostics: Diagnostics) -> None:
        for name, value in state.items():
            if name in matches:
                self._place(*matches[name], value, new, diagnostics)
            else:
                new.put(name, value, name)

    def matching(self, names: Iterable[str]) -> set[str]:
        """Returns the names that a pattern matches."""
        table = rule_table(self._patterns())
        return {name for name in names if table.first(name) is not None}

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        table = rule_table(self._patterns())
        matches = {name: found for name in state if (found := table.first(name)) is not None}
        new = NewState(diagnostics)
        self._build(state, matches, new, diagnostics)
        used = {rule for rule, _ in matches.values()}
        if diagnostics.slots and len(used) < len(table.patterns):
            used.update(match[0] for name in diagnostics.slots if (match := table.first(name)) is not None)
        note_unused(table, used, state, diagnostics, owner=type(self).__name__, required=self.require_match)
        return new.finish()


class OnePattern(ByRules):
    """Base of transforms of each leaf that matches a pattern."""

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


# A table of hundreds of forgotten rules is scanned for the cause of the first few only.
_EXPLAINED_RULES = 10
# End of the names of a saved NNX state.
_VALUE = "/value"
# Names shown where none is close.
_SHOWN_NAMES = 3


def note_unused(
    table: RuleTable,
    used: set[int],
    names: Iterable[str],
    diagnostics: Diagnostics,
    *,
    owner: str,
    required: bool,
    what: str = "the state dict",
) -> None:
    """Records unused rules as problems or warnings."""
    if len(used) == len(table.patterns) or (not required and not diagnostics.warns_of_unused):
        return
    names = list(names)
    closest = ClosestNames(names)
    first_of: dict[Pattern, int] = {}
    explained = 0
    for index, pattern in enumerate(table.patterns):
        text = pattern_text(pattern)
        if first_of.setdefault(pattern, index) < index:
            diagnostics.warnings.append(f"{owner}: pattern {text!r} is given twice; only the first counts")
            continue
        if index in used:
            continue
        explained += 1
        regex = table.regex(index) if explained <= _EXPLAINED_RULES else None
        seen = None if regex is None else next((name for name in names if regex.fullmatch(name)), None)
        first = None if seen is None else table.first(seen)
        if first is not None:
            deciding = pattern_text(table.patterns[first[0]])
            diagnostics.warnings.append(f"{owner}: pattern {text!r} is shadowed: {deciding!r} decides {seen!r}")
            continue
        message = f"{owner}: pattern {text!r} matches no name in {what}"
        if not required:
            diagnostics.warnings.append(message)
            continue
        near = closest.to(text) if regex is not None else []
        likely = sorted(names, key=may_be_moment)[:_SHOWN_NAMES]
        shown = f"; the names are such as {likely}" if names else "; there are none"
        message += f"; closest: {near}" if near else shown
        fix = Fix("correct or remove it (a pattern must match a whole name)")
        if regex is not None and any(name.endswith(_VALUE) and regex.fullmatch(name[: -len(_VALUE)]) for name in names):
            fix = Fix(
                f"the names end in {_VALUE!r}, as NNX saves them: write the pattern as {f'{text}(?:{_VALUE})?'!r}"
            )
        diagnostics.problem("unused_rule", None, message, fix)
