"""A table of rules with patterns of whole names.

A restore looks up every leaf. Patterns of plain text are looked up in a dict. A pattern with a part of plain text
between slashes (`target/(.*)`, `(enc|dec)/layers_0/.*`) is tried only for names that have that part: with 100 rules
that match late or never this takes a tenth of the time of trying all of them, or less (`benchmarks/run.py rules`).
Python 3.11 parses a replacement anew for every match, which is a twentieth of the time of planning a restore of many
leaves. So a replacement of plain text and groups is parsed once; any other is left to the regex engine.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from orbax_t5x.errors import Fix
from orbax_t5x.transforms.diagnostics import Diagnostics

_TEMPLATE_PART = re.compile(
    r"(?P<text>[^\\]+)|\\(?P<digit>[1-9])(?![0-9])|\\g<(?P<group>[A-Za-z_]\w*|[0-9]{1,2})>", re.ASCII
)


@functools.lru_cache(maxsize=1 << 14)
def _template_parts(template: str) -> tuple[str | int | tuple[str], ...] | None:
    """Splits a template into text and groups, or returns None."""
    parts: list[str | int | tuple[str]] = []
    at = 0
    while at < len(template):
        part = _TEMPLATE_PART.match(template, at)
        if part is None:
            return None
        at = part.end()
        group = part["digit"] or part["group"]
        parts.append(part["text"] if group is None else int(group) if group.isdecimal() else (group,))
    return tuple(parts)


def expand_match(match: re.Match[str], template: str) -> str:
    """Computes `match.expand` with the template parsed once."""
    parts = _template_parts(template)
    try:
        if parts is not None:
            return "".join(
                [
                    part if isinstance(part, str) else match[part if isinstance(part, int) else part[0]] or ""
                    for part in parts
                ]
            )
    except IndexError:
        pass  # the engine's own text has more detail
    try:
        return match.expand(template)
    except (re.error, IndexError) as error:
        raise ValueError(str(error)) from error


Pattern = str | re.Pattern[str]
Rule = tuple[Pattern, str | None]
"""A pattern and the replacement of what it matches; None leaves that out."""

# Every other character may mean something in a pattern.
_LITERAL = re.compile(r"[A-Za-z0-9_/\- ]*")


def pattern_text(pattern: Pattern) -> str:
    """Returns a pattern as its user wrote it."""
    return pattern if isinstance(pattern, str) else pattern.pattern


def compile_pattern(pattern: Pattern, owner: str) -> re.Pattern[str]:
    """Compiles a pattern; errors name `owner` and the pattern."""
    if not isinstance(pattern, (str, re.Pattern)) or not isinstance(pattern_text(pattern), str):
        raise TypeError(f"{owner}: a pattern is text or a compiled pattern of text, not {pattern!r}")
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{owner}: {pattern_text(pattern)!r} is no regular expression: {error}") from error


def check_pattern(pattern: Pattern, owner: str) -> None:
    """Checks a pattern as `compile_pattern` does, without the cost for plain text."""
    if not isinstance(pattern, str) or not _LITERAL.fullmatch(pattern):
        compile_pattern(pattern, owner)


def pattern_tuple(patterns: Pattern | Iterable[Pattern], owner: str) -> tuple[Pattern, ...]:
    """Returns patterns as a tuple, validated."""
    if not isinstance(patterns, (str, re.Pattern, Iterable)):
        raise TypeError(f"{owner}: give a list of patterns, not {patterns!r}")
    listed = (patterns,) if isinstance(patterns, (str, re.Pattern)) else tuple(patterns)
    for pattern in listed:
        check_pattern(pattern, owner)
    return listed


def rule_tuple(rules: Iterable[Sequence[Any]], owner: str) -> tuple[Rule, ...]:
    """Returns pairs as rules, each valid."""
    checked: list[Rule] = []
    for rule in rules:
        if isinstance(rule, (str, re.Pattern)) or len(rule) != 2:
            raise ValueError(
                f"{owner}: a rule is a pair (pattern, replacement), not {rule!r}; give a list of pairs, as in "
                f"{owner}([('old', 'new')])"
            )
        pattern, replacement = rule
        check_pattern(pattern, owner)
        if replacement is not None and not isinstance(replacement, str):
            raise TypeError(
                f"{owner}: the replacement of {pattern_text(pattern)!r} is text or None, not {replacement!r}"
            )
        checked.append((pattern, replacement))
    return tuple(checked)


def rule_text(owner: str, rule: Rule) -> str:
    """Formats a rule as plans and errors show it."""
    return f"{owner} {pattern_text(rule[0])!r} -> {rule[1]!r}"


class RuleTable:
    """Table of patterns in order of precedence."""

    def __init__(self, patterns: Sequence[Pattern]):
        self.patterns: tuple[Pattern, ...] = tuple(patterns)
        self._literals: dict[str, int] = {}
        parts: dict[int, set[str]] = {}
        for index, pattern in enumerate(patterns):
            if isinstance(pattern, str) and _LITERAL.fullmatch(pattern):
                self._literals.setdefault(pattern, index)
            else:
                parts[index] = plain_parts(pattern)
        # The part that the fewest patterns share rules out the most names.
        shared_by = collections.Counter(part for found in parts.values() for part in found)
        self._by_part: dict[str, list[int]] = {}
        self._always: list[int] = []
        for index, found in parts.items():
            if found:
                rarest = min(found, key=lambda part: (shared_by[part], part))
                self._by_part.setdefault(rarest, []).append(index)
            else:
                self._always.append(index)

    def regex(self, index: int) -> re.Pattern[str]:
        """Returns the compiled pattern."""
        return _compiled(self.patterns[index])

    def first(self, name: str) -> tuple[int, re.Match[str]] | None:
        """Returns the first matching rule and its match, or None."""
        literal = self._literals.get(name)
        likely = self._always
        if self._by_part:
            by_part = self._by_part
            for part in name.split("/"):
                if part in by_part:
                    likely = likely + by_part[part]
            if len(likely) > 1:
                likely = sorted(likely)
        for index in likely:
            if literal is not None and index > literal:
                break
            match = _compiled(self.patterns[index]).fullmatch(name)
            if match is not None:
                return index, match
        if literal is None:
            return None
        # Plain text has no groups, so this is its match, without compiling each literal rule.
        match = _ANYTHING.fullmatch(name)
        assert match is not None
        return literal, match


_ANYTHING = re.compile(".*", re.DOTALL)
# Syntax that matches other text than itself, in the order in which it is removed: escapes, classes, groups from the
# innermost. A group with '?' after '(' may be a lookaround or flags, except for the two plain kinds.
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_CLASS = re.compile(r"\[\^?\]?[^\]]*\]")
_GROUP = re.compile(r"\((?:\?:|\?P<\w+>|(?!\?))[^()]*\)")


def plain_parts(pattern: Pattern) -> set[str]:
    """Returns the parts that every matching name has."""
    if isinstance(pattern, re.Pattern) and pattern.flags != re.UNICODE:
        return set()
    text = _CLASS.sub("\0", _ESCAPE.sub("\0", pattern_text(pattern)))
    count = 1
    while count:
        text, count = _GROUP.subn("\0", text)
    if "(" in text or "|" in text:
        return set()
    parts = text.split("/")
    # A quantifier at the beginning of a part is for the slash before it, which may then be missing.
    joined = {number for number, part in enumerate(parts) if part[:1] in ("?", "*", "{")}
    return {
        part
        for number, part in enumerate(parts)
        if part and _LITERAL.fullmatch(part) and not {number, number + 1} & joined
    }


# Patterns repeat over transforms and plans; `re` itself remembers only some hundred.
_compiled = functools.lru_cache(maxsize=1 << 14)(re.compile)


@functools.lru_cache(maxsize=256)
def rule_table(patterns: tuple[Pattern, ...]) -> RuleTable:
    """Builds the table of these patterns, once."""
    return RuleTable(patterns)


def expand(match: re.Match[str], template: str, rule: str, diagnostics: Diagnostics) -> str | None:
    """Expands a replacement, or records a problem."""
    try:
        return expand_match(match, template)
    except ValueError as error:
        diagnostics.problem("rule", match.string, f"{rule}: {error}", Fix("name only groups that the pattern has"))
        return None


def new_name(match: re.Match[str], template: str, rule: str, diagnostics: Diagnostics) -> str | None:
    """Expands a new leaf's name, or records a problem."""
    name = expand(match, template, rule, diagnostics)
    return name if name is None or has_no_empty_part(name, match.string, rule, diagnostics) else None


def has_no_empty_part(name: str, old: str, rule: str, diagnostics: Diagnostics) -> bool:
    """Records a problem for new names with empty parts."""
    if all(name.split("/")) or not all(old.split("/")):
        return True
    # Without the old name: what one rule does to many leaves is one entry of the error's text.
    if name:
        message = f"{rule}: the new name would be {name!r}, which has an empty part"
        fix = "let the replacement give a name without empty parts"
    else:
        message, fix = f"{rule}: the new name would be empty", "to take leaves out, give None in place of ''"
    diagnostics.problem("rule", old, message, Fix(fix))
    return False
