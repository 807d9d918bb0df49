"""The table of type handlers that `TrainStateHandler` saves with.

Orbax's own table is unchanged: this one adds streamed leaves, sums what is written and cleans up after an interrupt,
and passes on everything else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from orbax_t5x.handlers.save.cleanup import removed_on_interrupt
from orbax_t5x.handlers.type_handlers.checksums import RunningSaves, SummedHandler, summed_types
from orbax_t5x.handlers.type_handlers.lazy_array import LazyArrayHandler, StreamedLeaf
from orbax_t5x.handlers.type_handlers.numpy_or_lazy import stock_handler


class _InterruptibleHandler:
    """Type handler that cleans up if interrupted in `serialize`.

    It removes what the save has written.
    """

    def __init__(self, handler: Any):
        self._handler = handler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        """See `ocp.type_handlers.TypeHandler`."""
        with removed_on_interrupt(infos[0].parent_dir):
            return await self._handler.serialize(values, infos, args)


class StreamingTypeTable:
    """Table of type handlers, with a handler above another table.

    It searches the table below anew each time.
    """

    def __init__(self, below: Any, saves: RunningSaves | None = None):
        """Initializes a table above another.

        `saves` takes the checksums of what is written, if given.
        """
        self._below = below
        self._saves = saves
        self._streamed = LazyArrayHandler()
        self._wrapped: dict[Any, _InterruptibleHandler] = {}
        self._found: dict[Any, Any] | None = None

    @contextlib.contextmanager
    def remembering(self) -> Iterator[None]:
        """Caches lookups meanwhile.

        Orbax makes several for each leaf of a save, while its caller waits. Otherwise handlers may be registered at any
        time.
        """
        self._found = {}
        try:
            yield
        finally:
            self._found = None

    def get(self, ty: Any) -> Any:
        """Returns the handler for a type or its recorded text."""
        found = self._found
        if found is None:
            return self._get(ty)
        if ty not in found:
            found[ty] = self._get(ty)
        return found[ty]

    def _get(self, ty: Any) -> Any:
        if ty is StreamedLeaf:
            return self._streamed
        # Lazy arrays come as streamed leaves: a registered handler for lazy arrays plays no role in this save.
        handler = stock_handler(self._below.get(ty))
        if type(handler) not in summed_types():
            return handler
        # The same one each time: Orbax hands over together what one handler writes.
        if handler not in self._wrapped:
            summed = handler if self._saves is None else SummedHandler(handler, self._saves)
            self._wrapped[handler] = _InterruptibleHandler(summed)
        return self._wrapped[handler]

    def has(self, ty: Any) -> bool:
        """Returns True if there is a handler for a type."""
        return ty is StreamedLeaf or self._below.has(ty)

    def add(self, *args: Any, **kwargs: Any) -> None:
        """Adds to the table below."""
        self._below.add(*args, **kwargs)
