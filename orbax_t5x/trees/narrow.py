"""Type guards for untyped values, and a check of flags.

To a type checker their contents are `Any`, not unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np


def is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    """Reports whether a value is a mapping."""
    return isinstance(value, Mapping)


def is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    """Tests if a value is a sequence other than text."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def is_list_or_tuple(value: object) -> TypeGuard[Sequence[Any]]:
    """Reports whether a value is a list or a tuple."""
    return isinstance(value, (list, tuple))


def is_tuple(value: object) -> TypeGuard[tuple[Any, ...]]:
    """Reports whether a value is a tuple."""
    return isinstance(value, tuple)


def check_flag(name: str, value: object) -> None:
    """Checks that a value is True or False.

    Python takes all else for a truth value, too: the text "no" would be true.
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} is True or False, not {value!r}")
