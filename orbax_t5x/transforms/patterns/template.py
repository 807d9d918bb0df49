"""Replacements with the groups of a match filled in.

Python 3.11 parses a replacement anew for every match, which is a twentieth of the time of planning a restore of many
leaves. So a replacement of plain text and groups is parsed once; any other is left to the regex engine.
"""

from __future__ import annotations

import functools
import re

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
