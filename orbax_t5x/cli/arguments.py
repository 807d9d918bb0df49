"""Arguments that several commands read; a `UsageError` is exit code 2."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import stat
from collections.abc import Sequence
from typing import Any

from orbax_t5x.text.output import UsageError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?\s*", re.IGNORECASE)
# Rules and a model's configuration are far smaller.
_MOST_JSON_BYTES = 64 << 20
# More of a pattern than this is not shown.
_SHOWN_PATTERN = 200


def size_argument(text: str) -> int:
    """Parses a size, such as `268435456`, `256M` or `1.5G`."""
    match = _SIZE.fullmatch(text)
    count = 0 if match is None else int(float(match[1]) * _UNITS[match[2].upper()])
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write bytes, or a number with K, M, G or T: 256M")
    return count


def count_argument(text: str) -> int:
    """Parses a whole number from 1 on."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def tolerance_argument(text: str) -> float:
    """Parses a number from 0 on, such as `1e-6`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value >= 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is no tolerance; write a number from 0 on, such as 1e-6")
    return value


def resuming_argument(text: str | None) -> bool | None:
    """Converts `--resuming yes|no` to `is_resuming`."""
    return None if text is None else text == "yes"


def read_map(path: str) -> Any:
    """Reads the value of a `--map` file."""
    return _read_json(path, "--map")[1]


def checked_rules(path: str, rules: Sequence[Any]) -> tuple[tuple[str, str | None], ...]:
    """Checks rules, [pattern, replacement] each."""
    for number, rule in enumerate(rules):
        _check_rule(path, number, rule)
    return tuple((pattern, replacement) for pattern, replacement in rules)


def read_json_object(path: str, option: str) -> bytes:
    """Reads the bytes of a file with a JSON object."""
    data, value = _read_json(path, option)
    if not isinstance(value, dict):
        raise UsageError(f"{option} {path}: must be a JSON object, not {json_kind(value)}")
    return data


def _open_at_once(path: str, flags: int) -> int:
    """Opens a file without waiting for the other end of a FIFO."""
    return os.open(path, flags | os.O_NONBLOCK)


def _read_json(path: str, option: str) -> tuple[bytes, Any]:
    try:
        with open(os.path.expanduser(path), "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UsageError(f"{option} {path}: a FIFO, a device or a directory, not a file")
            data = file.read(_MOST_JSON_BYTES + 1)
        if len(data) > _MOST_JSON_BYTES:
            raise UsageError(f"{option} {path}: more than {_MOST_JSON_BYTES} bytes")
        return data, json.loads(data.decode("utf-8"))
    except RecursionError:
        raise UsageError(f"{option} {path}: the JSON is nested too deep") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"{option} {path}: not JSON: {error}") from error
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{option} {path}: {error.strerror if isinstance(error, OSError) else error}") from error
    except ValueError as error:  # a number of more digits than Python reads
        raise UsageError(f"{option} {path}: {error}") from error


def _check_rule(path: str, number: int, rule: Any) -> None:
    right = isinstance(rule, Sequence) and not isinstance(rule, str) and len(rule) == 2
    if not right or not isinstance(rule[0], str) or not isinstance(rule[1], str | None):
        wanted = '["pattern", "replacement" or null]'
        raise UsageError(f"--map {path}: rule {number} must be {wanted}, not {json.dumps(rule)}")
    try:
        re.compile(rule[0])
    except (re.error, OverflowError, RecursionError) as error:  # a count beyond what is counted, groups nested too deep
        shown = repr(rule[0]) if len(rule[0]) <= _SHOWN_PATTERN else f"{rule[0][:_SHOWN_PATTERN]!r}…"
        raise UsageError(f"--map {path}: rule {number}: {shown} is no regular expression: {error}") from error


def json_kind(value: Any) -> str:
    """Names the kind of a JSON value."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")
