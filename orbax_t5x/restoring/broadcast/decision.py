"""Decides for leaves whether each process reads its own boxes, or one process reads and sends.

Both ways are counted, in requests and bytes of all processes together, and weighed by what the checkpoint is stored on.
All processes count the same, from what all of them need. Pure geometry: nothing is read.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from orbax_t5x.lazy import Box, Leaf, View
from orbax_t5x.lazy.box import box_size
from orbax_t5x.readers.chunk_grid import count_chunks
from orbax_t5x.readers.ranges.byte_range import count_reads
from orbax_t5x.restoring.broadcast.needs import EntryNeeds
from orbax_t5x.restoring.broadcast.stores import StoreKind
from orbax_t5x.restoring.execute.stages import Piece, stored_bytes
from orbax_t5x.restoring.plan_data import boxes_by_leaf

# A request costs as much as so many bytes: what a connection receives during one round trip. A disk of each host is
# not here: nothing is sent then.
_REQUEST_BYTES = {StoreKind.SHARED: 64 << 10, StoreKind.BUCKET: 256 << 10}
# A byte sent between two hosts, in bytes that the store serves: hosts have one store together, and each its network.
_SENT_BYTE = {StoreKind.SHARED: 1 / 2, StoreKind.BUCKET: 1 / 8}


class ReadCounts(NamedTuple):
    """Counts of what all processes together take from a store."""

    requests: int
    nbytes: int

    def plus(self, other: ReadCounts) -> ReadCounts:
        """Adds two counts."""
        return ReadCounts(self.requests + other.requests, self.nbytes + other.nbytes)


class ReadDecision(NamedTuple):
    """Decision about leaves that share stored bytes.

    Attributes:
      store: what they are stored on.
      own: what is read where each process reads its own boxes.
      once: what is read where one process reads and sends; None where nothing can be sent, as no stored byte is needed
        by two processes, or no process can read what is sent.
      bytes_sent: what the processes send each other then.
    """

    store: StoreKind
    own: ReadCounts
    once: ReadCounts | None
    bytes_sent: int = 0

    @property
    def is_broadcast(self) -> bool:
        """True where one process reads and sends."""
        if self.once is None or self.store is StoreKind.LOCAL:
            return False
        request = _REQUEST_BYTES[self.store]
        own, once = (counts.nbytes + counts.requests * request for counts in (self.own, self.once))
        return once + self.bytes_sent * _SENT_BYTE[self.store] < own


class SharedReads(NamedTuple):
    """Reads of one chunk of a broadcast: what becomes of it, the pieces that are read, and who needs some of it."""

    pieces: Sequence[Piece]
    reads: Sequence[Piece]
    members: Sequence[int]


def decide_reads(cluster: Sequence[EntryNeeds], chunks: Iterable[SharedReads] | None, store: StoreKind) -> ReadDecision:
    """Decides about entries that share stored bytes; without `chunks` nothing can be sent."""
    own = _own_reads(cluster)
    if chunks is None:
        return ReadDecision(store, own, None)
    needers = {id(one.entry): one.needers for one in cluster}
    once = ReadCounts(0, 0)
    sent = 0
    for pieces, reads, members in chunks:
        once = once.plus(counts_of((piece.view, piece.box) for piece in reads))
        for piece in pieces:
            # The owner is any of the members: on average it needs of a piece what the others do.
            received = box_size(piece.box) * piece.view.dtype.itemsize * len(needers[id(piece.entry)][piece.box_index])
            sent += received * (len(members) - 1) // len(members)
    return ReadDecision(store, own, once, sent)


def _own_reads(cluster: Sequence[EntryNeeds]) -> ReadCounts:
    """Counts what the processes read for themselves; those that need the same boxes are counted together."""
    by_process: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
    for number, one in enumerate(cluster):
        for index, needers in enumerate(one.needers):
            for process in needers:
                by_process[process].append((number, index))
    alike = collections.Counter(map(tuple, by_process.values()))
    total = ReadCounts(0, 0)
    for boxes, processes in alike.items():
        counts = counts_of((cluster[number].view, cluster[number].boxes[index]) for number, index in boxes)
        total = total.plus(ReadCounts(counts.requests * processes, counts.nbytes * processes))
    return total


def counts_of(items: Iterable[tuple[View, Box]]) -> ReadCounts:
    """Counts what one process takes for boxes of views that it reads together."""
    total = ReadCounts(0, 0)
    for leaf, boxes in boxes_by_leaf(items):
        if not leaf.is_value:
            total = total.plus(leaf_reads(leaf, boxes))
    return total


def leaf_reads(leaf: Leaf, boxes: Sequence[Box]) -> ReadCounts:
    """Counts requests and bytes for boxes of a leaf: stored chunks, or byte ranges with the small gaps between them.

    A chunk that may be stored in a node of a database counts as it is in memory, and is compressed there.
    """
    boxes = [box for box in boxes if box_size(box)]
    if not boxes or math.prod(leaf.chunks or leaf.shape) * leaf.dtype.itemsize <= leaf.inline_bytes:
        return ReadCounts(0, 0)
    if leaf.chunks is not None:
        return ReadCounts(count_chunks(boxes, leaf.chunks), stored_bytes(leaf, boxes))
    return ReadCounts(*count_reads(leaf.shape, leaf.dtype, boxes, is_summed=leaf.checksums is not None))
