"""Arrays in memory as they are when an asynchronous save begins, for views over them that are written later.

The caller of an asynchronous save may overwrite NumPy arrays, and give `jax.Array`s away, as soon as it returns. Of the
first a copy is kept; of the second the host's copy of each shard that is replica 0, which on CPU is the shard's own
memory. What views make of them is computed a chunk at a time, so no array that a transform makes is ever whole on the
host.
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
        self._parts: list[tuple[Box, np.ndarray]] = list(_parts(leaf.value, self._array))

    def read_blocking(self, requests: Sequence[Request], stats: ReadStats) -> None:
        """Copies boxes of what is kept."""
        for box, out in requests:
            for place, data in self._parts:
                part = intersect(box, place)
                if part is not None:
                    out[slices_within(part, box)] = data[slices_within(part, place)]


def _parts(value: Any, array: np.ndarray) -> Iterable[tuple[Box, np.ndarray]]:
    if not isinstance(value, jax.Array):
        return [(full_box(array.shape), np.array(array))]
    boxes = written_boxes(value.sharding, value.shape)
    shards = [shard for shard in value.addressable_shards if shard.device in boxes]
    for shard in shards:
        shard.data.copy_to_host_async()
    return [(boxes[shard.device], np.asarray(shard.data)) for shard in shards]


def snapshot_values(view: View, held: dict[Leaf, Leaf]) -> None:
    """Keeps the arrays in memory that a view is made of, each once; `held` has what is to be read instead of each."""
    for leaf in view.leaves():
        if isinstance(leaf, ValueLeaf) and leaf not in held:
            held[leaf] = SnapshotLeaf(leaf)
