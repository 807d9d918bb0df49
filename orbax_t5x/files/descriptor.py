"""Open file descriptors that close themselves."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Self


class Descriptor:
    """Open file descriptor.

    It is closed by `close` or when nothing refers to it any more. Opening and closing are one call of the interpreter
    each, so that an exception of a signal handler finds the descriptor open and kept here, or not open.
    """

    __slots__ = ("_numbers",)

    def __init__(self, path: str | os.PathLike[str], flags: int, *, directory: int | None = None):
        """Opens a path as `os.open` does, with its errors."""
        self._numbers: list[int] = []
        self._numbers.extend(map(functools.partial(os.open, mode=0o666, dir_fd=directory), (path,), (flags,)))

    @property
    def number(self) -> int:
        """The number for calls of the operating system."""
        return self._numbers[0]

    def close(self, _close: Callable[[int], None] = os.close) -> None:
        """Closes the descriptor."""
        list(map(_close, map(self._numbers.pop, (-1,) * len(self._numbers))))

    def __del__(self) -> None:
        if hasattr(self, "_numbers"):
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
