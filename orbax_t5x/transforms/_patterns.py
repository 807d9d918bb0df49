"""Rules as tables: which of many patterns is the first to match a whole name, in time linear in the names.

A restore asks this for every leaf and every rule. Rules without special characters are looked up in a dict; the
others are tried together, as one alternation that tells by a marker group which rule matched; rules that cannot
stand in an alternation (named groups, references to groups, flags of their own) are tried one by one.
`first_slowly` is what all this must equal.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence

from orbax_t5x.transforms._base import Notes
from orbax_t5x.transforms._closest import closest_names

Pattern = str | re.Pattern[str]

# Every other character may mean something in a pattern.
_LITERAL = re.compile(r"[A-Za-z0-9_/\- ]*")
# What would mean something else inside an alternation: references, conditions, names, atomic and possessive parts,
# inline flags.
_NOT_COMBINABLE = re.compile(r"\\[1-9]|\(\?[P(>]|\(\?[aiLmsux-]+[):]|[*+?}]\+")


def pattern_text(pattern: Pattern) -> str:
    """A pattern as its user wrote it."""
    return pattern if isinstance(pattern, str) else pattern.pattern


def compile_pattern(pattern: Pattern, owner: str) -> re.Pattern[str]:
    """A compiled pattern.

    Raises:
      ValueError: it is no regular expression; the text names `owner` and the pattern.
      TypeError: it is neither text nor a compiled pattern of text.
    """
    if not isinstance(pattern, (str, re.Pattern)) or not isinstance(pattern_text(pattern), str):
        raise TypeError(f"{owner}: a pattern is text or a compiled pattern of text, not {pattern!r}")
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{owner}: {pattern_text(pattern)!r} is no regular expression: {error}") from error


def pattern_tuple(patterns: Pattern | Iterable[Pattern], owner: str) -> tuple[Pattern, ...]:
    """One pattern, or several, as a tuple of valid ones."""
    listed = (patterns,) if isinstance(patterns, (str, re.Pattern)) else tuple(patterns)
    for pattern in listed:
        compile_pattern(pattern, owner)
    return listed


class RuleTable:
    """Patterns in order of precedence; the first that matches a whole name decides."""

    def __init__(self, patterns: Sequence[Pattern]):
        self.patterns = tuple(patterns)
        self.regexes = tuple(re.compile(pattern) for pattern in patterns)
        self._literals: dict[str, int] = {}
        self._alone: list[int] = []
        combined: list[int] = []
        for index, regex in enumerate(self.regexes):
            if regex.flags != re.UNICODE or _NOT_COMBINABLE.search(regex.pattern):
                self._alone.append(index)
            elif _LITERAL.fullmatch(regex.pattern):
                self._literals.setdefault(regex.pattern, index)
            else:
                combined.append(index)
        self._any, self._index_of_marker = self._combine(combined)

    def _combine(self, indices: list[int]) -> tuple[re.Pattern[str] | None, dict[int, int]]:
        markers: dict[int, int] = {}
        groups = 0
        for index in indices:
            groups += self.regexes[index].groups + 1
            markers[groups] = index
        if not indices:
            return None, markers
        return re.compile("|".join(f"(?:{self.regexes[index].pattern})()" for index in indices)), markers

    def first(self, name: str) -> tuple[int, re.Match[str]] | None:
        """The index of the first rule that matches the whole name, and its match."""
        best = self._literals.get(name, -1)
        if self._any is not None:
            found = self._any.fullmatch(name)
            if found is not None:
                assert found.lastindex is not None
                index = self._index_of_marker[found.lastindex]
                best = index if best < 0 else min(best, index)
        for index in self._alone:
            if 0 <= best < index:
                break
            match = self.regexes[index].fullmatch(name)
            if match is not None:
                return index, match
        if best < 0:
            return None
        match = self.regexes[best].fullmatch(name)
        assert match is not None
        return best, match

    def first_slowly(self, name: str) -> tuple[int, re.Match[str]] | None:
        """The same as `first`, by definition."""
        for index, regex in enumerate(self.regexes):
            match = regex.fullmatch(name)
            if match is not None:
                return index, match
        return None

    def indices_of(self, pattern: Pattern) -> list[int]:
        """Where a pattern stands in the table."""
        return [index for index, other in enumerate(self.patterns) if other == pattern]


@functools.lru_cache(maxsize=256)
def rule_table(patterns: tuple[Pattern, ...]) -> RuleTable:
    """The table of these patterns, built once."""
    return RuleTable(patterns)


def expand(match: re.Match[str], template: str, rule: str, notes: Notes, leaf: str | None) -> str | None:
    """A replacement with its groups filled in; None, and a problem, where it names a group that is not there."""
    try:
        return match.expand(template)
    except (re.error, IndexError) as error:
        notes.problem("rule", leaf, f"{rule}: {error}", "name only groups that the pattern has")
        return None


# A table of hundreds of forgotten rules is scanned for the cause of the first few only.
_EXPLAINED_RULES = 20


def note_unused(
    table: RuleTable, used: set[int], names: Sequence[str], owner: str, notes: Notes, *, required: bool, what: str
) -> None:
    """Notes rules that decided nothing: a problem where they matched nothing and had to, else a warning.

    A rule that matches names which earlier rules decide is shadowed: a warning. A pattern given twice counts once.
    """
    used_patterns = {table.patterns[index] for index in used}
    explained: set[Pattern] = set()
    for index, pattern in enumerate(table.patterns):
        text = pattern_text(pattern)
        if index in used or pattern in explained:
            continue
        if table.patterns.index(pattern) < index:
            notes.warnings.append(f"{owner}: pattern {text!r} is given twice; only the first counts")
        elif pattern not in used_patterns:
            explained.add(pattern)
            scan = len(explained) <= _EXPLAINED_RULES
            seen = next((name for name in names if table.regexes[index].fullmatch(name)), None) if scan else None
            if seen is not None:
                by = table.first(seen)
                earlier = "" if by is None else f": {pattern_text(table.patterns[by[0]])!r} decides {seen!r}"
                notes.warnings.append(f"{owner}: pattern {text!r} is shadowed{earlier}")
            elif required:
                near = closest_names(text, names) if scan else []
                notes.problem(
                    "unused_rule",
                    None,
                    f"{owner}: pattern {text!r} matches no name in {what}" + (f"; closest: {near}" if near else ""),
                    "a pattern must match a whole name; remove the rule or pass require_match=False",
                )
            else:
                notes.warnings.append(f"{owner}: pattern {text!r} matches no name in {what}")
