"""Type handler that writes a lazy array chunk by chunk.

It is stored as the NumPy array of its values, which anyone restores. The layout of what is written is Orbax's own, from
its function for it; only the shape of the chunks is chosen here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orbax.checkpoint as ocp
import tensorstore as ts

from orbax_t5x.handlers.orbax_names import CommitFuture, write_spec
from orbax_t5x.handlers.type_handlers.stream import ChunkWriter, TensorStoreArray, WriteJob
from orbax_t5x.lazy import View
from orbax_t5x.lazy.chunks import ChunkPreferences


class StreamedLeaf:
    """A view in a tree to save, and the save's writer."""

    __slots__ = ("chunks", "name", "view", "writer")

    def __init__(self, view: View, name: str, writer: ChunkWriter, chunks: ChunkPreferences):
        self.view: View = view
        self.name: str = name
        self.writer: ChunkWriter = writer
        self.chunks: ChunkPreferences = chunks

    @property
    def nbytes(self) -> int:
        """Number of bytes, for Orbax's metrics."""
        return self.view.nbytes


class LazyArrayHandler(ocp.type_handlers.TypeHandler):
    """Writes streamed leaves. Reading is `NumpyHandler`'s: on disk they are NumPy arrays."""

    def __init__(self) -> None:
        self._numpy = ocp.type_handlers.NumpyHandler()

    def typestr(self) -> str:
        """Returns the recorded type."""
        return self._numpy.typestr()

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        return await self._numpy.metadata(infos)

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[Any]:
        return await self._numpy.deserialize(infos, args)

    async def serialize(
        self, values: Sequence[StreamedLeaf], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """Starts or defers writing; see `ocp.type_handlers.TypeHandler`."""
        writer = values[0].writer
        if writer.deferred:
            writer.defer([_job(value, info) for value, info in zip(values, infos, strict=True)])
            return []
        return [CommitFuture(_write(writer, values, infos), name="orbax_t5x_lazy")]


async def _write(writer: ChunkWriter, values: Sequence[StreamedLeaf], infos: Sequence[Any]) -> None:
    for info in infos:
        await info.await_path_creation()
    await writer.write([_job(value, info) for value, info in zip(values, infos, strict=True)])


def _job(value: StreamedLeaf, info: Any) -> WriteJob:
    view = value.view

    def output(chunk: tuple[int, ...], context: ts.Context | None) -> TensorStoreArray:
        return TensorStoreArray(write_spec(info, view.shape, chunk, view.dtype), context)

    return WriteJob(view, value.name, output, info.ts_context, str(info.parent_dir), value.chunks, info.name)


class GlobalTypeHandlers:
    """Orbax's process-wide table, by its public functions."""

    get: staticmethod[..., Any] = staticmethod(ocp.type_handlers.get_type_handler)
    has: staticmethod[..., bool] = staticmethod(ocp.type_handlers.has_type_handler)
    add: staticmethod[..., None] = staticmethod(ocp.type_handlers.register_type_handler)
