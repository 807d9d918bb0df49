"""Models a restore by several processes: what each must read, and how long that takes.

Bytes and requests are counted, by the package's own geometry (`readers.ranges.byte_runs`) and by the grid of chunks.
Seconds are a sum of what comes one after the other (opening, planning, reading, the exchange of checksums), where
reading takes as long as its slowest resource: reads, decoding and placing overlap. `benchmarks.scale` compares them
with measurements; nothing is said of stores and numbers of hosts that were not measured.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from orbax_t5x.lazy.box import Box, box_size, full_box
from orbax_t5x.readers.ranges.byte_range import MAX_GAP_BYTES
from orbax_t5x.readers.ranges.byte_runs import union_runs

_ITEMSIZE = 4  # float32, as T5X trains


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Leaves of one shape, and how many there are."""

    shape: tuple[int, ...]
    count: int


@dataclasses.dataclass(frozen=True)
class Tree:
    """State to restore, in float32."""

    leaves: tuple[Leaf, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(math.prod(leaf.shape) * leaf.count for leaf in self.leaves) * _ITEMSIZE

    @property
    def count(self) -> int:
        """Number of leaves."""
        return sum(leaf.count for leaf in self.leaves)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Layout of leaves on devices: each is split over all of them.

    Attributes:
      columns: whether kernels are split along their last dimension, as model parallelism splits what comes in, and not
        along their first.
    """

    columns: bool = False

    def split(self, shape: Sequence[int], devices: int) -> tuple[int | None, int]:
        """Returns the dimension that is split, and into how many ranges; (None, 1) for a leaf that is replicated."""
        ways = devices
        order = range(len(shape))
        for dimension in reversed(order) if self.columns else order:
            if shape[dimension] % ways == 0 and shape[dimension] >= ways:
                return dimension, ways
        return None, 1

    def boxes(self, shape: tuple[int, ...], devices: int, own_devices: int) -> list[Box]:
        """Returns the boxes that one process needs."""
        dimension, ways = self.split(shape, devices)
        whole = full_box(shape)
        if dimension is None:
            return [whole]
        size = shape[dimension] // ways
        return [
            (*whole[:dimension], (device * size, (device + 1) * size), *whole[dimension + 1 :])
            for device in range(min(own_devices, ways))
        ]


@dataclasses.dataclass(frozen=True)
class Format:
    """Format of stored arrays.

    Attributes:
      chunk_ways: into how many chunks along its first dimension an array is cut; None: it is one byte range.
    """

    name: str
    chunk_ways: int | None

    def reads(self, shape: tuple[int, ...], boxes: Sequence[Box]) -> tuple[int, int]:
        """Counts bytes and requests for the boxes of one array on one process."""
        return _byte_range_reads(shape, tuple(boxes)) if self.chunk_ways is None else self._chunk_reads(shape, boxes)

    def _chunk_reads(self, shape: tuple[int, ...], boxes: Sequence[Box]) -> tuple[int, int]:
        assert self.chunk_ways is not None
        if not shape:
            return _ITEMSIZE, 1
        rows = max(1, shape[0] // self.chunk_ways)
        chunks = {row for box in boxes if box_size(box) for row in range(box[0][0] // rows, -(-box[0][1] // rows))}
        return len(chunks) * rows * math.prod(shape[1:]) * _ITEMSIZE, len(chunks)


@functools.cache
def _byte_range_reads(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> tuple[int, int]:
    runs, _ = union_runs(shape, _ITEMSIZE, boxes, MAX_GAP_BYTES)
    return sum(run.length * run.times for run in runs), sum(run.times for run in runs)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs of the package, measured.

    Attributes:
      open_leaf: seconds for each leaf of a format, when it is opened.
      plan_leaf: for each leaf of the target.
      place_leaf: for each leaf that is read, in one thread (Python).
      place_shard: for each shard of it, likewise.
      request: for each read of a local file.
      byte: seconds of processor time for each byte of a format: reading, summing, decoding.
      start: seconds for a restore of nothing.
      exchange: seconds for the exchange of checksums among processes, by their number.
      leaf_bytes: host memory of a leaf of the checkpoint and its entry in the plan.
    """

    open_leaf: dict[str, float]
    plan_leaf: float
    place_leaf: float
    place_shard: float
    request: float
    byte: dict[str, float]
    start: float
    exchange: dict[str, float]
    leaf_bytes: float


@dataclasses.dataclass(frozen=True)
class Case:
    """Restore by some processes that divide the devices and the cores of one machine.

    Attributes:
      read_rate: bytes per second that the machine reads.
    """

    tree: Tree
    format: Format
    layout: Layout
    processes: int
    devices: int
    cores: int
    read_rate: float


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Bytes that all processes read together, and seconds of the whole restore."""

    all_bytes: float
    seconds: float


def predict(case: Case, costs: Costs) -> Prediction:
    """Counts the bytes and adds up the seconds of a restore."""
    own_devices = case.devices // case.processes
    read = requests = 0.0
    for leaf in case.tree.leaves:
        leaf_bytes, leaf_requests = case.format.reads(
            leaf.shape, case.layout.boxes(leaf.shape, case.devices, own_devices)
        )
        read += leaf.count * leaf_bytes
        requests += leaf.count * leaf_requests
    cores = max(1, case.cores // case.processes)
    leaves = case.tree.count
    reading = max(
        read * case.processes / (case.read_rate * case.cores),
        (read * costs.byte[case.format.name] + requests * costs.request) / cores,
        leaves * (costs.place_leaf + own_devices * costs.place_shard),
    )
    opening_and_planning = leaves * (costs.open_leaf[case.format.name] + costs.plan_leaf)
    exchange = costs.exchange[str(case.processes)] if case.processes > 1 else 0.0
    return Prediction(read * case.processes, opening_and_planning + reading + exchange)
