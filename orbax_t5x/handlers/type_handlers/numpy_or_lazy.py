"""Type handler for NumPy and lazy arrays.

It replaces the handler for NumPy arrays in a table of Orbax's. On disk a lazy array is the NumPy array of its values,
recorded as such: anyone restores it. It is read and written chunk by chunk in bounded memory, by each process its work
share of the chunks. All other leaves go to the replaced handler.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from orbax_t5x.errors import CheckpointNotFoundError, UnsupportedCheckpointError
from orbax_t5x.handlers.orbax_names import CommitFuture
from orbax_t5x.handlers.type_handlers.lazy_array import GlobalTypeHandlers, LazyArrayHandler, StreamedLeaf
from orbax_t5x.handlers.type_handlers.snapshot_leaf import snapshot_values, spans_processes
from orbax_t5x.handlers.type_handlers.stream import ChunkWriter
from orbax_t5x.handlers.type_handlers.unsupported import check_leaves
from orbax_t5x.lazy import LazyArray, View, as_view
from orbax_t5x.lazy.chunks import ChunkPreferences
from orbax_t5x.readers import Checkpoint, open_checkpoint
from orbax_t5x.text.progress_bar import Progress
from orbax_t5x.trees.pytree_names import leaf_name


@dataclasses.dataclass(frozen=True)
class LazySaveSettings:
    """Settings for writing lazy arrays, for each save.

    They are those of `register_type_handlers`.
    """

    memory_limit_bytes: int | None = None
    progress: Progress | None = None
    active_processes: Collection[int] | None = None

    def writer(self) -> ChunkWriter:
        """Returns the writer for a save."""
        return ChunkWriter(self.memory_limit_bytes, self.progress, processes=self.active_processes)


def is_numpy_or_lazy(leaf_type: Any) -> bool:
    """Returns True if `NumpyOrLazyHandler` handles leaves of a type."""
    return issubclass(leaf_type, np.ndarray | LazyArray)


class NumpyOrLazyHandler(ocp.type_handlers.TypeHandler):
    """Handler for NumPy arrays, and for lazy arrays in chunks.

    NumPy arrays go to the handler `below`. Several `settings` may be active; the last one is used.
    """

    def __init__(self, below: Any):
        self.below = below
        self.settings: list[LazySaveSettings] = []
        self._streamed = LazyArrayHandler()

    def typestr(self) -> str:
        """Returns the recorded type: that of NumPy arrays."""
        return self.below.typestr()

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        return await self.below.metadata(infos)

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[ocp.SaveArgs] | None = None
    ) -> Sequence[Any]:
        """Starts writing; see `ocp.type_handlers.TypeHandler`.

        Lazy arrays that Orbax cannot store are an `UnsupportedCheckpointError` of what it returns, and active processes
        that are not there a ValueError. Raised here, these could leave a manager that saves in the background waiting
        for the directories of the save.
        """
        args = args or [ocp.SaveArgs()] * len(values)
        try:
            ready = self._streamable(values, infos, args)
        except ValueError as error:
            return [CommitFuture(_fail(error), name="orbax_t5x_refused")]
        futures: list[Any] = []
        for handler, is_streamed in ((self._streamed, True), (self.below, False)):
            chosen = [at for at, value in enumerate(ready) if isinstance(value, StreamedLeaf) == is_streamed]
            if chosen:
                some: list[list[Any]] = [[items[at] for at in chosen] for items in (ready, infos, args)]
                futures.extend(await handler.serialize(*some))
        return futures

    def _streamable(self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[ocp.SaveArgs]) -> list[Any]:
        """Sorts leaves by the handler that takes them."""
        lazy = [
            (_name_of_info(info), value)
            for value, info in zip(values, infos, strict=True)
            if isinstance(value, LazyArray)
        ]
        check_leaves([name for name, _ in lazy], [value for _, value in lazy], GlobalTypeHandlers(), skip=None)
        writer = (self.settings[-1] if self.settings else LazySaveSettings()).writer()
        if lazy:
            writer.check_processes()
        return [
            _streamable(value, _name_of_info(info), arg, writer)
            for value, info, arg in zip(values, infos, args, strict=True)
        ]

    async def deserialize(self, infos: Sequence[Any], args: Sequence[ocp.RestoreArgs] | None = None) -> Sequence[Any]:
        """Reads arrays, or opens them as `LazyArray`.

        `restore_type` tells; the caller reads opened arrays.
        """
        args = args or [ocp.RestoreArgs()] * len(infos)
        is_lazy = [isinstance(arg.restore_type, type) and issubclass(arg.restore_type, LazyArray) for arg in args]
        stock = [at for at, lazy in enumerate(is_lazy) if not lazy]
        read = await self.below.deserialize([infos[at] for at in stock], [args[at] for at in stock]) if stock else ()
        found: dict[int, Any] = dict(zip(stock, read, strict=True))
        lazy = [at for at, lazy in enumerate(is_lazy) if lazy]
        if lazy:
            for at in lazy:
                await infos[at].await_path_creation()
            views = await asyncio.to_thread(_open_views, [infos[at] for at in lazy])
            for at, view in zip(lazy, views, strict=True):
                dtype = args[at].dtype
                found[at] = view if dtype is None else view.astype(dtype)
        return [found[at] for at in range(len(infos))]


async def _fail(error: ValueError) -> None:
    raise error


def stock_handler(handler: Any) -> Any:
    """Returns the stock handler below our handler.

    Any other handler is returned as it is.
    """
    return handler.below if isinstance(handler, NumpyOrLazyHandler) else handler


def _name_of_info(info: Any) -> str:
    """Returns the '/'-joined name of a leaf.

    Older versions of Orbax give a handler only the key.
    """
    keypath = getattr(info, "keypath", None)
    return info.name if keypath is None else leaf_name(keypath)


def _streamable(value: Any, name: str, arg: ocp.SaveArgs, writer: ChunkWriter) -> Any:
    """Converts a leaf for the streaming or the stock handler."""
    if not isinstance(value, LazyArray):
        return value
    view = as_view(value, name=name)
    if arg.dtype is not None:
        view = view.astype(arg.dtype)
    if spans_processes(view):
        raise UnsupportedCheckpointError("is made of an array that spans processes; save the jax.Array", leaf=name)
    if view.is_value and (view.leaf is not None or jax.process_count() > 1):
        # Arrays in memory may differ between processes, and then the primary one's counts.
        return view.get()
    snapshot_values(view, writer.snapshots)
    return StreamedLeaf(view, name, writer, ChunkPreferences(arg.chunk_byte_size, tuple(arg.shard_axes)))


def _open_views(infos: Sequence[Any]) -> list[View]:
    """Opens leaves by their stored keys."""
    opened: dict[str, Checkpoint] = {}
    views: list[View] = []
    for info in infos:
        directory = str(info.parent_dir)
        if directory not in opened:
            # Not closed here: a leaf can be read for as long as somebody has it.
            opened[directory] = open_checkpoint(directory, format="orbax")
        views.append(_view_of(opened[directory], info.name))
    return views


def _view_of(checkpoint: Checkpoint, key: str) -> View:
    wanted = key.replace("/", ".")
    for name, view in checkpoint.leaves.items():
        if name.replace("/", ".") == wanted:
            for leaf in view.leaves():
                leaf.raise_error()
            return view
    raise CheckpointNotFoundError(f"no array is stored under the key {key!r}", path=checkpoint.path)
