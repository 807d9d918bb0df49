"""Rules as tables: which of many patterns is the first to match a whole name, in time linear in the names.

A restore asks this for every leaf and every rule. Rules without special characters are looked up in a dict. Of the
others most are ruled out without the regex engine: a name that a pattern matches must hold the text that the pattern
demands literally. Where that text has a whole part of a path, rules are looked up by it; otherwise the text is looked
for, which is some twenty times as fast as failing to match. `first_slowly` is what the table must equal.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.patterns.closest import ClosestNames
from orbax_t5x.transforms.patterns.regex import demanded_texts, expand_match

Pattern = str | re.Pattern[str]
Rule = tuple[Pattern, str | None]
"""A pattern and the replacement of what it matches; None leaves that out."""

# Every other character may mean something in a pattern.
_LITERAL = re.compile(r"[A-Za-z0-9_/\- ]*")


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


def check_pattern(pattern: Pattern, owner: str) -> None:
    """As `compile_pattern`, without the cost for what cannot be wrong."""
    if not isinstance(pattern, str) or not _LITERAL.fullmatch(pattern):
        compile_pattern(pattern, owner)


def pattern_tuple(patterns: Pattern | Iterable[Pattern], owner: str) -> tuple[Pattern, ...]:
    """One pattern, or several, as a tuple of valid ones."""
    listed = (patterns,) if isinstance(patterns, (str, re.Pattern)) else tuple(patterns)
    for pattern in listed:
        check_pattern(pattern, owner)
    return listed


def rule_tuple(rules: Iterable[Sequence[Any]], owner: str) -> tuple[Rule, ...]:
    """Pairs as rules, each valid."""
    checked: list[Rule] = []
    for rule in rules:
        if isinstance(rule, (str, re.Pattern)) or len(rule) != 2:
            raise ValueError(f"{owner}: a rule is a pair (pattern, replacement), not {rule!r}")
        pattern, replacement = rule
        check_pattern(pattern, owner)
        if replacement is not None and not isinstance(replacement, str):
            raise TypeError(
                f"{owner}: the replacement of {pattern_text(pattern)!r} is text or None, not {replacement!r}"
            )
        checked.append((pattern, replacement))
    return tuple(checked)


def rule_text(owner: str, rule: Rule) -> str:
    """A rule as plans and errors show it."""
    return f"{owner} {pattern_text(rule[0])!r} -> {rule[1]!r}"


class RuleTable:
    """Patterns in order of precedence; the first that matches a whole name decides."""

    def __init__(self, patterns: Sequence[Pattern]):
        self.patterns = tuple(patterns)
        self._literals: dict[str, int] = {}
        demanded: dict[int, list[str]] = {}
        for index, pattern in enumerate(patterns):
            if isinstance(pattern, str) and _LITERAL.fullmatch(pattern):
                self._literals.setdefault(pattern, index)
            else:
                demanded[index] = demanded_texts(self.regex(index))
        # The part, or text, that the fewest patterns demand rules out the most.
        parts = {index: {part for text in texts for part in text.split("/")[1:-1]} for index, texts in demanded.items()}
        common = collections.Counter(part for found in (*parts.values(), *demanded.values()) for part in found)
        self._by_part: dict[str, list[int]] = {}
        self._by_text: list[tuple[str, int]] = []
        for index, texts in demanded.items():
            if parts[index]:
                self._by_part.setdefault(min(parts[index], key=lambda part: (common[part], part)), []).append(index)
            else:
                text = min(texts, key=lambda text: (common[text], -len(text)), default="")
                self._by_text.append((text, index))

    def regex(self, index: int) -> re.Pattern[str]:
        """The compiled pattern."""
        return _compiled(self.patterns[index])

    def first(self, name: str) -> tuple[int, re.Match[str] | None] | None:
        """The index of the first rule that matches the whole name, and its match; None for the match of a literal
        rule.
        """
        literal = self._literals.get(name)
        between = f"/{name}/"
        likely = [index for text, index in self._by_text if text in between]
        if self._by_part:
            for part in set(name.split("/")):
                likely += self._by_part.get(part, ())
            likely.sort()
        for index in likely:
            if literal is not None and index > literal:
                break
            match = self.regex(index).fullmatch(name)
            if match is not None:
                return index, match
        return None if literal is None else (literal, None)

    def match(self, name: str) -> re.Match[str] | None:
        """The match of the first rule that matches the whole name."""
        found = self.first(name)
        return None if found is None else found[1] or self.regex(found[0]).fullmatch(name)

    def first_slowly(self, name: str) -> tuple[int, re.Match[str]] | None:
        """The same as `first`, by definition."""
        for index, pattern in enumerate(self.patterns):
            match = re.fullmatch(pattern, name)
            if match is not None:
                return index, match
        return None

    def expand(self, found: tuple[int, re.Match[str] | None], name: str, template: str) -> str:
        """A replacement with its groups filled in.

        Raises:
          ValueError: it names a group that the pattern does not have, or has a bad escape.
        """
        index, match = found
        if "\\" not in template:
            return template
        match = match or self.regex(index).fullmatch(name)
        assert match is not None
        return expand_match(match, template)


# Patterns repeat over transforms and plans; `re` itself remembers only some hundred.
_compiled = functools.lru_cache(maxsize=1 << 14)(re.compile)


@functools.lru_cache(maxsize=256)
def rule_table(patterns: tuple[Pattern, ...]) -> RuleTable:
    """The table of these patterns, built once."""
    return RuleTable(patterns)


def expand(match: re.Match[str], template: str, rule: str, diagnostics: Diagnostics) -> str | None:
    """A replacement with its groups filled in; None, and a problem, where it names a group that is not there."""
    try:
        return expand_match(match, template)
    except ValueError as error:
        note_bad_group(rule, error, match.string, diagnostics)
        return None


def note_bad_group(rule: str, error: Exception, name: str, diagnostics: Diagnostics) -> None:
    """Diagnostics a replacement that its pattern cannot fill in."""
    diagnostics.problem("rule", name, f"{rule}: {error}", "name only groups that the pattern has")


# A table of hundreds of forgotten rules is scanned for the cause of the first few only.
_EXPLAINED_RULES = 10


def note_unused(
    table: RuleTable,
    used: set[int],
    names: Iterable[str],
    owner: str,
    diagnostics: Diagnostics,
    *,
    required: bool,
    what: str,
) -> None:
    """Diagnostics rules that decided nothing: a problem where they matched nothing and had to, else a warning.

    A rule that matches names which earlier rules decide is shadowed: a warning. A pattern given twice counts once.
    """
    if len(used) == len(table.patterns) or (diagnostics.in_pack and not required):
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
        by = None if seen is None else table.first(seen)
        if by is not None:
            deciding = pattern_text(table.patterns[by[0]])
            diagnostics.warnings.append(f"{owner}: pattern {text!r} is shadowed: {deciding!r} decides {seen!r}")
            continue
        message = f"{owner}: pattern {text!r} matches no name in {what}"
        if not required:
            diagnostics.warnings.append(message)
            continue
        near = closest.to(text) if regex is not None else []
        message += f"; closest: {near}" if near else ""
        diagnostics.problem("unused_rule", None, message, "mend or remove it (a pattern must match a whole name)")
