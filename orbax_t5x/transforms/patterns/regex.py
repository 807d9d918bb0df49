"""What is plain to see in a regular expression and in a replacement, so that the regex engine has less to do.

Both parsers are cautious: what they do not understand they leave to the engine.
"""

from __future__ import annotations

import functools
import re

# One item of a pattern: a literal character, plain or escaped; an escape or a character that stands for others or
# for none; a class.
_ITEM = re.compile(
    r"\\(?P<escaped>[^A-Za-z0-9])|(?P<other>\\[dDwWsSbBAZ]|[.^$]|\[\^?\]?(?:\\.|[^\]\\])*\])|(?P<plain>[^\\()\[|*+?{])"
)
_QUANTIFIER = re.compile(r"(?P<some>\+)|[*?]|\{(?P<least>\d*)(?:,\d*)?\}")


def demanded_texts(regex: re.Pattern[str]) -> list[str]:
    """Texts that every name that the pattern matches holds, between slashes; empty where that is not plain to see.

    `a/.*` demands `/a/` of `/name/`. Only what stands outside groups and classes counts, and only where no flag and
    no alternative changes what it means.
    """
    if regex.flags != re.UNICODE:
        return []
    pattern, at = regex.pattern, 0
    texts, run = [], "/"
    while at < len(pattern):
        end = _group_end(pattern, at) if pattern[at] == "(" else None
        item = None if end is not None else _ITEM.match(pattern, at)
        if end is None and item is None:
            return []  # an alternative, or an escape that is not worth understanding
        literal = "" if item is None else item["escaped"] or item["plain"] or ""
        at = item.end() if item is not None else end or 0
        quantifier = _QUANTIFIER.match(pattern, at)
        once = quantifier is None or quantifier["some"] is not None or int(quantifier["least"] or 0) > 0
        run += literal if once else ""
        if quantifier is not None or not literal:
            texts.append(run)
            run = ""
            # A second one makes the first lazy or possessive.
            at = (
                at
                if quantifier is None
                else quantifier.end() + (pattern[quantifier.end() : quantifier.end() + 1] in ("?", "+"))
            )
    return [text for text in (*texts, f"{run}/") if text.strip("/")]


def _group_end(pattern: str, at: int) -> int | None:
    """Where the group that opens at `at` has ended; None for one that sets flags."""
    if re.match(r"\(\?[aiLmsux-]+\)", pattern[at:]):
        return None
    depth = 0
    while at < len(pattern):
        item = _ITEM.match(pattern, at)
        if item is not None:
            at = item.end()
            continue
        depth += {"(": 1, ")": -1}.get(pattern[at], 0)
        at += 2 if pattern[at] == "\\" else 1
        if not depth:
            return at
    return None


# Python 3.11 parses a replacement anew for every match; what only joins text and groups is parsed once here.
_TEMPLATE_PART = re.compile(
    r"(?P<text>[^\\]+)|\\(?P<digit>[1-9])(?![0-9])|\\g<(?P<group>[A-Za-z_]\w*|[0-9]{1,2})>", re.ASCII
)


@functools.lru_cache(maxsize=1 << 14)
def _template_parts(template: str) -> tuple[str | int | tuple[str], ...] | None:
    """Text, numbers of groups and (name,) of groups; None for a template that needs the regex engine."""
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
    """`match.expand(template)`, parsed once.

    Raises:
      ValueError: it names a group that the pattern does not have, or has a bad escape.
    """
    parts = _template_parts(template)
    try:
        if parts is not None:
            return "".join(
                part if isinstance(part, str) else match[part if isinstance(part, int) else part[0]] or ""
                for part in parts
            )
    except IndexError:
        pass  # the engine's own text says more
    try:
        return match.expand(template)
    except (re.error, IndexError) as error:
        raise ValueError(str(error)) from error
