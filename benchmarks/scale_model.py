"""Models a restore by several processes: the requests and bytes of each at its store, and the least time of them.

Counts follow from shapes alone, by the geometry that the package itself decides and reads by. Nothing is opened: jobs
of 64 and 512 hosts are counted by `python -m benchmarks.scale_model`. `benchmarks.pods` compares the model with what a
store has counted.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from orbax_t5x.lazy import Box, ChecksummedRange, Leaf, ReadStats, Request, as_view
from orbax_t5x.lazy.box import full_box
from orbax_t5x.lazy.leaf import Checksums
from orbax_t5x.restoring.broadcast.chunks import counts_of, leaf_reads
from orbax_t5x.restoring.broadcast.needs import EntryNeeds, StoreKind, Stores
from orbax_t5x.restoring.broadcast.schedule import schedule_broadcast
from orbax_t5x.restoring.options import MEMORY_LIMIT_BYTES, BroadcastMode
from orbax_t5x.restoring.plan import PlanEntry
from tests.support.sparse_checkpoints import t5_xxl

Layout = Literal["replicated", "rows", "columns"]
Store = Literal["http", "s3", "local"]
Shapes = Mapping[str, tuple[int, ...]]
DTYPE = np.dtype(np.float32)

_CHUNKS = 8  # of each array that is stored in chunks, along its first dimension
_AHEAD_REQUESTS = 128  # under way for one array
_HEADER_BYTES = 1 << 16  # of safetensors; a longer one is requested by itself


class Costs(NamedTuple):
    """Requests of one opening and one execution: those of any checkpoint, and those of each array besides.

    `opening_waits` is the number of requests of an opening of which each has to wait for the one before.
    """

    opening_waits: int
    opening: int
    opening_of_array: int = 0
    checks: int = 0
    checks_of_array: int = 0


@dataclasses.dataclass(frozen=True)
class Format:
    """Format of a stored checkpoint.

    Attributes:
      web, bucket, local: requests of process 0 beside those for data: of opening, and of proving that nothing has
        changed. Of local files what is opened counts, and proofs do not.
      is_chunked: whether arrays are stored in chunks.
      is_summed: whether the format keeps checksums of arrays.
      inline_bytes: see `Leaf`.
    """

    name: str
    web: Costs
    local: Costs
    bucket: Costs | None = None
    is_chunked: bool = False
    is_summed: bool = False
    inline_bytes: int = 0

    def chunk_of(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Returns the chunk in which an array of this shape is stored; None where it is one byte range."""
        if not self.is_chunked or not shape:
            return None
        return (max(1, shape[0] // _CHUNKS), *shape[1:])


FORMATS = {
    one.name: one
    for one in (
        Format("safetensors", Costs(3, 3), Costs(0, 6), bucket=Costs(6, 31)),
        Format("bundle", Costs(3, 3), Costs(0, 7), is_summed=True),
        Format("t5x", Costs(4, 29, 1, 0, 1), Costs(0, 7, 2), bucket=Costs(4, 25, 2, 0, 1), is_chunked=True),
        Format("orbax", Costs(7, 51, 0, 1), Costs(0, 15), is_chunked=True, inline_bytes=1024),
    )
}


class Stored(NamedTuple):
    """Stored checkpoint: its format, the shapes of its arrays, and their chunks, which are not compressed.

    `nodes` are the sizes of what TensorStore reads to find chunks in a database of local files, in each process.
    """

    format: Format
    shapes: Shapes
    chunks: Mapping[str, tuple[int, ...] | None]
    nodes: tuple[int, ...] = ()

    @classmethod
    def of(cls, stored: Format, shapes: Shapes) -> Stored:
        """Returns a checkpoint whose arrays are cut into some chunks along their first dimension."""
        return cls(stored, shapes, {name: stored.chunk_of(shape) for name, shape in shapes.items()})


@dataclasses.dataclass(frozen=True)
class Job:
    """Job of several processes, each with some devices, that restores with one layout of arrays on all devices."""

    processes: int
    devices_each: int
    layout: Layout
    broadcast: BroadcastMode

    def split(self, shape: Sequence[int]) -> int | None:
        """Returns the dimension that is split over all devices; None for an array that is replicated."""
        if self.layout == "replicated" or not shape:
            return None
        dimension = 0 if self.layout == "rows" else len(shape) - 1
        return None if shape[dimension] % (self.processes * self.devices_each) else dimension

    def needers(self, shape: tuple[int, ...]) -> dict[Box, tuple[int, ...]]:
        """Returns the boxes of an array that devices need, with the processes that need each."""
        dimension = self.split(shape)
        whole = full_box(shape)
        if dimension is None:
            return {whole: tuple(range(self.processes))}
        devices = self.processes * self.devices_each
        size = shape[dimension] // devices
        return {
            (*whole[:dimension], (device * size, (device + 1) * size), *whole[dimension + 1 :]): (
                device // self.devices_each,
            )
            for device in range(devices)
        }


class Counts(NamedTuple):
    """Counts of one process at its store: requests of opening, of checks, for data, and the bytes of data."""

    opening: int
    checks: int
    data: int
    nbytes: int


class _ModelChecksums(Checksums):
    async def verify(self, stats: ReadStats, ranges: Sequence[ChecksummedRange]) -> bool:
        raise NotImplementedError


class ModelLeaf(Leaf):
    """Array that has a shape and no bytes."""

    dtype = DTYPE

    def __init__(self, stored: Stored, name: str):
        self.name: str = name
        self.shape: tuple[int, ...] = stored.shapes[name]
        self.chunks: tuple[int, ...] | None = stored.chunks[name]
        self.inline_bytes: int = stored.format.inline_bytes
        self._checksums = _ModelChecksums() if stored.format.is_summed else None

    @property
    def checksums(self) -> Checksums | None:
        return self._checksums

    async def read_into(self, requests: Sequence[Request], stats: ReadStats) -> None:
        raise NotImplementedError


def _needs_of(stored: Stored, name: str, job: Job) -> EntryNeeds:
    view = as_view(ModelLeaf(stored, name))
    entry = PlanEntry(name, (name,), view.shape, DTYPE, None, "read", view=view, leaves=view.leaves())
    needers = job.needers(view.shape)
    return EntryNeeds(entry, tuple(needers), tuple(needers.values()))


def _long_header(stored: Stored) -> int:
    """Returns 1 where the header of a safetensors file is requested once more."""
    if stored.format.name != "safetensors":
        return 0
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in stored.shapes.items()}
    return int(len(json.dumps(header, separators=(",", ":"))) > _HEADER_BYTES)


def predict(stored: Stored, job: Job, store: Store = "http") -> list[Counts]:
    """Counts what each process of a job asks its store for."""
    needs = [_needs_of(stored, name, job) for name in stored.shapes]
    kind = StoreKind.LOCAL if store == "local" else StoreKind.BUCKET
    stores = Stores(kind, kind) if job.broadcast == "auto" else None
    requests, nbytes = [0] * job.processes, [0] * job.processes
    unshared = needs
    readers: set[int] = set()  # of an array in a node, too, which is no request for data
    if job.broadcast:
        schedule = schedule_broadcast(needs, job.processes, MEMORY_LIMIT_BYTES, stores)
        alone = set(schedule.unshared)
        unshared = [one for one in needs if one.entry in alone]
        for chunk in schedule.chunks:
            readers.add(chunk.owner)
            counts = counts_of((whole.view, whole.box) for whole, _ in chunk.reads)
            requests[chunk.owner] += counts.requests
            nbytes[chunk.owner] += counts.nbytes
    for one in unshared:
        (leaf,) = one.leaves
        boxes: dict[int, list[Box]] = {}
        for box, needers in zip(one.boxes, one.needers, strict=True):
            for process in needers:
                boxes.setdefault(process, []).append(box)
        readers.update(boxes)
        for process, own in boxes.items():
            counts = leaf_reads(leaf, own)
            requests[process] += counts.requests
            nbytes[process] += counts.nbytes
    if store == "local":  # process 0 has read the nodes when it opened the database
        for process in range(1, job.processes):
            if process in readers:
                requests[process] += len(stored.nodes)
                nbytes[process] += sum(stored.nodes)
    costs = {"http": stored.format.web, "s3": stored.format.bucket or stored.format.web, "local": stored.format.local}[
        store
    ]
    opening = costs.opening + costs.opening_of_array * len(stored.shapes) + _long_header(stored)
    checks = costs.checks + costs.checks_of_array * len(stored.shapes)
    return [
        Counts(0 if process else opening, 0 if process else checks, requests[process], nbytes[process])
        for process in range(job.processes)
    ]


class Seconds(NamedTuple):
    """Least seconds of the stages of a restore that its store takes."""

    opening: float
    reading: float


def least_seconds(stored: Stored, counts: Sequence[Counts], delay: float, rate: float) -> Seconds:
    """Returns the least seconds at a store that waits before each answer, and answers so many requests a second.

    Args:
      stored: what is restored.
      counts: of each process.
      delay: seconds before each answer.
      rate: answers in a second, to all processes together; 0 for no limit.
    """
    opening, reading = sum(one.opening for one in counts), sum(one.checks + one.data for one in counts)
    waits = -(-max(one.data for one in counts) // _AHEAD_REQUESTS)
    limited = [requests / rate if rate else 0.0 for requests in (opening, reading)]
    # While one request has to wait for the one before, the store answers no other. The last of many requests that wait
    # for their turn waits for its own answer besides.
    return Seconds(stored.format.web.opening_waits * delay + limited[0], max(waits * delay, limited[1] + delay))


def totals(stored: Stored, job: Job) -> Counts:
    """Counts what all processes together ask for, once for each shape: arrays do not depend on one another."""
    found = np.zeros(2, np.int64)
    alike: dict[tuple[int, ...], list[str]] = {}
    for name, shape in stored.shapes.items():
        alike.setdefault(shape, []).append(name)
    for shape, names in alike.items():
        one = predict(Stored.of(stored.format, {names[0]: shape}), job)
        found += np.array([[one.data, one.nbytes] for one in one]).sum(axis=0) * len(names)
    costs = stored.format.web
    opening = costs.opening + costs.opening_of_array * len(stored.shapes) + _long_header(stored)
    return Counts(opening, costs.checks + costs.checks_of_array * len(stored.shapes), *found.tolist())


def main() -> None:
    """Prints the counts of jobs of 64 and 512 hosts that restore T5.1.1-XXL with its Adafactor slots."""
    shapes = {name: shape for name, (_, shape) in t5_xxl().items() if shape}
    print('| hosts | layout | format | opening, checks | each for itself | `broadcast="auto"` |')
    print("|---|---|---|---|---|---|")
    for hosts in (64, 512):
        for layout in ("replicated", "rows", "columns"):
            for stored in FORMATS.values():
                of = Stored.of(stored, shapes)
                alone, auto = (totals(of, Job(hosts, 1, layout, way)) for way in (False, "auto"))
                texts = [f"{one.data:,} requests, {one.nbytes / 1e9:,.1f} GB" for one in (alone, auto)]
                print(
                    f"| {hosts} | {layout} | {stored.name} | {alone.opening:,}, {alone.checks:,} |",
                    " | ".join(texts),
                    "|",
                )


if __name__ == "__main__":
    main()
