"""Entry of the table of formats: name, recogniser and openers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from orbax_t5x.readers.checkpoint import Checkpoint
from orbax_t5x.readers.detect.probe import PathProbe
from orbax_t5x.storage.limits import Limits


class Opener(Protocol):
    """Function that opens a local path."""

    def __call__(self, path: str, /, *, limits: Limits) -> Checkpoint:
        """Opens it; raises a `CheckpointError` that names the file where it cannot be."""
        ...


class ItemOpener(Protocol):
    """Function that opens one item of a local path."""

    def __call__(self, path: str, /, *, limits: Limits, item: str) -> Checkpoint:
        """Opens the item; raises a `CheckpointError` that names the file where it cannot be."""
        ...


@dataclasses.dataclass(frozen=True)
class Format:
    """Entry of the table of formats.

    Attributes:
      name: the value of `Checkpoint.format` and of the argument `format` of `open_checkpoint`.
      sought: what the recogniser looks for, for errors.
      recognise: whether a file is of this format, or a directory is marked as this format's own, by a file that no
        other format's directory holds.
      open: opens the path.
      open_item: opens one item of it, where the format has items.
      recognise_unmarked: whether a directory without such a mark holds files of this format.
    """

    name: str
    sought: str
    recognise: Callable[[PathProbe], bool]
    open: Opener
    open_item: ItemOpener | None = None
    recognise_unmarked: Callable[[PathProbe], bool] = lambda probe: False
