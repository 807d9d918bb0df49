"""A model of a restore on many hosts: what each host must read, and how long each resource takes for it.

Bytes and requests are counted, by the package's own geometry (`readers.ranges.byte_runs`) and by the grid of chunks.
Times are a sum of what comes one after the other (opening, planning, reading, the exchange of checksums), where reading
takes as long as its slowest resource: reads, decoding and placing overlap. What it leaves out: failures and retries,
stragglers, other users of a store, and what a job compiles before its first step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

from orbax_t5x.lazy.box import Box, box_size, full_box
from orbax_t5x.readers.ranges.byte_range import MAX_GAP_BYTES
from orbax_t5x.readers.ranges.byte_runs import union_runs

_ITEMSIZE = 4  # float32, as T5X trains


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Arrays of one shape: `count` of them."""

    shape: tuple[int, ...]
    count: int

    @property
    def nbytes(self) -> int:
        """Of one."""
        return math.prod(self.shape) * _ITEMSIZE


@dataclasses.dataclass(frozen=True)
class Tree:
    """A state to restore: parameters and Adafactor's slots, in float32."""

    name: str
    leaves: tuple[Leaf, ...]

    @property
    def nbytes(self) -> int:
        """Of all leaves."""
        return sum(leaf.nbytes * leaf.count for leaf in self.leaves)

    @property
    def count(self) -> int:
        """How many leaves."""
        return sum(leaf.count for leaf in self.leaves)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How leaves lie on devices: split over `ways` of them, the rest hold replicas.

    Attributes:
      ways: over how many devices a leaf is split; None: over all.
      columns: whether kernels are split along their last dimension, as model parallelism splits what comes in, and not
        along their first.
    """

    name: str
    ways: int | None
    columns: bool = False

    def split(self, shape: Sequence[int], devices: int) -> tuple[int | None, int]:
        """(the dimension that is split, into how many parts); (None, 1) for a leaf that is replicated."""
        ways = min(self.ways or devices, devices)
        order = range(len(shape))
        for dimension in reversed(order) if self.columns else order:
            if shape[dimension] % ways == 0 and shape[dimension] >= ways:
                return dimension, ways
        return None, 1

    def boxes(self, shape: tuple[int, ...], devices: int, devices_per_host: int) -> list[Box]:
        """The boxes that one host needs."""
        dimension, ways = self.split(shape, devices)
        whole = full_box(shape)
        if dimension is None:
            return [whole]
        step = shape[dimension] // ways
        return [
            (*whole[:dimension], (part * step, (part + 1) * step), *whole[dimension + 1 :])
            for part in range(min(devices_per_host, ways))
        ]


@dataclasses.dataclass(frozen=True)
class Format:
    """How arrays are stored, and the reads that follow one another when a checkpoint is opened.

    Attributes:
      chunk_ways: into how many chunks along its first dimension an array is cut; None: it is one byte range.
      chain: reads that depend on one another.
      metadata_requests: further reads for each leaf, on average.
    """

    name: str
    chunk_ways: int | None
    chain: int
    metadata_requests: float

    def reads(self, shape: tuple[int, ...], boxes: Sequence[Box]) -> tuple[int, int]:
        """(bytes read, requests) for the boxes of one array on one host."""
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
class Store:
    """Where a checkpoint lies.

    Attributes:
      host_rate: bytes per second that one host can take.
      rate: bytes per second that it gives to all hosts together.
      latency: seconds before the first byte of an answer.
      in_flight: requests that one host has under way.
      request_rate: requests per second that it answers to all hosts together.
      piece: the most bytes of one request.
    """

    name: str
    host_rate: float
    rate: float
    latency: float
    in_flight: int
    request_rate: float
    piece: int


@dataclasses.dataclass(frozen=True)
class Host:
    """What a host has.

    Attributes:
      cores: that decode and sum.
      network: bytes per second to other hosts.
      transfer: bytes per second to its devices.
    """

    devices: int
    device_bytes: int
    cores: int
    network: float
    transfer: float
    memory_limit: int = 256 << 20


@dataclasses.dataclass(frozen=True)
class Costs:
    """Processor time of the package, measured.

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

    def exchange_of(self, processes: int) -> float:
        """Seconds, growing with the logarithm of the processes beyond those that were measured."""
        if processes == 1:
            return 0.0
        known = {int(count): seconds for count, seconds in self.exchange.items()}
        largest = max(known)
        return known.get(processes, known[largest] * max(1.0, math.log2(processes) / math.log2(largest)))


@dataclasses.dataclass(frozen=True)
class Case:
    """One restore."""

    tree: Tree
    format: Format
    layout: Layout
    store: Store
    host: Host
    hosts: int
    broadcast: bool = False


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a restore takes.

    Attributes:
      fits: whether the shards fit into the devices' memory.
      host_bytes, host_requests: that one host reads.
      all_bytes, all_requests: that all hosts read together.
      first, last: seconds until the first and the last shard is in place.
      host_memory: bytes of buffers, metadata and plan on one host.
      bottleneck: the resource that takes longest.
      seconds: of each part.
    """

    fits: bool
    host_bytes: float
    host_requests: float
    all_bytes: float
    all_requests: float
    first: float
    last: float
    host_memory: float
    bottleneck: str
    seconds: dict[str, float]


def predict(case: Case, costs: Costs) -> Prediction:
    """Counts and times of a restore."""
    host, store, hosts = case.host, case.store, case.hosts
    devices = hosts * host.devices
    needed = read = requests = received = shards = 0.0
    for leaf, boxes in _boxes(case):
        leaf_bytes, leaf_requests = case.format.reads(leaf.shape, boxes)
        needed_bytes = sum(map(box_size, boxes)) * _ITEMSIZE
        if case.broadcast:
            # Each stored byte is read by one host: byte ranges by whole rows, chunks once each.
            leaf_bytes = leaf.nbytes / hosts
            leaf_requests = (case.format.chunk_ways or 1) / hosts
            received += leaf.count * max(0.0, needed_bytes - leaf_bytes)
        leaf_requests = max(leaf_requests, leaf_bytes / store.piece)
        needed += leaf.count * needed_bytes
        read += leaf.count * leaf_bytes
        requests += leaf.count * leaf_requests
        shards += leaf.count * host.devices
    all_bytes, all_requests = read * hosts, requests * hosts
    opening_requests = case.format.chain + case.tree.count * case.format.metadata_requests
    opening = (
        costs.start
        + case.tree.count * costs.open_leaf[case.format.name]
        + case.format.chain * store.latency
        + opening_requests * max(store.latency / store.in_flight, hosts / store.request_rate)
    )
    planning = case.tree.count * costs.plan_leaf
    reading = {
        "a host's way to the store": read / store.host_rate,
        "the store's bytes": all_bytes / store.rate,
        "waits for requests": requests * store.latency / store.in_flight,
        "the store's requests": all_requests / store.request_rate,
        "decoding and sums": (read * costs.byte[case.format.name] + requests * costs.request) / host.cores,
        "Python for each leaf": case.tree.count * costs.place_leaf + shards * costs.place_shard,
        "transfer to devices": needed / host.transfer,
        "network between hosts": received / host.network,
    }
    exchange = costs.exchange_of(hosts)
    parts = {"opening": opening, "planning": planning, **reading, "exchange of checksums": exchange}
    slowest = max(reading.values())
    largest = max(leaf.nbytes / max(1, case.layout.split(leaf.shape, devices)[1]) for leaf in case.tree.leaves)
    buffers = min(needed, max(host.memory_limit, largest * host.devices))
    return Prediction(
        fits=needed / host.devices <= host.device_bytes,
        host_bytes=read,
        host_requests=requests,
        all_bytes=all_bytes,
        all_requests=all_requests,
        first=opening + planning + store.latency + slowest * min(1.0, host.memory_limit / 16 / max(1.0, needed)),
        last=opening + planning + slowest + exchange,
        host_memory=buffers + case.tree.count * costs.leaf_bytes,
        bottleneck=max(parts, key=lambda name: parts[name]),
        seconds=parts,
    )


def _boxes(case: Case) -> Iterator[tuple[Leaf, list[Box]]]:
    devices = case.hosts * case.host.devices
    for leaf in case.tree.leaves:
        yield leaf, case.layout.boxes(leaf.shape, devices, case.host.devices)
