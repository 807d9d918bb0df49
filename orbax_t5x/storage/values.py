"""Interface of what holds values by key, each read with a bound on its bytes."""

from __future__ import annotations

from typing import Protocol


class Cancellable(Protocol):
    """A request that may be given up."""

    def cancel(self) -> None:
        """Gives it up."""
        ...


class Values(Protocol):
    """Values by key, of which ranges are read.

    Attributes:
      path: the URL that holds them, for errors.
    """

    path: str

    def read(
        self,
        key: str,
        start: int = 0,
        stop: int | None = None,
        *,
        most: int,
        leaf: str | None = None,
        begun: list[Cancellable] | None = None,
    ) -> bytes | None:
        """Reads bytes [start, stop) of a value, or all to its end; None where there is no such key.

        Args:
          key: of the value.
          start: below zero it counts from the end.
          stop: None for the end.
          most: the bytes that may be read.
          leaf: for errors.
          begun: gets each request, for a caller that may give it up.

        Raises:
          LimitExceededError: there are more bytes than `most`.
          CheckpointError: the server failed, or the value ends before `stop`.
        """
        ...
