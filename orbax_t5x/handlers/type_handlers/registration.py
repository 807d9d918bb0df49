"""`register_type_handlers`: lazy arrays in Orbax's own saves and restores.

What Orbax saves and restores it looks up in a table of type handlers: one of the process, or one that was given to a
handler. In such a table the handler for NumPy arrays is replaced by one that takes lazy arrays, too. An entry of their
own would bind what is saved to this package, because its name is recorded beside each array.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from types import TracebackType
from typing import Any, Self

import numpy as np
import orbax.checkpoint as ocp

from orbax_t5x.handlers.type_handlers.lazy_array import GlobalTypeHandlers
from orbax_t5x.handlers.type_handlers.numpy_or_lazy import LazySaveSettings, NumpyOrLazyHandler, is_numpy_or_lazy
from orbax_t5x.text.progress_bar import Progress

# Of all tables: they are changed seldom.
_lock = threading.Lock()


class TypeHandlerRegistration:
    """Table of type handlers that takes lazy arrays; made by `orbax_t5x.register_type_handlers`.

    `undo()`, or the end of a `with` block, makes the table what it was. Registrations of one table may be undone in any
    order: the newest one that is left decides, and with the last one the handler for NumPy arrays comes
    back that was there first. A handler that other code has registered since stays.

    Example:
      >>> with ot.register_type_handlers() as registration:
      ...     isinstance(registration, ot.TypeHandlerRegistration)
      True
    """

    def __init__(self, table: Any, handler: NumpyOrLazyHandler, saving: LazySaveSettings):
        """Initializes a registration; only `register_type_handlers` does."""
        self._table = table
        self._handler = handler
        self._saving = saving
        self._is_undone = False

    def undo(self) -> None:
        """Takes the registration back; a second call does nothing."""
        with _lock:
            if self._is_undone:
                return
            self._is_undone = True
            settings = self._handler.settings
            # Others may be equal to it.
            settings[:] = [saving for saving in settings if saving is not self._saving]
            if not settings and self._table.get(np.ndarray) is self._handler:
                self._table.add(np.ndarray, self._handler.below, override=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()


def register_type_handlers(
    registry: ocp.type_handlers.TypeHandlerRegistry | None = None,
    *,
    memory_limit_bytes: int | None = None,
    progress: Progress | None = None,
    active_processes: Collection[int] | None = None,
) -> TypeHandlerRegistration:
    """Makes Orbax take lazy arrays as leaves, in `ocp.args.PyTreeSave` and `PyTreeRestore`.

    Saved, a lazy array is read and written chunk by chunk, its chunks shared by all processes, and is on disk the NumPy
    array of its values: anyone restores it, without this package. A leaf is restored as a lazy array on request:
    `ocp.RestoreArgs(restore_type=orbax_t5x.LazyArray)`, and `dtype=` for another dtype.

    Only `LazyArray` leaves become different: NumPy arrays go to the handler that the table has for them now.
    `ocp.args.StandardSave` calls `np.asarray` on each leaf before any handler is called, and so reads it whole.

    Args:
      registry: the table of a handler (`ocp.PyTreeCheckpointHandler(type_handler_registry=registry)`), which must have
        a handler for NumPy arrays; None: that of the process, which handlers use that were given none.
      memory_limit_bytes: host memory for data in flight, in each save; 256 MiB by default.
      progress: called as `progress(done_bytes, total_bytes, leaf)` while lazy arrays are saved, from one thread at a
        time; "bar" shows a bar on a terminal.
      active_processes: the processes that save, if `ocp.options.MultiprocessingOptions` limits them: they divide the
        chunks among them. Type handlers do not get these options. A save with an unknown process is a ValueError.

    Returns:
      What undoes it, by `undo()` or at the end of a `with` block.

    Raises:
      TypeError: `registry` is no table of type handlers, or `active_processes` are no numbers.
      ValueError: it has no handler for NumPy arrays; a limit below one byte, an unknown `progress`, no process, or a
        number below 0.

    Example:
      >>> with ot.register_type_handlers(), ot.open_checkpoint(bundle) as checkpoint:
      ...     ocp.PyTreeCheckpointer().save(directory / "copy", checkpoint.tree())
      >>> ocp.PyTreeCheckpointer().restore(directory / "copy")["shared"]["embedding"].shape
      (128, 16)
    """
    table = _table(registry)
    saving = LazySaveSettings(memory_limit_bytes, progress, active_processes)
    saving.writer()  # raises for wrong settings
    with _lock:
        handler = table.get(np.ndarray)
        if not isinstance(handler, NumpyOrLazyHandler):
            handler = NumpyOrLazyHandler(handler)
            table.add(np.ndarray, handler, func=is_numpy_or_lazy, override=True)
        handler.settings.append(saving)
    return TypeHandlerRegistration(table, handler, saving)


def _table(registry: Any) -> Any:
    if registry is None:
        return GlobalTypeHandlers()
    if not all(hasattr(registry, name) for name in ("add", "get", "has")):
        raise TypeError(
            f"registry is a {type(registry).__name__}, not a table of type handlers: pass the one that the checkpoint "
            "handler was made with (type_handler_registry=), or nothing for that of the process"
        )
    if not registry.has(np.ndarray):
        raise ValueError(
            "the table has no handler for NumPy arrays; add one first: "
            "registry.add(np.ndarray, ocp.type_handlers.NumpyHandler())"
        )
    return registry
