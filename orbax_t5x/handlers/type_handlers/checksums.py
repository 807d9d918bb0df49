"""Checksums of a save's written bytes.

They are made while Orbax writes, and left beside its files. Orbax's own type handlers write; a `SummedHandler` around
each sums the same elements in the background. Each process sends the boxes that it wrote (of a `jax.Array`, the shards
with replica 0) to the process that finalizes, once, and that one writes the item's one file (`save.item_sums`). What
other handlers write has no checksum: the bytes that they store are unknown.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from orbax_t5x.files.crc import CRC32C
from orbax_t5x.handlers.orbax_names import CommitFuture
from orbax_t5x.lazy import Box, full_box
from orbax_t5x.lazy.box import box_shape, box_slices
from orbax_t5x.readers.box_sums import BoxSums, array_crc, row_boxes
from orbax_t5x.readers.orbax.checksums import STRING, encode_checksums

# Elements that are stored in another dtype are cast, as TensorStore does it, so many bytes at a time.
_CAST_BYTES = 1 << 22


class SaveSums:
    """This process's checksums of a save.

    They are filled from any thread. With `later`, what is to be summed is kept for `sum_kept`. Summing holds the
    interpreter much of the time, so an asynchronous save first gives its caller the control back.
    """

    def __init__(self, *, later: bool) -> None:
        self.later: bool = later
        self._kept: list[HostCopy] = []
        self._lock = threading.Lock()
        self._arrays: dict[str, tuple[tuple[int, ...], str]] = {}
        self._boxes: dict[str, dict[Box, int]] = {}

    def keep(self, held: Iterable[HostCopy]) -> None:
        """Keeps copies for later sums."""
        self._kept.extend(held)

    def sum_kept(self) -> None:
        """Sums the kept copies, and lets go of them."""
        sum_copies(self._kept, self)

    def add(self, key: str, shape: Sequence[int], dtype: str, box: Box, crc: int) -> None:
        """Notes the checksum of a box of an array.

        By the key under which Orbax stores the array.
        """
        with self._lock:
            self._arrays[key] = tuple(shape), dtype
            self._boxes.setdefault(key, {})[box] = crc

    @property
    def is_empty(self) -> bool:
        """True if nothing was summed."""
        return not self._arrays

    def encode(self) -> bytes:
        """Encodes the checksums as the contents of a file."""
        with self._lock:
            return encode_checksums(
                {
                    key: BoxSums(shape, dtype, tuple(self._boxes[key]), tuple(self._boxes[key].values()))
                    for key, (shape, dtype) in self._arrays.items()
                }
            )


class RunningSaves:
    """Saves by directory, during Orbax's calls of type handlers.

    By the directory these know a save.
    """

    def __init__(self) -> None:
        self._saves: dict[str, SaveSums] = {}

    @contextlib.contextmanager
    def of(self, directory: epath.Path, *, later: bool) -> Iterator[SaveSums]:
        """Registers a save while Orbax hands over its leaves.

        `later`: see `SaveSums`.
        """
        sums = self._saves[str(directory)] = SaveSums(later=later)
        try:
            yield sums
        finally:
            del self._saves[str(directory)]

    def find(self, infos: Sequence[Any]) -> SaveSums | None:
        """Returns the save that leaves belong to."""
        return self._saves.get(str(infos[0].parent_dir)) if infos else None


class HostCopy(NamedTuple):
    """Host copy of an array's written boxes, for checksums.

    It may be on its way there.
    """

    key: str
    shape: tuple[int, ...]
    boxes: Sequence[Box]
    blocks: Sequence[Any]
    dtype: np.dtype


class SummedHandler:
    """Orbax type handler with a summing `serialize`.

    Everything else is the handler's own.
    """

    def __init__(self, handler: Any, saves: RunningSaves):
        self._handler = handler
        self._saves = saves

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        """See `ocp.type_handlers.TypeHandler`."""
        sums = self._saves.find(infos)
        if sums is None:
            return await self._handler.serialize(values, infos, args)
        args = args or [ocp.SaveArgs()] * len(values)
        # The caller may write over NumPy arrays as soon as this returns. Orbax copies them; it gets the copy made here.
        values = [CopiedArray.of(value) if isinstance(value, np.ndarray) else value for value in values]
        # Before Orbax's threads begin to write: they would take the interpreter from the caller, who waits.
        start_transfers(values, infos)
        held = [one for leaf in zip(values, infos, args, strict=True) for one in copies_to_host(*leaf)]
        futures = await self._handler.serialize(values, infos, args)
        if sums.later:
            sums.keep(held)
            return futures
        return [*futures, CommitFuture(_sum_soon(held, sums), name="orbax_t5x_checksums")]


class CopiedArray(np.ndarray):
    """Copy of an array that only this save holds.

    Copying it once more returns it.
    """

    @classmethod
    def of(cls, value: np.ndarray) -> CopiedArray:
        """Copies an array, in row-major order."""
        return np.array(value, order="C").view(cls)

    def __deepcopy__(self, memo: Any) -> np.ndarray:
        return self.view(np.ndarray)


@functools.cache
def summed_types() -> frozenset[type]:
    """Lists the types of Orbax's handlers with known bytes."""
    known = ocp.type_handlers
    arrays = known.ArrayHandler, known.SingleReplicaArrayHandler
    return frozenset((*arrays, known.NumpyHandler, known.ScalarHandler, known.StringHandler))


def copies_to_host(value: Any, info: Any, arg: ocp.SaveArgs) -> Iterator[HostCopy]:
    """Yields copies of the boxes that this process writes.

    A NumPy array must be a `CopiedArray`.
    """
    if isinstance(value, jax.Array):
        array = jax.random.key_data(value) if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key) else value
        dtype = np.dtype(array.dtype if arg.dtype is None else arg.dtype)
        devices = written_boxes(array.sharding, array.shape)
        shards = [shard for shard in array.addressable_shards if shard.device in devices]
        boxes = [devices[shard.device] for shard in shards]
        blocks = map(_to_host(devices, info), [shard.data for shard in shards])
        yield HostCopy(info.name, array.shape, boxes, list(blocks), dtype)
    elif jax.process_index() == 0:
        if isinstance(value, str):
            yield HostCopy(info.name, (), [()], [value], np.dtype(object))
        elif isinstance(value, np.ndarray | np.generic | bool | int | float):
            array = np.asarray(value).view(np.ndarray)
            array = array.astype(array.dtype.newbyteorder("="), copy=False)
            dtype = np.dtype(array.dtype if arg.dtype is None else arg.dtype)
            yield HostCopy(info.name, array.shape, [full_box(array.shape)], [array], dtype.newbyteorder("="))


@functools.lru_cache(maxsize=4096)  # as many layouts of arrays as Orbax remembers
def written_boxes(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> dict[Any, Box]:
    """Lists the written boxes of an array by device.

    Each comes once, by the first device with it (replica 0).
    """
    first: dict[Box, Any] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        box = tuple(side.indices(size)[:2] for side, size in zip(index or (), shape, strict=True))
        first.setdefault(box, device)
    return {device: box for box, device in first.items() if device.process_index == jax.process_index()}


def start_transfers(values: Sequence[Any], infos: Sequence[Any]) -> None:
    """Starts copying shards from accelerators.

    As Orbax does, all are started before any is awaited.
    """
    for value, info in zip(values, infos, strict=True):
        if isinstance(value, jax.Array) and not jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            boxes = written_boxes(value.sharding, value.shape)
            if any(device.platform != "cpu" for device in boxes) and _to_host(boxes, info) is np.asarray:
                for shard in value.addressable_shards:
                    if shard.device in boxes:
                        shard.data.copy_to_host_async()


def _to_host(devices: Iterable[Any], info: Any) -> Callable[[jax.Array], Any]:
    """Returns the function that copies a device's shard.

    The caller may donate the shard.

    `np.asarray` gives the very copy that Orbax writes from, on CPU the shard's own memory: JAX keeps one for each
    shard. Orbax's copy in pinned memory cannot be had, so that is made once more, while the caller goes on. Where Orbax
    has a limit on transfers, it leaves shards where they are until it writes them, and so does this.
    """
    if getattr(info.device_host_byte_limiter, "max_bytes", None) is not None:
        return _as_it_is
    device = next(iter(devices), None)
    if device is None or device.platform == "cpu" or not getattr(info, "enable_pinned_host_transfer", True):
        return np.asarray
    is_pinned = any(memory.kind == "pinned_host" for memory in device.addressable_memories())
    return _to_pinned_host if is_pinned else np.asarray


def _as_it_is(data: jax.Array) -> jax.Array:
    return data


def _to_pinned_host(data: jax.Array) -> jax.Array:
    (device,) = data.devices()
    return jax.device_put(data, jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host"))


async def _sum_soon(held: list[HostCopy], sums: SaveSums) -> None:
    sum_copies(held, sums)


def sum_copies(held: list[HostCopy], sums: SaveSums) -> None:
    """Sums the held arrays in turn, and lets go of them."""
    held.reverse()
    while held:
        one = held.pop()
        for box, block in zip(one.boxes, one.blocks, strict=True):
            if isinstance(block, str):
                sums.add(one.key, one.shape, STRING, box, CRC32C.extend(0, block.encode("utf-8", "surrogatepass")))
            else:
                sums.add(one.key, one.shape, one.dtype.name, box, _stored_crc(np.asarray(block), one.dtype))


def _stored_crc(array: np.ndarray, dtype: np.dtype) -> int:
    """Computes the checksum of an array as it is stored."""
    if array.dtype == dtype:
        return array_crc(array)
    crc = 0
    for box in row_boxes(full_box(array.shape), array.dtype.itemsize, _CAST_BYTES):
        block = np.require(array[box_slices(box)], requirements="C").reshape(box_shape(box))
        # TensorStore's own cast: rounding is the same everywhere, bits of a NaN are not.
        crc = array_crc(ts.cast(ts.array(block), dtype).read().result(), crc)
    return crc
