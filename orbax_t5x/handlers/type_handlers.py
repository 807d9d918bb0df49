"""How Orbax writes a lazy array: as the NumPy array that it stands for, so that anyone restores it, but chunk by chunk.

Orbax's table of type handlers stays as it is: a handler of ours looks types up in a table of its own that passes on
everything else. The layout of what is written is Orbax's own, from its function for it; only the shape of the chunks
is chosen here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import orbax.checkpoint as ocp
import tensorstore as ts

from orbax_t5x.handlers.checksums import RunningSaves, SummedHandler, summed_types
from orbax_t5x.handlers.chunks import ChunkWishes
from orbax_t5x.handlers.orbax_names import CommitFuture, write_spec
from orbax_t5x.handlers.stream import ChunkWriter, Job, TensorStoreArray
from orbax_t5x.lazy import View


class StreamedLeaf:
    """A leaf of a tree that is being saved: a view, and the writer of the save that it belongs to."""

    __slots__ = ("chunks", "name", "view", "writer")

    def __init__(self, view: View, name: str, writer: ChunkWriter, chunks: ChunkWishes):
        self.view: View = view
        self.name: str = name
        self.writer: ChunkWriter = writer
        self.chunks: ChunkWishes = chunks

    @property
    def nbytes(self) -> int:
        """What Orbax's metrics ask for."""
        return self.view.nbytes


class LazyArrayHandler(ocp.type_handlers.TypeHandler):
    """Writes streamed leaves. Reading is `NumpyHandler`'s: on disk they are NumPy arrays."""

    def __init__(self) -> None:
        self._numpy = ocp.type_handlers.NumpyHandler()

    def typestr(self) -> str:
        """The type that is recorded."""
        return self._numpy.typestr()

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        """As for NumPy arrays."""
        return await self._numpy.metadata(infos)

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[Any]:
        """As for NumPy arrays."""
        return await self._numpy.deserialize(infos, args)

    async def serialize(
        self, values: Sequence[StreamedLeaf], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """Starts, or defers, writing; see `ocp.type_handlers.TypeHandler`."""
        writer = values[0].writer
        if writer.deferred:
            writer.defer([_job(value, info) for value, info in zip(values, infos, strict=True)])
            return []
        return [CommitFuture(_write(writer, values, infos), name="orbax_t5x_lazy")]


async def _write(writer: ChunkWriter, values: Sequence[StreamedLeaf], infos: Sequence[Any]) -> None:
    for info in infos:
        await info.await_path_creation()
    await writer.write([_job(value, info) for value, info in zip(values, infos, strict=True)])


def _job(value: StreamedLeaf, info: Any) -> Job:
    view = value.view

    def output(chunk: tuple[int, ...], context: ts.Context | None) -> TensorStoreArray:
        return TensorStoreArray(write_spec(info, view.shape, chunk, view.dtype), context)

    return Job(view, value.name, output, info.ts_context, str(info.parent_dir), value.chunks, info.name)


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
        handler = self._below.get(ty)
        if self._saves is None or type(handler) not in summed_types():
            return handler
        # The same one each time: Orbax hands over together what one handler writes.
        return self._summed.setdefault(handler, SummedHandler(handler, self._saves))

    def has(self, ty: Any) -> bool:
        """Whether there is a handler."""
        return ty is StreamedLeaf or self._below.has(ty)

    def add(self, *args: Any, **kwargs: Any) -> None:
        """Adds to the table below."""
        self._below.add(*args, **kwargs)


class GlobalTypeHandlers:
    """Orbax's process-wide table, by its public functions."""

    get: staticmethod[..., Any] = staticmethod(ocp.type_handlers.get_type_handler)
    has: staticmethod[..., bool] = staticmethod(ocp.type_handlers.has_type_handler)
    add: staticmethod[..., None] = staticmethod(ocp.type_handlers.register_type_handler)
