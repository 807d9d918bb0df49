"""Snapshots of arrays in memory for asynchronous saves.

Views over them are written later, with the values at the save's begin. The caller of an asynchronous save may overwrite
NumPy arrays, and donate `jax.Array`s, as soon as it returns. NumPy arrays are copied; of a `jax.Array` the host's copy
of each shard that is replica 0 is kept, which on CPU is the shard's own memory. Views over them are computed a chunk at
a time, so no array that a transform makes is ever whole on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from orbax_t5x.handlers.type_handlers.checksums import written_boxes
from orbax_t5x.lazy import Box, Leaf, ReadStats, Request, ValueLeaf, View, full_box, intersect, slices_within


class SnapshotLeaf(ValueLeaf):
    """Value leaf with a copy of the elements as they are now."""

    def __init__(self, leaf: ValueLeaf):
        super().__init__(leaf.value, leaf.name)
        self._copies: list[tuple[Box, np.ndarray]] = list(_copies(leaf.value, self._array))

    def read_blocking(self, requests: Sequence[Request], stats: ReadStats) -> None:
        """Copies boxes of the elements."""
        for box, out in requests:
            for copied, data in self._copies:
                common = intersect(box, copied)
                if common is not None:
                    out[slices_within(common, box)] = data[slices_within(common, copied)]


def _copies(value: Any, array: np.ndarray) -> Iterable[tuple[Box, np.ndarray]]:
    if not isinstance(value, jax.Array):
        return [(full_box(array.shape), np.array(array))]
    boxes = written_boxes(value.sharding, value.shape)
    shards = [shard for shard in value.addressable_shards if shard.device in boxes]
    for shard in shards:
        shard.data.copy_to_host_async()
    return [(boxes[shard.device], np.asarray(shard.data)) for shard in shards]


def spans_processes(view: View) -> bool:
    """Tests if a view has an array that spans processes.

    The array is in memory.
    """
    values = [leaf.value for leaf in view.leaves() if isinstance(leaf, ValueLeaf)]
    return any(isinstance(value, jax.Array) and not value.is_fully_addressable for value in values)


def snapshot_values(view: View, snapshots: dict[Leaf, Leaf]) -> None:
    """Copies a view's arrays in memory into `snapshots`.

    Each is copied once; the copies are read instead.
    """
    for leaf in view.leaves():
        if isinstance(leaf, ValueLeaf) and leaf not in snapshots:
            snapshots[leaf] = SnapshotLeaf(leaf)
