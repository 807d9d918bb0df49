r"""Rules turned around: from `a/(\d+)/(.*)` and `b/\2/\1` to `b/(.*)/(\d+)` and `a/\2/\1`.

A rule is text and groups on both sides. It can be turned around if the pattern has nothing else, and the replacement
names each group: then each new name has one old name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from orbax_t5x.transforms.patterns.table import Pattern, compile_pattern

Tokens = tuple[str | int, ...]
"""One side of a rule: text, and the numbers of groups."""

# Characters that mean themselves outside groups.
_PLAIN = re.compile(r"[A-Za-z0-9_/\- ,:;=~@%&!<>\"'`]+")
_ESCAPED = re.compile(r"\\([^A-Za-z0-9])", re.DOTALL)
_GROUP_START = re.compile(r"\((?:\?P<\w+>|(?!\?))")
_REFERENCE = re.compile(r"\\(?:([1-9][0-9]?)|g<(\w+)>)")
_SPECIAL = re.compile(r"[\\.^$*+?{}\[\]|()]")


def escaped(text: str) -> str:
    """Escapes the characters of a text that mean something in a pattern."""
    return _SPECIAL.sub(lambda found: "\\" + found[0], text)


def literal(text: str) -> str:
    """Escapes the characters of a text that mean something in a replacement."""
    return text.replace("\\", "\\\\")


@dataclasses.dataclass(frozen=True)
class ParsedRule:
    """A pattern of text and groups.

    Attributes:
      regex: the pattern.
      tokens: its text and its groups, in order.
      groups: the pattern inside each group, by number.
    """

    regex: re.Pattern[str]
    tokens: Tokens
    groups: Mapping[int, str]

    def template(self, template: str) -> Tokens:
        """Splits a replacement into text and groups.

        Raises:
          ValueError: a group does not exist.
        """
        tokens: list[str | int] = []
        at = 0
        for found in _REFERENCE.finditer(template):
            key = found[1] or found[2]
            number = int(key) if key.isdecimal() else self.regex.groupindex.get(key, 0)
            if number not in self.groups:
                raise ValueError(f"{template!r} names group {key}, and {self.regex.pattern!r} has none")
            tokens += [template[at : found.start()], number]
            at = found.end()
        return (*tokens, template[at:])


def parse_rule(pattern: Pattern, owner: str) -> ParsedRule:
    """Splits a pattern into text and groups.

    Raises:
      ValueError: the pattern has other parts.
    """
    regex = compile_pattern(pattern, owner)
    text, at = regex.pattern, 0
    if regex.flags & ~re.UNICODE:
        raise ValueError(f"{owner}: {text!r} has flags")
    tokens: list[str | int] = []
    groups: dict[int, str] = {}
    while at < len(text):
        if found := _PLAIN.match(text, at):
            tokens.append(found[0])
            at = found.end()
        elif found := _ESCAPED.match(text, at):
            tokens.append(found[1])
            at = found.end()
        elif found := _GROUP_START.match(text, at):
            end = _group_end(text, found.end())
            inner = text[found.end() : end]
            if re.compile(inner).groups or text[end + 1 : end + 2] in ("*", "+", "?", "{"):
                raise ValueError(f"{owner}: {text!r} has groups inside groups, or repeats a group")
            groups[len(groups) + 1] = inner
            tokens.append(len(groups))
            at = end + 1
        else:
            raise ValueError(f"{owner}: {text!r} is more than text and groups, from {text[at:][:20]!r}")
    return ParsedRule(regex, tuple(tokens), groups)


def _group_end(text: str, at: int) -> int:
    """Finds the parenthesis that ends a group; the pattern is valid."""
    depth, in_class = 1, False
    while depth:
        character = text[at]
        if character == "\\":
            at += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
            at += len(re.match(r"\^?\]?", text[at + 1 :])[0])  # pyright: ignore[reportOptionalSubscript]
        else:
            depth += (character == "(") - (character == ")")
        at += 1
    return at - 1


def written_pattern(
    tokens: Sequence[str | int], groups: Mapping[int, str], names: Mapping[int, str] | None = None
) -> tuple[str, dict[int, int]]:
    """Writes tokens as a pattern, with numbers of groups."""
    pattern, numbers = "", dict[int, int]()
    for token in tokens:
        if isinstance(token, str):
            pattern += escaped(token)
        elif token in numbers:
            pattern += f"(?:\\{numbers[token]})"
        else:
            numbers[token] = len(numbers) + 1
            name = (names or {}).get(token)
            pattern += f"(?P<{name}>{groups[token]})" if name else f"({groups[token]})"
    return pattern, numbers


def written_template(tokens: Sequence[str | int], numbers: Mapping[int, int]) -> str:
    """Writes tokens as a replacement, with the groups' numbers.

    Raises:
      ValueError: a group has no number: the new names do not have its text.
    """
    parts: list[str] = []
    for index, token in enumerate(tokens):
        if isinstance(token, str):
            parts.append(literal(token))
        elif token not in numbers:
            raise ValueError(f"group {token} is not in the new names")
        else:
            after = tokens[index + 1] if index + 1 < len(tokens) else ""
            digit = isinstance(after, str) and after[:1].isdecimal()
            number = numbers[token]
            parts.append(f"\\g<{number}>" if digit or number > 9 else f"\\{number}")
    return "".join(parts)


def inverted_rule(pattern: Pattern, template: str, owner: str) -> tuple[str, str]:
    """Turns a pattern and its replacement around.

    Raises:
      ValueError: the pattern has other parts than text and groups, or the replacement leaves out a group.
    """
    rule = parse_rule(pattern, owner)
    new_pattern, numbers = written_pattern(rule.template(template), rule.groups)
    try:
        return new_pattern, written_template(rule.tokens, numbers)
    except ValueError as error:
        raise ValueError(f"{owner}: {rule.regex.pattern!r} -> {template!r} has no way back: {error}") from None
