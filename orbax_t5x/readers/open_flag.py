"""Flag that all leaves of a checkpoint share: open or closed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from orbax_t5x.errors import for_caller


class OpenFlag:
    """State of a checkpoint, open or closed.

    Its leaves share it, so that closing reaches them all.
    """

    __slots__ = ("closed",)

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        """Makes every later read a ValueError."""
        self.closed: bool = True

    def check(self, path: str, leaf: str) -> None:
        """Raises ValueError after `close`."""
        if self.closed:
            raise for_caller(ValueError(f"{path}: leaf {leaf!r}: the checkpoint is closed"))


def close_all(closers: Iterable[Callable[[], None]]) -> None:
    """Calls the actions that close parts of a checkpoint."""
    for close in closers:
        close()
