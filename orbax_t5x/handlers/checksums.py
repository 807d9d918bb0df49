"""The checksums of what a save writes: made while Orbax writes, from what it writes, and left beside it.

Orbax's own type handlers write; around each stands a `SummedHandler` that sums the same elements in the background.
Each process writes a file of its own with the boxes that it wrote (of a `jax.Array`, the shards with replica 0), and
`merge_parts`, on the process that finalizes, makes the item's one file of them. What handlers of others write has no
checksum here: nobody knows what they store.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from orbax_t5x.handlers.orbax_names import CommitFuture
from orbax_t5x.lazy import Box, full_box
from orbax_t5x.lazy.box import box_shape, box_slices
from orbax_t5x.readers.box_sums import BoxSums, array_crc, row_boxes
from orbax_t5x.readers.orbax.checksums import CHECKSUMS_FILE, STRING, encode_checksums, parse_checksums
from orbax_t5x.readers.tiling import check_tiling
from orbax_t5x.storage import crc32c as _crc
from orbax_t5x.storage.limits import Limits

_PART_FILES = "_CHECKSUMS.process_*.json"
# Steps in which the boxes of one array may be compared; Orbax writes even grids, which take none.
_MAX_TILING_STEPS = 20_000_000
# Elements that are stored in another dtype are cast, as TensorStore does it, so many bytes at a time.
_CAST_BYTES = 1 << 22


class SaveSums:
    """The checksums that this process has made for one save; filled from any thread.

    Attributes:
      begin: set when summing may begin. It holds the interpreter much of the time, so an asynchronous save first gives
        its caller the control back.
    """

    def __init__(self) -> None:
        self.begin = threading.Event()
        self._lock = threading.Lock()
        self._arrays: dict[str, tuple[tuple[int, ...], str]] = {}
        self._boxes: dict[str, dict[Box, int]] = {}

    def add(self, key: str, shape: Sequence[int], dtype: str, box: Box, crc: int) -> None:
        """Notes the checksum of one box of an array, by the key under which Orbax stores it."""
        with self._lock:
            self._arrays[key] = tuple(shape), dtype
            self._boxes.setdefault(key, {})[box] = crc

    def write_part(self, directory: epath.Path) -> None:
        """Writes this process's file."""
        with self._lock:
            sums = {
                key: BoxSums(shape, dtype, tuple(self._boxes[key]), tuple(self._boxes[key].values()))
                for key, (shape, dtype) in self._arrays.items()
            }
        path = directory / _PART_FILES.replace("*", str(jax.process_index()))
        path.write_bytes(encode_checksums(sums))


def merge_parts(directory: epath.Path) -> None:
    """Makes the item's file of those of all processes.

    An array of which they do not have all boxes (a process saved into another directory) is left out.
    """
    parts = sorted(directory.glob(_PART_FILES))
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    boxes: dict[str, dict[Box, int]] = {}
    for part in parts:
        for key, sums in parse_checksums(part.read_bytes(), str(part), Limits(), complete=False).items():
            shapes[key] = sums.shape, sums.dtype
            boxes.setdefault(key, {}).update(zip(sums.boxes, sums.crcs, strict=True))
    merged = {
        key: BoxSums(shape, dtype, tuple(sorted(boxes[key])), tuple(boxes[key][box] for box in sorted(boxes[key])))
        for key, (shape, dtype) in shapes.items()
        if check_tiling(shape, list(boxes[key]), _MAX_TILING_STEPS).problem is None
    }
    if merged:
        (directory / CHECKSUMS_FILE).write_bytes(encode_checksums(merged))
    for part in parts:
        part.unlink()


class RunningSaves:
    """The saves whose leaves Orbax is handing to type handlers, by directory, which is what handlers know of them."""

    def __init__(self) -> None:
        self._saves: dict[str, SaveSums] = {}

    @contextlib.contextmanager
    def of(self, directory: epath.Path, *, later: bool) -> Iterator[SaveSums]:
        """A new save into a directory; `later`: summing begins when the context ends."""
        sums = self._saves[str(directory)] = SaveSums()
        if not later:
            sums.begin.set()
        try:
            yield sums
        finally:
            del self._saves[str(directory)]
            sums.begin.set()

    def find(self, infos: Sequence[Any]) -> SaveSums | None:
        """The save that leaves belong to."""
        return self._saves.get(str(infos[0].parent_dir)) if infos else None


class HeldBox(NamedTuple):
    """What will be summed: a box of an array, the same bytes that Orbax writes, and the dtype in which they are stored.

    Attributes:
      data: on the host, or on its way there.
    """

    key: str
    shape: tuple[int, ...]
    box: Box
    data: Any
    dtype: np.dtype


class SummedHandler:
    """One of Orbax's type handlers; its `serialize` sums what is written, and everything else is the handler's own."""

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
        futures = await self._handler.serialize(values, infos, args)
        held = [one for leaf in zip(values, infos, args, strict=True) for one in hold(*leaf)]
        return [*futures, CommitFuture(sum_held(held, sums), name="orbax_t5x_checksums")]


class CopiedArray(np.ndarray):
    """A copy of an array that nobody else has, so that copying it once more is not needed."""

    @classmethod
    def of(cls, value: np.ndarray) -> CopiedArray:
        """A copy of an array, in row-major order."""
        return np.array(value, order="C").view(cls)

    def __deepcopy__(self, memo: Any) -> np.ndarray:
        return self.view(np.ndarray)


def summed_types() -> tuple[type, ...]:
    """The type handlers of which it is known what they write."""
    known = ocp.type_handlers
    arrays = known.ArrayHandler, known.SingleReplicaArrayHandler
    return *arrays, known.NumpyHandler, known.ScalarHandler, known.StringHandler


def hold(value: Any, info: Any, arg: ocp.SaveArgs) -> Iterator[HeldBox]:
    """What this process writes of a leaf, kept as it is now.

    Args:
      value: the leaf; a NumPy array is one that nobody writes over (`CopiedArray`).
      info: has the `name` under which Orbax stores it, and Orbax's `device_host_byte_limiter`, or None.
      arg: its `dtype` is that in which it is stored; None for its own.
    """
    if isinstance(value, jax.Array):
        array = jax.random.key_data(value) if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key) else value
        dtype = np.dtype(array.dtype if arg.dtype is None else arg.dtype)
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                box = tuple(side.indices(size)[:2] for side, size in zip(shard.index, array.shape, strict=True))
                yield HeldBox(info.name, array.shape, box, _on_host(shard.data, info), dtype)
    elif jax.process_index() == 0:
        if isinstance(value, str):
            yield HeldBox(info.name, (), (), value, np.dtype(object))
        elif isinstance(value, np.ndarray | np.generic | bool | int | float):
            array = np.asarray(value).view(np.ndarray)
            array = array.astype(array.dtype.newbyteorder("="), copy=False)
            dtype = np.dtype(array.dtype if arg.dtype is None else arg.dtype)
            yield HeldBox(info.name, array.shape, full_box(array.shape), array, dtype.newbyteorder("="))


def _on_host(data: jax.Array, info: Any) -> Any:
    """A shard that the caller may give away from now on.

    On CPU it is the buffer that Orbax writes from. From an accelerator it is copied once more, while the caller goes
    on: Orbax's copy cannot be had. Where Orbax was told to move little at a time, it leaves shards where they are until
    it writes them, and so does this.
    """
    limit = getattr(info.device_host_byte_limiter, "max_bytes", None)
    (device,) = data.devices()
    if limit is not None:
        return data
    if device.platform == "cpu":
        return np.asarray(data)
    kinds = {memory.kind for memory in device.addressable_memories()}
    if "pinned_host" not in kinds:
        return np.asarray(data)
    return jax.device_put(data, jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host"))


async def sum_held(held: list[HeldBox], sums: SaveSums) -> None:
    """Sums what is held and lets go of it, one after the other; in a thread of its own, which may wait."""
    sums.begin.wait()
    held.reverse()
    while held:
        one = held.pop()
        if isinstance(one.data, str):
            sums.add(one.key, (), STRING, (), _crc.extend(0, one.data.encode("utf-8", "surrogatepass")))
        else:
            sums.add(one.key, one.shape, one.dtype.name, one.box, _stored_crc(np.asarray(one.data), one.dtype))


def _stored_crc(array: np.ndarray, dtype: np.dtype) -> int:
    """The checksum of an array as it is stored."""
    if array.dtype == dtype:
        return array_crc(array)
    crc = 0
    for box in row_boxes(full_box(array.shape), array.dtype.itemsize, _CAST_BYTES):
        block = np.require(array[box_slices(box)], requirements="C").reshape(box_shape(box))
        # TensorStore's own cast: rounding is the same everywhere, bits of a NaN are not.
        crc = array_crc(ts.cast(ts.array(block), dtype).read().result(), crc)
    return crc
