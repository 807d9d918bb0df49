"""Output for a terminal or a pipe, whatever its encoding."""

from __future__ import annotations

import json
import sys
from typing import Any, cast

from orbax_t5x.text.wording import plain


class UsageError(Exception):
    """A command was called wrongly; the text has the right call."""


def print_text(text: str) -> None:
    """Prints text; signs that the output's encoding lacks are escaped."""
    try:
        print(text)
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding or "ascii"
        print(text.encode(encoding, "backslashreplace").decode(encoding))


def plain_lines(text: str) -> str:
    """Returns text in its lines, without control characters."""
    return "\n".join(plain(line) for line in text.splitlines())


def print_json(value: Any) -> None:
    """Prints a value as JSON; unknown objects become text."""
    print(json.dumps(value, indent=1, default=_json_value))


def print_report(report: Any, *, json: bool) -> None:
    """Prints a report as text or as JSON."""
    if json:
        print_json(report.to_json())
    else:
        print_text(str(report))


def _json_value(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, set | frozenset):
        return sorted(cast("set[Any]", value))
    return str(value)
