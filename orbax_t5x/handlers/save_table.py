"""The table of type handlers that `TrainStateHandler` saves with.

Orbax's own table stays as it is: this one knows streamed leaves and sums what is written, and passes on everything
else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from orbax_t5x.handlers.checksums import RunningSaves, SummedHandler, summed_types
from orbax_t5x.handlers.numpy_or_lazy import stock_handler
from orbax_t5x.handlers.type_handlers import LazyArrayHandler, StreamedLeaf


class WithStreamedLeaves:
    """A table of type handlers with one more: what it does not know is looked up in the table below, each time anew."""

    def __init__(self, below: Any, saves: RunningSaves | None = None):
        """Args: the table below; `saves`: where checksums of what is written go, or None."""
        self._below = below
        self._saves = saves
        self._streamed = LazyArrayHandler()
        self._summed: dict[Any, SummedHandler] = {}
        self._found: dict[Any, Any] | None = None

    @contextlib.contextmanager
    def remembering(self) -> Iterator[None]:
        """Looks each type up once meanwhile; Orbax asks several times for each leaf of a save, while its caller waits.

        Otherwise handlers may be registered at any time.
        """
        self._found = {}
        try:
            yield
        finally:
            self._found = None

    def get(self, ty: Any) -> Any:
        """The handler for a type, or for the text that stands for one on disk."""
        found = self._found
        if found is None:
            return self._get(ty)
        if ty not in found:
            found[ty] = self._get(ty)
        return found[ty]

    def _get(self, ty: Any) -> Any:
        if ty is StreamedLeaf:
            return self._streamed
        # Lazy arrays come as streamed leaves: who registered a handler for them has no part in this save.
        handler = stock_handler(self._below.get(ty))
        if type(handler) not in summed_types():
            return handler
        # The same one each time: Orbax hands over together what one handler writes.
        return self._summed.setdefault(handler, SummedHandler(handler, self._saves))

    def has(self, ty: Any) -> bool:
        """Whether there is a handler."""
        return ty is StreamedLeaf or self._below.has(ty)

    def add(self, *args: Any, **kwargs: Any) -> None:
        """Adds to the table below."""
        self._below.add(*args, **kwargs)
