"""Leaves that each of several processes reads in part, and that XLA then sends between their devices.

A leaf is loaded spread over the processes of its mesh, as unsigned integers of its width, and resharded by
`jax.device_put`, which computes nothing with them: so NaNs keep their payloads. Then its bits are read as its own dtype
and it moves to its own memory. All members of a group decide alike, and send the same batches in the same order.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orbax_t5x.lazy import Box, Leaf
from orbax_t5x.lazy.box import full_box
from orbax_t5x.lazy.chunks import grid_boxes
from orbax_t5x.lazy.value import ComputedLeaf
from orbax_t5x.readers.ranges.elements import LOW_BITS
from orbax_t5x.restoring.execute.buffers import check_value, explicit_transfers, layout_of, sharded_array
from orbax_t5x.restoring.execute.groups import clusters_of, stored_bytes
from orbax_t5x.restoring.options import BroadcastMode
from orbax_t5x.restoring.plan import PlanEntry, RestorePlan, box_of_index, boxes_by_leaf

_BITCAST_BYTES = frozenset({1, 2, 4, 8})

Counts = tuple[int, ...]
"""Number of parts of each dimension over which a leaf is spread."""
Spread = tuple[Counts, list[Any]]
"""Counts of a leaf's parts, and the chunks of the stored leaves, on which the batches depend."""


@dataclasses.dataclass(frozen=True, eq=False)
class SpreadEntry:
    """Entry that its processes read in parts.

    Attributes:
      entry: Entry as planned.
      loading: Entry whose sharding spreads the array over the processes.
      nbytes: Bytes that each process loads at most.
    """

    entry: PlanEntry
    loading: PlanEntry
    nbytes: int

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Leaves that the view is made of."""
        return self.entry.leaves

    @property
    def reads(self) -> tuple[tuple[Leaf, tuple[Box, ...]], ...]:
        """Boxes of the leaves that all processes read together."""
        assert self.entry.view is not None
        return boxes_by_leaf([(self.entry.view, full_box(self.entry.shape))])


def spans_processes(sharding: jax.sharding.Sharding | None) -> bool:
    """Returns True if devices of several processes hold an array of this sharding."""
    return sharding is not None and len(_devices_by_process(sharding)) > 1


@functools.lru_cache(maxsize=1 << 12)
def _devices_by_process(sharding: jax.sharding.Sharding) -> Mapping[int, int]:
    """Returns the number of devices of each process."""
    return collections.Counter([device.process_index for device in sharding.device_set])


def plan_digest(plan: RestorePlan, broadcast: BroadcastMode) -> str:
    """Returns a digest of what all processes of a restore have in common.

    Paths are not: each process may have a copy of its own. Neither are shardings over the devices of one process.
    """
    shardings: dict[tuple[Any, tuple[int, ...]], list[Any]] = {}
    rows: list[Any] = []
    for entry in plan.entries:
        placing = None
        if spans_processes(entry.sharding):
            key = entry.sharding, tuple(entry.shape)
            placing = shardings.get(key) or shardings.setdefault(key, _sharding_data(*key))
        rows.append([entry.name, entry.sources, entry.action, entry.shape, str(entry.dtype), entry.how, placing])
    rules = [dict(rule) for rule in plan.lineage]
    text = json.dumps([rows, rules, plan.latest_steps, str(broadcast)], default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _sharding_data(sharding: Any, shape: tuple[int, ...]) -> list[Any]:
    boxes = [(device.id, box_of_index(index or (), shape)) for device, index in _indices(sharding, shape)]
    return [sorted(boxes), sharding.memory_kind]


def _indices(sharding: Any, shape: tuple[int, ...]) -> Iterable[tuple[Any, Any]]:
    return sharding.devices_indices_map(shape).items()


def spreads_of(entries: Iterable[PlanEntry], broadcast: BroadcastMode) -> dict[str, Spread]:
    """Returns how the leaves are spread that should be sent, by name."""
    spreads: dict[str, Spread] = {}
    for entry in entries:
        if broadcast and _can_be_sent(entry) and (broadcast != "auto" or _is_shared_remote(entry)):
            counts = _counts_of(entry)
            if counts is not None:
                spreads[entry.name] = counts, [[leaf.shape, leaf.chunks, leaf.dtype.name] for leaf in entry.leaves]
    return spreads


def spread_entry(entry: PlanEntry, counts: Counts) -> SpreadEntry:
    """Makes the entry that loads a leaf in parts."""
    assert entry.leaf is not None and entry.view is not None
    sharding = _spread_sharding(entry.leaf.sharding, counts)
    leaf = dataclasses.replace(entry.leaf, sharding=sharding)
    nbytes = math.prod(entry.shape) * entry.view.dtype.itemsize // math.prod(counts)
    return SpreadEntry(entry, dataclasses.replace(entry, leaf=leaf, sharding=sharding), nbytes)


def batches_of(entries: Sequence[SpreadEntry], limit: int) -> Iterator[list[SpreadEntry]]:
    """Divides entries into batches that are sent at once, of at most `limit` loaded bytes.

    Entries that share stored bytes are in one batch, however large.
    """
    batch: list[SpreadEntry] = []
    for cluster in clusters_of(entries):
        if batch and sum(entry.nbytes for entry in [*batch, *cluster]) > limit:
            yield batch
            batch = []
        batch += cluster
    if batch:
        yield batch


def load_values(entries: Sequence[PlanEntry], buffers: dict[str, list[np.ndarray]]) -> dict[str, list[jax.Array]]:
    """Makes the arrays of unsigned integers that are sent, by name."""
    loaded: dict[str, list[jax.Array]] = {}
    with explicit_transfers():
        for entry in entries:
            assert entry.leaf is not None and entry.view is not None
            planes = [_planes(buffer) for buffer in buffers.pop(entry.name)]
            unsigned = _unsigned(entry.view.dtype)
            count = 2 if entry.view.dtype.kind == "c" else 1
            loaded[entry.name] = [
                sharded_array(entry.leaf, layout_of(entry), [plane[part] for plane in planes], unsigned)
                for part in range(count)
            ]
    return loaded


def send_values(batch: Sequence[SpreadEntry], loaded: Mapping[str, Sequence[jax.Array]]) -> dict[str, jax.Array]:
    """Reshards the loaded arrays of a batch, and returns the values by name."""
    untyped: Any = jax
    values: dict[str, jax.Array] = {}
    own = [spread.entry for spread in batch if spread.loading.boxes()]
    arrays = [array for entry in own for array in loaded[entry.name]]
    shardings = [_in_device_memory(entry) for entry in own for _ in loaded[entry.name]]
    sent = iter(untyped.device_put(arrays, shardings) if arrays else [])
    for entry in [spread.entry for spread in batch]:
        assert entry.leaf is not None and entry.leaf.sharding is not None and entry.view is not None
        if entry not in own:  # this process has no device of its mesh
            values[entry.name] = jax.make_array_from_single_device_arrays(
                entry.shape, entry.leaf.sharding, [], dtype=entry.leaf.dtype
            )
            continue
        planes = [next(sent) for _ in loaded[entry.name]]
        dtype = np.dtype(entry.view.dtype)
        value = planes[0] if dtype.kind == "u" else _cast(dtype, _in_device_memory(entry))(*planes)
        if value.sharding != entry.leaf.sharding:
            value = untyped.device_put(value, entry.leaf.sharding)
        check_value(entry, value)
        values[entry.name] = value
    return untyped.block_until_ready(values)


def _can_be_sent(entry: PlanEntry) -> bool:
    leaf, view = entry.leaf, entry.view
    if leaf is None or view is None or leaf.kind != "jax" or leaf.layout is not None:
        return False
    if any(isinstance(stored, ComputedLeaf) for stored in entry.leaves) or all(
        stored.is_value for stored in entry.leaves
    ):
        return False
    dtype = np.dtype(view.dtype)
    if dtype.hasobject or dtype in LOW_BITS or not (dtype.kind == "c" or dtype.itemsize in _BITCAST_BYTES):
        return False
    return spans_processes(leaf.sharding) and dtype == leaf.dtype


def _is_shared_remote(entry: PlanEntry) -> bool:
    """Returns True if several processes need the same bytes of a remote store."""
    assert entry.leaf is not None and entry.view is not None
    if not any(leaf.is_remote for leaf in entry.leaves):
        return False
    parts = _boxes_by_process(entry.leaf.sharding, entry.shape)
    return not _is_disjoint(entry, parts)


def _boxes_by_process(sharding: Any, shape: tuple[int, ...]) -> list[list[Box]]:
    boxes: dict[int, dict[Box, None]] = {}
    for device, index in _indices(sharding, shape):
        boxes.setdefault(device.process_index, {})[box_of_index(index or (), shape)] = None
    return [list(own) for own in boxes.values()]


def _is_disjoint(entry: PlanEntry, parts: Sequence[Sequence[Box]]) -> bool:
    """Returns True if no stored byte is read for two parts; a chunk is read as a whole."""
    together = _read_bytes(entry, [box for boxes in parts for box in boxes])
    return sum(_read_bytes(entry, boxes) for boxes in parts) == together


def _read_bytes(entry: PlanEntry, boxes: Iterable[Box]) -> int:
    view = entry.view
    assert view is not None
    reads = boxes_by_leaf((view, box) for box in boxes)
    return sum(stored_bytes(leaf, wanted) for leaf, wanted in reads if not leaf.is_value)


def _counts_of(entry: PlanEntry) -> Counts | None:
    """Returns the parts of each dimension, or None if no parts read disjoint bytes.

    The outermost dimension is divided first, by the largest divisor of the number of processes.
    """
    assert entry.leaf is not None
    sharding, shape = entry.leaf.sharding, tuple(entry.shape)
    assert sharding is not None
    devices = _devices_by_process(sharding)
    if 0 in shape or len(set(devices.values())) > 1:
        return None
    tried: list[Counts] = []
    for units in (_units(entry), shape):
        for first in range(len(shape)):
            counts = _divide(units, len(devices), [*range(first, len(shape)), *range(first)])
            if math.prod(counts) > 1 and counts not in tried:
                tried.append(counts)
    for counts in sorted(tried, key=math.prod, reverse=True):
        steps = [size // count for size, count in zip(shape, counts, strict=True)]
        if _is_disjoint(entry, [[box] for box in grid_boxes(shape, steps)]):
            return counts
    return None


def _units(entry: PlanEntry) -> tuple[int, ...]:
    """Returns the number of stored chunks of each dimension, or its size."""
    assert entry.view is not None
    leaf = entry.view.leaf
    if leaf is None or leaf.chunks is None:
        return entry.shape
    sizes = zip(entry.shape, leaf.chunks, strict=True)
    return tuple([size if size % chunk else size // chunk for size, chunk in sizes])


def _divide(units: Sequence[int], processes: int, axes: Iterable[int]) -> Counts:
    counts = [1] * len(units)
    for axis in axes:
        counts[axis] = math.gcd(units[axis], processes)
        processes //= counts[axis]
    return tuple(counts)


@functools.lru_cache(maxsize=1 << 12)
def _spread_sharding(sharding: Any, counts: Counts) -> NamedSharding:
    """Makes the sharding that spreads an array over the processes of a mesh, replicated within each of them."""
    devices = sorted(sharding.device_set, key=lambda device: (device.process_index, device.id))
    names = [f"axis{axis}" for axis in range(len(counts))]
    mesh = Mesh(np.asarray(devices).reshape(*counts, -1), (*names, "replica"))
    return NamedSharding(mesh, PartitionSpec(*names))


def _in_device_memory(entry: PlanEntry) -> Any:
    """Returns the sharding of an entry in its devices' default memory: XLA sends between no other memories."""
    assert entry.leaf is not None
    sharding: Any = entry.leaf.sharding
    kind = next(iter(sharding.device_set)).default_memory().kind
    return sharding if sharding.memory_kind == kind else sharding.with_memory_kind(kind)


def _unsigned(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"u{dtype.itemsize // 2 if dtype.kind == 'c' else dtype.itemsize}")


def _planes(buffer: np.ndarray) -> list[np.ndarray]:
    """Returns a buffer as unsigned integers; real and imaginary parts become two arrays."""
    unsigned = _unsigned(buffer.dtype)
    if buffer.dtype.kind != "c":
        return [buffer.view(unsigned)]
    parts = buffer.view(unsigned).reshape(*buffer.shape, 2)
    return [np.ascontiguousarray(parts[..., part]) for part in range(2)]


@functools.lru_cache(maxsize=1 << 10)
def _cast(dtype: np.dtype, sharding: Any) -> Any:
    """Returns the compiled function that reads unsigned integers as another dtype, bit by bit."""

    def cast(*planes: jax.Array) -> jax.Array:
        if dtype.kind == "b":
            return planes[0] != 0
        if dtype.kind == "c":
            real = np.dtype(f"f{dtype.itemsize // 2}")
            return jax.lax.complex(*[jax.lax.bitcast_convert_type(plane, real) for plane in planes])
        return jax.lax.bitcast_convert_type(planes[0], dtype)

    return jax.jit(cast, out_shardings=sharding)
