"""Orbax v1 names used beyond its documented interface.

A handler must obey the options of the context that is active, and Orbax exports no function that returns it; a handler
that is registered for the whole process cannot be removed by a documented name; the manager inside a
`Checkpointer` knows the directories of its steps; and only the handler inside the one for trees takes metadata of a
checkpointable. `tests/handlers/v1/test_orbax_v1_names.py`
fails when one of these has moved. Fields of options are read by their documented
names, those that the lowest allowed version lacks with a default.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as v1
from orbax.checkpoint.experimental.v1._src.context.context import get_context
from orbax.checkpoint.experimental.v1._src.partial.saving import _PartialSavePyTree


def active_context() -> v1.Context:
    """Returns this thread's innermost context, or Orbax's default."""
    return get_context()


def global_entries() -> list[tuple[type[v1.CheckpointableHandler], str | None]]:
    """Returns Orbax's own list of global handlers, with names.

    It may be changed.
    """
    entries = v1.handlers.global_registry().get_all_entries()
    assert isinstance(entries, list)
    return entries


def manager_of(checkpointer: v1.training.Checkpointer) -> ocp.CheckpointManager:
    """Returns the manager of a `Checkpointer`.

    It lists steps and waits for saves.
    """
    return checkpointer._manager


def context_of(checkpointer: v1.training.Checkpointer) -> v1.Context:
    """Returns the context of a `Checkpointer`'s saves and loads."""
    return checkpointer._context


def is_partial(checkpointable: Any) -> bool:
    """Tests for a tree of `partial.save`."""
    return isinstance(checkpointable, _PartialSavePyTree)


def recorded_type() -> str:
    """Returns Orbax's recorded type of a tree by its own handler."""
    return f"{v1.handlers.PyTreeHandler.__module__}.{v1.handlers.PyTreeHandler.__qualname__}"


@contextlib.contextmanager
def recording(handler: v1.handlers.PyTreeHandler, custom_metadata: Mapping[str, Any] | None) -> Generator[None]:
    """Makes a handler's saves record the user's metadata.

    It is in the checkpointable's metadata file.
    """
    inner: Any = handler._handler_impl
    save = inner.async_save

    async def recorded(directory: Any, args: Any) -> Any:
        return await save(directory, args=dataclasses.replace(args, custom_metadata=custom_metadata))

    inner.async_save = recorded
    try:
        yield
    finally:
        del inner.async_save


def stored_dtype(context: v1.Context, path: tuple[Any, ...], value: Any) -> Any:
    """Returns the stored dtype of a leaf, or None for its own.

    By the options of a save's context.
    """
    saving = context.array.saving
    of_leaf = saving.scoped_storage_options_creator
    options = None if of_leaf is None else of_leaf(path, value)
    if options is not None and options.dtype is not None:
        return jax.numpy.dtype(options.dtype)
    dtype = None if saving.storage_options is None else saving.storage_options.dtype
    return None if dtype is None else jax.numpy.dtype(dtype)


def transfer_limit(context: v1.Context) -> int | None:
    """Returns the most bytes that a save moves together, or None.

    They move from devices; None: any number.
    """
    regulator = getattr(context.memory, "regulator_options", None)
    if regulator is not None:
        return regulator.regulator.current_limit_bytes
    return context.memory.transfer_concurrent_bytes


def goes_through_pinned_memory(context: v1.Context) -> bool:
    """Tests if a save uses pinned host memory.

    Orbax does on GPUs by default.
    """
    given = context.array.saving.enable_pinned_host_transfer
    return jax.default_backend() == "gpu" if given is None else given


def writes_directories(context: v1.Context) -> bool:
    """Tests if a save gives each array its own directory.

    Otherwise arrays are keys in an OCDBT database.
    """
    return not context.array.saving.use_ocdbt


def calls_handlers(context: v1.Context) -> bool:
    """Tests if Orbax loads by handlers, unlike safetensors files."""
    return v1.options.CheckpointLayout(context.checkpoint_layout) is not v1.options.CheckpointLayout.SAFETENSORS
