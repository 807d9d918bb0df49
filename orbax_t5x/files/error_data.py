"""Errors of checkpoints as plain data for other processes.

They are raised there with the same type and text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointIOError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    Fix,
    LeafMismatchError,
    LimitExceededError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)

# Errors that are raised with the same type on the other processes.
_KINDS = {
    kind.__name__: kind
    for kind in (
        CheckpointGoneError,
        CheckpointIOError,
        CheckpointNotFoundError,
        CorruptCheckpointError,
        LeafMismatchError,
        LimitExceededError,
        UnsafeCheckpointError,
        UnsupportedCheckpointError,
    )
}


def error_as_data(error: BaseException) -> list[Any] | None:
    """Encodes an error as JSON data, or None if it is local."""
    name = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS), None)
    if not isinstance(error, CheckpointError) or name is None:
        return None
    number = error.errno if isinstance(error, CheckpointIOError) else None
    fixes = [] if error.fix is None else [_fix_as_data(way) for way in error.fix.ways]
    return [name, error.message, error.path, error.leaf, number, fixes]


def error_from_data(data: Sequence[Any], suffix: str = "") -> CheckpointError:
    """Returns the error of `error_as_data`; the suffix follows its message."""
    name, message, where, leaf, number, fixes = data
    fix = Fix.any_of(*map(_fix_from_data, fixes)) if fixes else None
    if _KINDS[name] is CheckpointIOError:
        return CheckpointIOError(f"{message}{suffix}", path=where, leaf=leaf, fix=fix, errno=number)
    return _KINDS[name](f"{message}{suffix}", path=where, leaf=leaf, fix=fix)


def _fix_as_data(way: Fix) -> list[Any]:
    """Encodes a fix without alternatives as JSON data."""
    arguments = {name: [] if value is ... else [value] for name, value in way.arguments.items()}
    if way.transforms or not all(isinstance(value, str | bool) for given in arguments.values() for value in given):
        return [way.text, "program", {}]
    return [way.words or way.text, way.scope, arguments]


def _fix_from_data(data: Sequence[Any]) -> Fix:
    words, scope, arguments = data
    if not arguments:
        return Fix(words, scope=scope)
    return Fix.setting(words, **{name: value[0] if value else ... for name, value in arguments.items()})
