"""Orbax names used beyond its documented interface.

Orbax has no public function for these, so any of them may move in a later version; `tests/handlers/test_orbax_names.py`
fails for the one that has. The room `type_handlers` uses the table of type handlers and `NumpyHandler`, which Orbax
exports and marks deprecated, and fields of `ParamInfo`; elsewhere Orbax is used through its documented names only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

# `CommitFutureAwaitingContractedSignals` starts a coroutine at once, in a thread, after Orbax has made the directories
# of the save: its promise about when is documented for handlers, its name and its place are not.
CommitFuture = CommitFutureAwaitingContractedSignals

TEMPORARY_MARK: str = ocp.path.atomicity_types.TMP_DIR_SUFFIX
"""Part of the name of each of Orbax's temporary directories. No other directories are ever removed."""


def write_spec(
    info: Any, shape: Sequence[int], chunk: Sequence[int], dtype: np.dtype, database: int | None = None
) -> dict[str, Any]:
    """Returns Orbax's spec to write an array in other chunks.

    It is TensorStore's. The layout is Orbax's own. According to Orbax's source this function will be replaced by one
    that no public module exports yet. `info` is Orbax's `ParamInfo`; `database` is the number of the database, by
    default this process's.
    """
    database = jax.process_index() if database is None else database
    return ocp.type_handlers.get_json_tspec_write(
        info,
        use_ocdbt=info.is_ocdbt_checkpoint,
        global_shape=tuple(shape),
        local_shape=tuple(chunk),
        dtype=dtype,
        process_index=database if info.is_ocdbt_checkpoint else None,
    )


def step_directory(manager: ocp.CheckpointManager, step: int) -> epath.Path:
    """Returns a step's directory by its manager's naming.

    A manager exposes its root and the numbers of its steps, but not the names that its options give to them.
    """
    return manager._get_read_step_directory(step, manager.directory)


def processes_of(manager: ocp.CheckpointManager) -> ocp.options.MultiprocessingOptions:
    """Returns a manager's options of processes, which it keeps private."""
    return manager._multiprocessing_options


def registry_of(manager: ocp.CheckpointManager) -> Any:
    """Returns the registry of a manager's handlers."""
    handler: Any = manager._checkpointer.handler
    return handler._handler_registry


def registry_making(handler: Any) -> Any:
    """Returns the registry that is calling a handler's class, or None.

    It makes a handler for each kind of arguments, and has no name for all of them.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_locals.get("self") is handler:
        frame = frame.f_back
    maker = frame.f_locals.get("self")
    return maker if isinstance(maker, ocp.handlers.DefaultCheckpointHandlerRegistry) else None


class RecordedType:
    """Descriptor of the type that Orbax records about an item.

    A restore without arguments finds a handler by it. Orbax calls a handler's `typestr()`. The class returns its own
    name, under which Orbax's table of handlers lists it; an instance returns the name of Orbax's handler, so that the
    item can be restored without this package.
    """

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return lambda: f"{owner.__module__}.{owner.__qualname__}"
        return ocp.PyTreeCheckpointHandler.typestr
