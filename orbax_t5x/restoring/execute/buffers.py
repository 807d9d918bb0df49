"""Allocates an array's shard buffers, and makes the array.

`jax` takes a buffer at a 64-byte boundary over without a copy on CPU; shards of one array share one allocation, which
lives exactly as long as the array. Nothing here reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from orbax_t5x.errors import Fix, Problem, ProblemKind, RestorePlanError
from orbax_t5x.files.memory import empty_array
from orbax_t5x.lazy import Box
from orbax_t5x.lazy.box import box_shape, box_size, full_box
from orbax_t5x.restoring.plan import PlanEntry, addressable_boxes, box_of_index, shard_indices
from orbax_t5x.restoring.targets import TargetLeaf, key_impl_of

# XLA's CPU client adopts host buffers with this alignment and copies others.
_ALIGNMENT = 64
# Shards of smaller arrays follow one another without gaps: one read costs less than JAX's copies of them.
_PACKED_BYTES = 1 << 16
_BYTE = np.dtype(np.uint8)
# Devices of these compute in the host's memory: an array takes its buffer over, and no transfer is under way.
_HOST_PLATFORMS = frozenset({"cpu"})
_DEVICE_MEMORY = (None, "device")
# Staging buffers have multiples of it, so that groups of small arrays take the same ones.
_STAGING_UNIT = 1 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class BufferLayout:
    """Layout of this process's boxes of an array in an allocation.

    Attributes:
      boxes, shapes: of the unique shards.
      starts, stops: bytes within the allocation; each buffer of a larger array begins at a 64-byte boundary.
      size: bytes of the allocation.
      position_of: (start, stop) per dimension, as a shard's index has them -> position in `boxes`.
      read_boxes: the boxes to read. Shards that follow one another along the leading dimension, and so in memory, are
        read as one: one request, one call and one checksum instead of one per device. `read_shapes` are theirs.
      asked: the boxes in the order in which JAX asks for shards, once it has.
    """

    boxes: tuple[Box, ...]
    shapes: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    size: int
    position_of: Mapping[Any, int]
    read_boxes: tuple[Box, ...]
    read_shapes: tuple[tuple[int, ...], ...]
    asked: list[int] = dataclasses.field(default_factory=list[int])

    @property
    def allocated_bytes(self) -> int:
        """The bytes of the allocation, with what aligns it."""
        return self.size + _ALIGNMENT

    def allocate(self, dtype: np.dtype, memory: np.ndarray | None = None) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Allocates buffers of all boxes and of the boxes to read.

        Without `memory`, all is one allocation, which lives as long as the array that adopts it.
        """
        if dtype.hasobject:
            outs = [empty_array(shape, dtype) for shape in self.shapes]
            return outs, outs
        if memory is None:
            memory = empty_array((self.size + _ALIGNMENT,), _BYTE)
        first = -memory.__array_interface__["data"][0] % _ALIGNMENT
        if len(self.boxes) == 1:
            outs = [memory[first : first + self.size].view(dtype).reshape(self.shapes[0])]
            return outs, outs
        outs = [
            memory[first + start : first + stop].view(dtype).reshape(shape)
            for start, stop, shape in zip(self.starts, self.stops, self.shapes, strict=True)
        ]
        if self.read_boxes is self.boxes:
            return outs, outs
        return outs, [memory[first : first + self.size].view(dtype).reshape(self.read_shapes[0])]


class StagingBuffers:
    """Memory of arrays on their way to devices.

    Used again when they have arrived: the kernel takes longer to make memory than to fill it. What is kept and in use
    together is at most `limit` bytes, or a single buffer. The buffer that was given back last is taken first. Arrays
    in another memory than the devices' own might take a buffer over, and have none of these.
    """

    def __init__(self, limit: int, leaves: Iterable[TargetLeaf]):
        self._limit = limit
        kinds = {id(leaf): None if leaf.sharding is None else leaf.sharding.memory_kind for leaf in leaves}
        self._leaves = frozenset([leaf for leaf, kind in kinds.items() if kind in _DEVICE_MEMORY])
        self._held = 0
        self._free: list[np.ndarray] = []
        self._lock = threading.Lock()

    def holds(self, entry: PlanEntry) -> bool:
        """Tests if an entry's buffers are of this memory."""
        return id(entry.leaf) in self._leaves

    def take(self, size: int) -> np.ndarray:
        """Takes a buffer of at least `size` bytes."""
        size = -(-size // _STAGING_UNIT) * _STAGING_UNIT
        with self._lock:
            for at in reversed(range(len(self._free))):
                if self._free[at].size == size:
                    return self._free.pop(at)
            while self._free and self._held + size > self._limit:
                self._held -= self._free.pop(0).size
            self._held += size
        return empty_array((size,), _BYTE)

    def give(self, buffer: np.ndarray) -> None:
        """Gives back a buffer that no transfer reads any more."""
        with self._lock:
            self._free.append(buffer)


@functools.lru_cache(maxsize=1 << 14)
def _layout(sharding: jax.sharding.Sharding | None, shape: tuple[int, ...], itemsize: int) -> BufferLayout:
    boxes = addressable_boxes(sharding, shape)
    joined = _joined(boxes, shape)
    alignment = 1 if joined is not None and box_size(joined) * itemsize <= _PACKED_BYTES else _ALIGNMENT
    starts: list[int] = []
    stops: list[int] = []
    end = 0
    for box in boxes:
        start = -(-end // alignment) * alignment
        end = start + box_size(box) * itemsize
        starts.append(start)
        stops.append(end)
    positions = {box: position for position, box in enumerate(boxes)}
    indices = () if sharding is None else shard_indices(sharding, shape)
    position_of = {_raw_index(index): positions[box_of_index(index or (), shape)] for index in indices}
    read_boxes = boxes if joined is None or starts[1:] != stops[:-1] else (joined,)
    shapes, read_shapes = tuple(map(box_shape, boxes)), tuple(map(box_shape, read_boxes))
    return BufferLayout(boxes, shapes, tuple(starts), tuple(stops), end, position_of, read_boxes, read_shapes)


def _joined(boxes: Sequence[Box], shape: tuple[int, ...]) -> Box | None:
    """Merges boxes adjacent along axis 0, or returns None."""
    if len(boxes) < 2 or any(box[1:] != full_box(shape[1:]) for box in boxes):
        return None
    if any(before[0][1] != after[0][0] for before, after in itertools.pairwise(boxes)):
        return None
    return ((boxes[0][0][0], boxes[-1][0][1]), *boxes[0][1:])


def _raw_index(index: Sequence[slice] | None) -> tuple[tuple[int | None, int | None], ...]:
    """Makes a shard's index hashable."""
    return tuple([(part.start, part.stop) for part in index or ()])


def layout_of(entry: PlanEntry) -> BufferLayout:
    """Returns the layout of the shards of an entry."""
    assert entry.leaf is not None and entry.view is not None
    return _layout(entry.leaf.sharding, entry.leaf.shape, entry.view.dtype.itemsize)


def layouts_of(entries: Iterable[PlanEntry]) -> list[BufferLayout]:
    """Returns the layouts of entries, asked once per target leaf."""
    known: dict[tuple[int, int], BufferLayout] = {}
    layouts: list[BufferLayout] = []
    for entry in entries:
        assert entry.view is not None
        # Like leaves of a target are one object; to compare shardings costs more.
        key = id(entry.leaf), entry.view.node.dtype.itemsize
        layout = known.get(key)
        if layout is None:
            layout = known[key] = layout_of(entry)
        layouts.append(layout)
    return layouts


def sent_leaves(entries: Iterable[PlanEntry]) -> list[TargetLeaf]:
    """Returns the target leaves on devices with their own memory.

    JAX's settings of this thread decide on those without a sharding.
    """
    leaves = [leaf for leaf in {id(entry.leaf): entry.leaf for entry in entries}.values() if leaf is not None]
    return [leaf for leaf in leaves if not leaf.is_on_host and not _platforms(leaf) <= _HOST_PLATFORMS]


def _platforms(leaf: TargetLeaf) -> set[str]:
    if leaf.sharding is not None:
        return {device.platform for device in leaf.sharding.device_set}
    untyped: Any = jax.config
    device = untyped.jax_default_device
    return {jax.default_backend() if device is None else getattr(device, "platform", device)}


def make_values(entries: Sequence[PlanEntry], buffers: dict[str, list[np.ndarray]]) -> dict[str, Any]:
    """Makes leaves' values from their boxes' buffers, by name."""
    values: dict[str, Any] = {}
    with explicit_transfers():
        # One call for all: each has the cost of several arrays.
        names = [
            one.name for one in entries if one.leaf and one.leaf.sharding is None and one.leaf.kind in ("jax", "key")
        ]
        if names:
            values.update(zip(names, jax.device_put([buffers[name][0] for name in names]), strict=True))
        for entry, layout in zip(entries, layouts_of(entries), strict=True):
            leaf, own = entry.leaf, buffers.pop(entry.name)
            assert leaf is not None and entry.view is not None
            if leaf.kind == "numpy" or leaf.kind == "scalar":
                values[entry.name] = _on_host(leaf, own[0])
                continue
            if leaf.sharding is not None:
                values[entry.name] = sharded_array(leaf, layout, own, entry.view.node.dtype)
            if leaf.kind == "key":
                values[entry.name] = jax.random.wrap_key_data(values[entry.name], impl=leaf.key_impl)
    for entry in entries:
        check_value(entry, values[entry.name])
    return values


def sharded_array(leaf: TargetLeaf, layout: BufferLayout, buffers: Sequence[np.ndarray], dtype: np.dtype) -> jax.Array:
    """Makes a sharded array.

    The first array of a layout records the order in which JAX asks for shards, which is the same for all.
    """
    assert leaf.sharding is not None
    if not buffers:
        # All devices are other processes'; `make_array_from_callback` would request data nevertheless.
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, [], dtype=dtype)
    placing = leaf.sharding if leaf.layout is None else leaf.layout
    if layout.asked:
        # In C: each call takes the next buffer, and one too many returns the index, which is no array.
        following: Any = functools.partial(next, map(buffers.__getitem__, layout.asked))
        return jax.make_array_from_callback(leaf.shape, placing, following)
    asked: list[int] = []

    def buffer_of(index: Any) -> np.ndarray:
        asked.append(layout.position_of[_raw_index(index)])
        return buffers[asked[-1]]

    array = jax.make_array_from_callback(leaf.shape, placing, buffer_of)
    layout.asked[:] = asked
    return array


def explicit_transfers() -> contextlib.AbstractContextManager[Any]:
    """Returns a context that allows JAX's own transfers.

    `make_array_from_callback` counts as implicit, unlike `device_put`; "disallow" means implicit transfers alone.
    """
    config: Any = jax.config  # its attributes are defined as JAX is imported
    if config.jax_transfer_guard_host_to_device == "disallow":
        return jax.transfer_guard_host_to_device("allow")
    return contextlib.nullcontext()


def check_value(entry: PlanEntry, value: Any) -> None:
    """Compares a value with the plan."""
    leaf = entry.leaf
    if leaf is None or leaf.kind == "scalar":
        return
    clash: tuple[ProblemKind, Any, Any] | None = None
    shape = leaf.shape[: value.ndim] if leaf.kind == "key" else leaf.shape
    if value.shape != shape:
        clash = "shape", value.shape, shape
    elif leaf.kind == "key":
        if key_impl_of(value.dtype) != leaf.key_impl:
            clash = "dtype", value.dtype, leaf.key_impl
    elif value.dtype != leaf.dtype:
        clash = "dtype", value.dtype, leaf.dtype
    if clash is None and leaf.kind != "numpy" and leaf.sharding not in (None, value.sharding):
        if not value.sharding.is_equivalent_to(leaf.sharding, value.ndim):
            clash = "sharding", value.sharding, leaf.sharding
    if clash is not None:
        kind, found, planned = clash
        fix = Fix.in_program("plan and execute under the same JAX settings (jax_enable_x64, the mesh in use)")
        raise RestorePlanError([Problem(kind, entry.name, f"JAX made {found}, the plan has {planned}", fix)])


def _on_host(leaf: TargetLeaf, array: np.ndarray) -> Any:
    """Converts a value to a target leaf's type on the host."""
    if leaf.kind == "numpy":
        return array.astype(leaf.dtype, copy=False)
    scalar_type = leaf.scalar_type
    item = array[()]
    if scalar_type is not None and issubclass(scalar_type, str):
        return scalar_type(item.decode() if isinstance(item, bytes) else item)
    if scalar_type is not None and issubclass(scalar_type, (bytes, int, float, complex)):
        return scalar_type(item)
    return array.astype(leaf.dtype)[()]
