"""`isinstance` for values of which nothing is known: to a type checker what they hold is `Any`, not unknown; and the
check of what a caller gives as True or False.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np


def is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    """Reports whether a value is a mapping."""
    return isinstance(value, Mapping)


def is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    """Reports whether a value is a list, a tuple or another sequence, and no text."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def is_list_or_tuple(value: object) -> TypeGuard[Sequence[Any]]:
    """Reports whether a value is a list or a tuple."""
    return isinstance(value, (list, tuple))


def is_tuple(value: object) -> TypeGuard[tuple[Any, ...]]:
    """Reports whether a value is a tuple."""
    return isinstance(value, tuple)


def check_flag(name: str, value: object) -> None:
    """Refuses what Python takes as True or False without being either: the text "no" would be true."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} is True or False, not {value!r}")
