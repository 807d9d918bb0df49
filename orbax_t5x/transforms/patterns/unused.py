"""Problems and warnings for rules that matched nothing or were shadowed."""

from __future__ import annotations

from collections.abc import Iterable

from orbax_t5x.errors import Fix
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.patterns.closest import ClosestNames, may_be_moment
from orbax_t5x.transforms.patterns.table import Pattern, RuleTable, pattern_text

# A table of hundreds of forgotten rules is scanned for the cause of the first few only.
_EXPLAINED_RULES = 10
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
        shown = (
            f"; the names are such as {sorted(names, key=may_be_moment)[:_SHOWN_NAMES]}"
            if names
            else "; there are none"
        )
        message += f"; closest: {near}" if near else shown
        diagnostics.problem(
            "unused_rule", None, message, Fix("correct or remove it (a pattern must match a whole name)")
        )
