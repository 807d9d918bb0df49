"""Cuts a broadcast into chunks, sent or read.

It decides if sending is cheaper than reading.

No stored byte belongs to two chunks. One process reads a chunk, and finishes what views have left to do. For
`broadcast="auto"` both ways are counted, in requests and bytes of all processes together, and weighed by what the
checkpoint is stored on; all processes count the same, from what all of them need. Pure geometry: nothing is allocated,
read or sent.
"""

from __future__ import annotations

import collections
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from orbax_t5x import on_demand
from orbax_t5x.lazy import Box, Leaf, View
from orbax_t5x.lazy.box import bounding_box, box_size, union_size
from orbax_t5x.readers.ranges.windowed import count_reads
from orbax_t5x.restoring.broadcast.needs import EntryNeeds, StoreKind
from orbax_t5x.restoring.execute.groups import Piece, cut_clean, pieces_stored_bytes, place_of, stored_bytes, to_chunks
from orbax_t5x.restoring.plan import PlanEntry, boxes_by_leaf

# Of chunked arrays only.
_count_chunks: Callable[..., int] = on_demand.function("orbax_t5x.readers.array_kind", "count_chunks")

# So much of a byte range is read by one process where several need some of it. Gaps of 4 KiB are read over.
_RUN_BYTES = 256 << 10
# Rows and small neighbours are joined to chunks of one request. Larger: fewer processes read at once.
JOINED_BYTES = 1 << 20


class BroadcastChunk(NamedTuple):
    """Chunk: the pieces that a process reads at once.

    Attributes:
      pieces: what becomes of it; `box_index` is the index of a box of `EntryNeeds`.
      candidates: the processes that may read it.
      members: the processes that need some of it, ascending.
      reads: boxes of entries, each with the pieces within it. Pieces that are a box together are read as one: one
        request for a stored chunk, whose pieces TensorStore might else fetch one after the other.
      is_exchanged: whether each member receives what it needs only, and not all that the others need.
      owner, size: the candidate that reads it, and the bytes on its host meanwhile, results and scratch; once the
        schedule has chosen.
    """

    pieces: tuple[Piece, ...]
    candidates: tuple[int, ...]
    members: tuple[int, ...]
    reads: tuple[tuple[Piece, tuple[int, ...]], ...]
    is_exchanged: bool
    owner: int = -1
    size: int = 0


def divide(
    cluster: Sequence[EntryNeeds], gathered_bytes: int, exchanged_bytes: int, *, joins: bool = False
) -> list[BroadcastChunk] | None:
    """Divides a cluster into chunks of about so many bytes.

    `joins` puts pieces without common bytes into one chunk.

    None: no process can read some chunk. Values in memory are those of one process, and may be sharded: what is made
    with them is read by a process that needs all of it.
    """
    needers = {id(one.entry): one.needers for one in cluster}
    has_values = any(leaf.is_value for one in cluster for leaf in one.leaves)
    divided: list[BroadcastChunk] = []
    pieces = [
        Piece(one.entry, box_index, box) for one in cluster for box_index, box in enumerate(one.boxes) if box_size(box)
    ]
    chunk_bytes = exchanged_bytes if _is_exchanged(pieces, needers) else gathered_bytes
    for some in _joined(pieces, min(chunk_bytes, JOINED_BYTES)) if joins else _cut(pieces, chunk_bytes):
        sets = [set(needers[id(piece.entry)][piece.box_index]) for piece in some]
        members = tuple(sorted(set().union(*sets)))
        candidates = tuple(sorted(set(members).intersection(*sets))) if has_values else members
        if not candidates:
            return None
        reads = tuple(_joined_pieces(some))
        divided.append(BroadcastChunk(tuple(some), candidates, members, reads, _is_exchanged(some, needers)))
    return divided


def join_neighbours(chunks: Iterable[BroadcastChunk], limit: int) -> Iterator[BroadcastChunk]:
    """Joins small neighbouring chunks of the same processes up to `limit` bytes."""
    alike: dict[tuple[object, ...], list[tuple[tuple[str, int, bool], int, int, BroadcastChunk]]] = (
        collections.defaultdict(list)
    )
    for position, one in enumerate(chunks):
        size = sum(host_bytes(whole) for whole, _ in one.reads)
        place = place_of(one.pieces[0].entry.leaves[0])
        alike[one.members, one.candidates, one.is_exchanged, size < limit].append((place, position, size, one))
    for (*_, is_small), found in alike.items():
        held: list[BroadcastChunk] = []
        total = 0
        for _, _, size, one in sorted(found, key=operator.itemgetter(0, 1)) if is_small else found:
            if held and (total + size > limit or not is_small):
                yield _as_one(held)
                held, total = [], 0
            held.append(one)
            total += size
        yield _as_one(held)


def _as_one(chunks: Sequence[BroadcastChunk]) -> BroadcastChunk:
    if len(chunks) == 1:
        return chunks[0]
    pieces: list[Piece] = []
    reads: list[tuple[Piece, tuple[int, ...]]] = []
    for one in chunks:
        reads += [(whole, tuple(len(pieces) + number for number in inside)) for whole, inside in one.reads]
        pieces += one.pieces
    return chunks[0]._replace(pieces=tuple(pieces), reads=tuple(reads))


def _is_exchanged(pieces: Sequence[Piece], needers: Mapping[int, Sequence[Sequence[int]]]) -> bool:
    """Tests if point-to-point halves the bytes of an all-gather."""
    members: set[int] = set()
    needed = stored = 0
    for piece in pieces:
        some = needers[id(piece.entry)][piece.box_index]
        members.update(some)
        size = piece_bytes(piece)
        needed += size * len(some)
        stored += size
    return 2 * needed <= len(members) * stored


def _joined(pieces: list[Piece], chunk_bytes: int) -> Iterator[list[Piece]]:
    """Joins pieces without common bytes up to `chunk_bytes`."""
    joined: list[Piece] = []
    size = 0
    for _, of_entry in itertools.groupby(pieces, key=lambda piece: piece.entry):
        for piece in sorted(of_entry, key=lambda piece: piece.box):
            if joined and size + host_bytes(piece) > chunk_bytes:
                yield joined
                joined, size = [], 0
            joined.append(piece)
            size += host_bytes(piece)
    yield joined


def _cut(pieces: list[Piece], chunk_bytes: int) -> Iterator[list[Piece]]:
    """Cuts pieces between stored bytes, if possible."""
    apart = sum(pieces_stored_bytes([piece], with_neighbours) for piece in pieces)
    if len(pieces) > 1 and apart == pieces_stored_bytes(pieces, with_neighbours):
        for piece in pieces:
            yield from _cut([piece], chunk_bytes)
        return
    heads, pieces = _cut_rows(pieces, chunk_bytes)
    for head in heads:
        yield from (_cut(head, chunk_bytes) if sum(map(host_bytes, head)) > 2 * chunk_bytes else [head])
    while pieces and (size := sum(map(host_bytes, pieces))) > chunk_bytes:
        axes = range(max(len(piece.box) for piece in pieces))
        cuts = (cut_clean(pieces, size, chunk_bytes, axis, with_neighbours) for axis in axes)
        cut = next((cut for cut in cuts if cut is not None), None)
        if cut is None:
            break
        head, pieces = cut
        # What was cut along another dimension may still be cut along this one.
        yield from (_cut(head, chunk_bytes) if sum(map(host_bytes, head)) > 2 * chunk_bytes else [head])
    if pieces:
        yield pieces


def _cut_rows(pieces: list[Piece], chunk_bytes: int) -> tuple[list[list[Piece]], list[Piece]]:
    """Cuts pieces of a byte range with the same rows.

    The result is as in general, but all at once; the rest is returned. Each of many processes needs a piece of each of
    many chunks: what is looked at again for each chunk costs most.
    """
    first = pieces[0]
    if first.view.leaf is None or first.view.leaf.chunks is not None or len(first.box) < 2:
        return [], pieces
    if any(piece.entry is not first.entry or piece.box[0] != first.box[0] for piece in pieces):
        return [], pieces
    start, stop = first.box[0]
    row_bytes = sum(map(host_bytes, pieces)) // (stop - start)
    rows = max(1, chunk_bytes // row_bytes)
    edges = [start]
    while stop - edges[-1] > 1 and (stop - edges[-1]) * row_bytes > chunk_bytes:
        edges.append(edges[-1] + rows)
    below = [piece.box[1:] for piece in pieces]

    def between(edge: int, next_edge: int) -> list[Piece]:
        side = (edge, next_edge)
        return [Piece(piece.entry, piece.box_index, (side, *box)) for piece, box in zip(pieces, below, strict=True)]

    return [between(*pair) for pair in itertools.pairwise(edges)], between(edges[-1], stop)


def with_neighbours(leaf: Leaf, boxes: Iterable[Box]) -> int:
    """Counts as `stored_bytes`, but joins neighbours.

    Pieces in the same run of a byte range count as stored together. Columns of an array are read over the gaps between
    them: two processes that read some of one row would read it twice.
    """
    if leaf.chunks is not None or not leaf.shape:
        return stored_bytes(leaf, boxes)
    *outer, last = leaf.shape
    chunks = (*(1 for _ in outer), max(1, min(last, _RUN_BYTES // leaf.dtype.itemsize)))
    return leaf.bytes_of(tuple([to_chunks(box, chunks, leaf.shape) for box in boxes]))


def _joined_pieces(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, tuple[int, ...]]]:
    """Joins each entry's pieces if they form a box."""
    by_entry: dict[PlanEntry, list[int]] = {}
    for number, piece in enumerate(pieces):
        by_entry.setdefault(piece.entry, []).append(number)
    for numbers in by_entry.values():
        boxes = tuple([pieces[number].box for number in numbers])
        whole = bounding_box(boxes)
        if union_size(boxes) == box_size(whole):
            yield pieces[numbers[0]]._replace(box=whole), tuple(numbers)
        else:
            yield from ((pieces[number], (number,)) for number in numbers)


def piece_bytes(piece: Piece) -> int:
    """Returns the bytes of a piece."""
    return box_size(piece.box) * piece.view.dtype.itemsize


def host_bytes(piece: Piece) -> int:
    """Returns the host bytes of a piece and its computation."""
    return piece_bytes(piece) + piece.view.scratch_bytes(piece.box)


# A request costs as much as so many bytes: what a connection receives during one round trip. A disk of each host is
# not here: nothing is sent then.
REQUEST_BYTES = {StoreKind.SHARED: 64 << 10, StoreKind.BUCKET: 256 << 10}
# A byte sent between two hosts, in bytes that the store serves: hosts have one store together, and each its network.
_SENT_BYTE = {StoreKind.SHARED: 1 / 2, StoreKind.BUCKET: 1 / 8}


class ReadCounts(NamedTuple):
    """Counts of all processes' reads of a store together."""

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
        """True if a single process reads and sends."""
        if self.once is None or self.store is StoreKind.LOCAL:
            return False
        request = REQUEST_BYTES[self.store]
        own, once = (counts.nbytes + counts.requests * request for counts in (self.own, self.once))
        return once + self.bytes_sent * _SENT_BYTE[self.store] < own


def may_join(cluster: Sequence[EntryNeeds], store: StoreKind) -> bool:
    """Tests if fewer reads of byte ranges may repay sending."""
    if store is StoreKind.LOCAL or all(leaf.chunks is not None for one in cluster for leaf in one.leaves):
        return False
    reads = sum(len(needers) for one in cluster for needers in one.needers)
    nbytes = sum(box_size(box) * one.view.dtype.itemsize for one in cluster for box in one.boxes)
    return nbytes * _SENT_BYTE[store] < 2 * reads * REQUEST_BYTES[store]


def decide_reads(
    cluster: Sequence[EntryNeeds], divided: Sequence[BroadcastChunk] | None, store: StoreKind
) -> ReadDecision:
    """Decides about entries that share stored bytes."""
    own = _own_reads(cluster)
    if divided is None:
        return ReadDecision(store, own, None)
    needers = {id(one.entry): one.needers for one in cluster}
    once = ReadCounts(0, 0)
    sent = 0
    for chunk in divided:
        once = once.plus(counts_of((whole.view, whole.box) for whole, _ in chunk.reads))
        for piece in chunk.pieces:
            # The owner is any of the members: on average it needs of a piece what the others do.
            received = piece_bytes(piece) * len(needers[id(piece.entry)][piece.box_index])
            sent += received * (len(chunk.members) - 1) // len(chunk.members)
    return ReadDecision(store, own, once, sent)


def _own_reads(cluster: Sequence[EntryNeeds]) -> ReadCounts:
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
    """Counts a process's reads of views' boxes together."""
    total = ReadCounts(0, 0)
    for leaf, boxes in boxes_by_leaf(items):
        if not leaf.is_value:
            total = total.plus(leaf_reads(leaf, boxes))
    return total


def leaf_reads(leaf: Leaf, boxes: Sequence[Box]) -> ReadCounts:
    """Counts requests and bytes for boxes of a leaf.

    They are of stored chunks, or of byte ranges with the small gaps between them. A chunk that may be stored in a node
    of a database counts as it is in memory, and is compressed there.
    """
    boxes = [box for box in boxes if box_size(box)]
    if not boxes or math.prod(leaf.chunks or leaf.shape) * leaf.dtype.itemsize <= leaf.inline_bytes:
        return ReadCounts(0, 0)
    if leaf.chunks is not None:
        return ReadCounts(_count_chunks(boxes, leaf.chunks), stored_bytes(leaf, boxes))
    return ReadCounts(*count_reads(leaf.shape, leaf.dtype, boxes, is_summed=leaf.checksums is not None))
