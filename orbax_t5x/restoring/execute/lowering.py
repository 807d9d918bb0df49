"""Boxes of views become reads of leaves: each distinct box of a leaf once, in slabs where scratch would grow large."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from orbax_t5x.lazy import Box, Leaf, Request, View

# Scratch that one lowering may need; a view that needs more is read in slabs of its leading dimension.
SCRATCH_BYTES = 16 << 20


class Shard(NamedTuple):
    """One box of one entry, and the buffer that becomes it."""

    view: View
    box: Box
    out: np.ndarray


def scratch(view: View, box: Box) -> int:
    """Scratch that reading a box of a view into a contiguous buffer needs; most views need none."""
    return view.scratch_bytes(box)


def slabs(shards: Iterable[Shard]) -> Iterable[list[Shard]]:
    """The shards to read together: all that need little scratch, then each other one in slabs of its leading
    dimension.
    """
    light: list[Shard] = []
    heavy: list[Shard] = []
    for shard in shards:
        (heavy if scratch(shard.view, shard.box) > SCRATCH_BYTES else light).append(shard)
    if light:
        yield light
    for shard in heavy:
        for part in _split(shard):
            yield [part]


def _split(shard: Shard) -> Iterable[Shard]:
    needed = scratch(shard.view, shard.box)
    if not shard.box:
        yield shard
        return
    start, stop = shard.box[0]
    rows = max(1, (stop - start) * SCRATCH_BYTES // needed)
    leading = [
        leaf.chunks[0]
        for leaf in shard.view.leaves()
        if leaf.chunks and len(leaf.shape) and leaf.shape[0] == shard.view.shape[0]
    ]
    if leading:
        # A slab that ends inside a chunk has the chunk decoded again for the next slab.
        rows = max(leading) * max(1, rows // max(leading))
    for low in range(start, stop, rows):
        high = min(stop, low + rows)
        yield Shard(shard.view, ((low, high), *shard.box[1:]), shard.out[low - start : high - start])


def lower_shards(shards: Sequence[Shard]) -> tuple[list[tuple[Leaf, list[Request]]], list[Callable[[], None]]]:
    """Reads by leaf, each distinct box once, and what to do after them, in order."""
    reads: dict[int, tuple[Leaf, dict[Box, Request]]] = {}
    copies: list[Callable[[], None]] = []
    finish: list[Callable[[], None]] = []
    for view, box, out in shards:
        lowered = view.lower(box, out)
        finish.extend(lowered.finish)
        for leaf, request in lowered.reads:
            _, requests = reads.setdefault(id(leaf), (leaf, {}))
            first = requests.setdefault(request.box, request)
            if first is not request:
                copies.append(_Copy(first.out, request.out))
    return [(leaf, list(requests.values())) for leaf, requests in reads.values()], [*copies, *finish]


@dataclasses.dataclass(frozen=True)
class _Copy:
    source: np.ndarray
    out: np.ndarray

    def __call__(self) -> None:
        self.out[...] = self.source
