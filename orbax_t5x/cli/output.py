"""Writing for a terminal or a pipe, whatever its encoding."""

from __future__ import annotations

import json
import sys
from typing import Any


def emit(text: str) -> None:
    """Prints text; what the output's encoding lacks is escaped."""
    try:
        print(text)
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding or "ascii"
        print(text.encode(encoding, "backslashreplace").decode(encoding))


def emit_json(value: Any) -> None:
    """Prints a value as JSON; what JSON does not know is written as text."""
    print(json.dumps(value, indent=1, default=_as_json))


def _as_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, set | frozenset):
        return sorted(value)
    return str(value)
