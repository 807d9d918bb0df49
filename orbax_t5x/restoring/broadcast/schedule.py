"""Schedules a broadcast: which process reads what, and in which rounds it is sent.

All processes derive the same schedule from what all of them need. What is stored is cut into *chunks*, so that no
stored byte belongs to two of them. One process reads a chunk, and finishes what views have left to do; the others that
need some of it get that from the owner. Owners are chosen so that all read about as much. The chunks are sent in
*rounds*: in one round each member sends the others a buffer of bytes of one size. Rounds have one order, and each
process takes part in those that it is a member of, in that order: no circle of processes wait for each other. Pure
geometry: nothing is allocated, read or sent.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from orbax_t5x.lazy import Box, Leaf
from orbax_t5x.lazy.box import bounding_box, box_size, union_size
from orbax_t5x.restoring.broadcast.decision import ReadDecision, SharedReads, decide_reads
from orbax_t5x.restoring.broadcast.needs import EntryNeeds
from orbax_t5x.restoring.broadcast.stores import Stores
from orbax_t5x.restoring.execute.groups import clusters_of
from orbax_t5x.restoring.execute.stages import Piece, cut_clean, pieces_stored_bytes, stored_bytes, to_chunks
from orbax_t5x.restoring.plan_data import PlanEntry

# Each message of a send buffer begins at a multiple, so that its elements are aligned.
ALIGNMENT = 64
# A chunk is read at once. Larger: reading and sending overlap less. Smaller: more requests.
_CHUNK_BYTES = 16 << 20
# So much of a byte range is read by one process where several need some of it. Gaps of 4 KiB are read over.
_RUN_BYTES = 256 << 10
# Below this a round costs as much as it does without a byte.
_LEAST_BUFFER_BYTES = 64 << 10
_LEAST_ROUNDED_BYTES = 4 << 10
# What a process holds beside the buffers that it receives, in buffers: its own, and the chunks that this and the next
# are made of.
_OWN_BUFFERS = 5


class Message(NamedTuple):
    """Message: a box within one piece of a chunk, both by number, as it is sent."""

    chunk: int
    piece: int
    box: Box
    size: int


@dataclasses.dataclass(frozen=True)
class BroadcastChunk:
    """Chunk: what one process reads at once.

    Attributes:
      owner: the process that reads it.
      members: the processes that need some of it, ascending.
      pieces: what becomes of it; `box_index` is the index of a box of `EntryNeeds`.
      reads: boxes of entries, each with the pieces within it. Pieces that are a box together are read as one: one
        request for a stored chunk, whose pieces TensorStore might else fetch one after the other.
      size: bytes on the owner's host while it is read: results and scratch.
    """

    owner: int
    members: tuple[int, ...]
    pieces: tuple[Piece, ...]
    reads: tuple[tuple[Piece, tuple[int, ...]], ...]
    size: int


@dataclasses.dataclass(frozen=True)
class BroadcastRound:
    """Round of a broadcast: what some processes send one another at once.

    The messages are by member, in order; `buffer_bytes` are those of each send buffer, the same for all.
    """

    members: tuple[int, ...]
    messages: tuple[tuple[Message, ...], ...]
    buffer_bytes: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Schedule of a broadcast; `unshared` is what each process reads for itself.

    `decisions` are those about each entry, by name, where it was decided.
    """

    unshared: tuple[PlanEntry, ...]
    needs: Mapping[PlanEntry, EntryNeeds]
    chunks: tuple[BroadcastChunk, ...]
    rounds: tuple[BroadcastRound, ...]
    decisions: Mapping[str, ReadDecision]


def schedule_broadcast(
    needs: Sequence[EntryNeeds], processes: int, limit: int, stores: Stores | None = None
) -> Schedule:
    """Schedules what all processes need, in plan order, with `limit` bytes in flight in each.

    With `stores`, only what costs less when it is read once and sent than when each process reads it for itself.
    """
    unshared: list[PlanEntry] = []
    sent: list[EntryNeeds] = []
    chunks: list[BroadcastChunk] = []
    load = [0] * processes
    decisions: dict[str, ReadDecision] = {}
    chunk_bytes = min(_CHUNK_BYTES, _buffer_limit(limit, processes))
    for cluster in clusters_of(needs, _with_neighbours):
        divided = None if _is_unshared(cluster) else _divide(cluster, chunk_bytes)
        if stores is not None:
            decision = decide_cluster(cluster, divided, stores)
            decisions.update((one.entry.name, decision) for one in cluster)
            divided = divided if decision.is_broadcast else None
        if divided is None:
            unshared += [one.entry for one in cluster]
            continue
        sent += cluster
        for one in divided:
            owner = min(one.candidates, key=lambda process: (load[process], process))
            load[owner] += sum(map(_piece_bytes, one.pieces))
            size = sum(_host_bytes(whole) for whole, _ in one.reads)
            chunks.append(BroadcastChunk(owner, one.members, one.pieces, one.reads, size))
    by_entry = {one.entry: one for one in sent}
    rounds = tuple(_rounds(chunks, by_entry, limit))
    return Schedule(tuple(unshared), by_entry, tuple(chunks), rounds, decisions)


def message_starts(messages: Iterable[Message]) -> Iterator[tuple[int, Message]]:
    """Yields each message of a send buffer with the byte at which it begins."""
    start = 0
    for message in messages:
        yield start, message
        start += _aligned(message.size)


# -- chunks


def decide_cluster(
    cluster: Sequence[EntryNeeds], divided: Sequence[_DividedChunk] | None, stores: Stores
) -> ReadDecision:
    """Decides about entries that share stored bytes."""
    chunks = None
    if divided is not None:
        chunks = [SharedReads(one.pieces, [whole for whole, _ in one.reads], one.members) for one in divided]
    return decide_reads(cluster, chunks, stores.of(leaf for one in cluster for leaf in one.leaves))


def _is_unshared(cluster: Sequence[EntryNeeds]) -> bool:
    """Tests whether no stored byte is needed by two processes."""
    by_process: dict[int, dict[Leaf, list[Box]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for one in cluster:
        for box, needers in zip(one.boxes, one.needers, strict=True):
            for leaf, requested in one.view.requests(box):
                if leaf.is_value or not box_size(requested):
                    continue
                if len(needers) > 1:
                    return False
                for process in needers:
                    by_process[process][leaf].append(requested)
    if len(by_process) < 2:
        return True
    together: dict[Leaf, list[Box]] = collections.defaultdict(list)
    separate = 0
    for reads in by_process.values():
        for leaf, boxes in reads.items():
            separate += _with_neighbours(leaf, boxes)
            together[leaf] += boxes
    return separate == sum(_with_neighbours(leaf, boxes) for leaf, boxes in together.items())


class _DividedChunk(NamedTuple):
    """Chunk without an owner: `candidates` are the processes that can read it; see `BroadcastChunk` for the others."""

    pieces: tuple[Piece, ...]
    candidates: tuple[int, ...]
    members: tuple[int, ...]
    reads: tuple[tuple[Piece, tuple[int, ...]], ...]


def _divide(cluster: Sequence[EntryNeeds], chunk_bytes: int) -> list[_DividedChunk] | None:
    """Divides a cluster into chunks; None where no process can read one of them.

    Values in memory are those of one process, and may be sharded: what is made with them is read by a process that
    needs all of it.
    """
    needers = {id(one.entry): one.needers for one in cluster}
    has_values = any(leaf.is_value for one in cluster for leaf in one.leaves)
    divided: list[_DividedChunk] = []
    pieces = [
        Piece(one.entry, box_index, box) for one in cluster for box_index, box in enumerate(one.boxes) if box_size(box)
    ]
    for some in _cut(pieces, chunk_bytes):
        sets = [set(needers[id(piece.entry)][piece.box_index]) for piece in some]
        members = tuple(sorted(set().union(*sets)))
        candidates = tuple(sorted(set(members).intersection(*sets))) if has_values else members
        if not candidates:
            return None
        divided.append(_DividedChunk(tuple(some), candidates, members, tuple(_joined_pieces(some))))
    return divided


def _cut(pieces: list[Piece], chunk_bytes: int) -> Iterator[list[Piece]]:
    """Cuts pieces where no stored byte is on both sides, into about `chunk_bytes` where that is possible."""
    apart = sum(pieces_stored_bytes([piece], _with_neighbours) for piece in pieces)
    if len(pieces) > 1 and apart == pieces_stored_bytes(pieces, _with_neighbours):
        for piece in pieces:
            yield from _cut([piece], chunk_bytes)
        return
    heads, pieces = _cut_rows(pieces, chunk_bytes)
    for head in heads:
        yield from (_cut(head, chunk_bytes) if sum(map(_host_bytes, head)) > 2 * chunk_bytes else [head])
    while pieces and (size := sum(map(_host_bytes, pieces))) > chunk_bytes:
        axes = range(max(len(piece.box) for piece in pieces))
        cuts = (cut_clean(pieces, size, chunk_bytes, axis, _with_neighbours) for axis in axes)
        cut = next((cut for cut in cuts if cut is not None), None)
        if cut is None:
            break
        head, pieces = cut
        # What was cut along another dimension may still be cut along this one.
        yield from (_cut(head, chunk_bytes) if sum(map(_host_bytes, head)) > 2 * chunk_bytes else [head])
    if pieces:
        yield pieces


def _cut_rows(pieces: list[Piece], chunk_bytes: int) -> tuple[list[list[Piece]], list[Piece]]:
    """Cuts pieces of one byte range that have the same rows, as the general way does but all at once, and the rest.

    Each of many processes needs a piece of each of many chunks: what is looked at again for each chunk costs most.
    """
    first = pieces[0]
    if first.view.leaf is None or first.view.leaf.chunks is not None or len(first.box) < 2:
        return [], pieces
    if any(piece.entry is not first.entry or piece.box[0] != first.box[0] for piece in pieces):
        return [], pieces
    start, stop = first.box[0]
    row_bytes = sum(map(_host_bytes, pieces)) // (stop - start)
    rows = max(1, chunk_bytes // row_bytes)
    edges = [start]
    while stop - edges[-1] > 1 and (stop - edges[-1]) * row_bytes > chunk_bytes:
        edges.append(edges[-1] + rows)
    below = [piece.box[1:] for piece in pieces]

    def between(edge: int, next_edge: int) -> list[Piece]:
        side = (edge, next_edge)
        return [Piece(piece.entry, piece.box_index, (side, *box)) for piece, box in zip(pieces, below, strict=True)]

    return [between(*pair) for pair in itertools.pairwise(edges)], between(edges[-1], stop)


def _with_neighbours(leaf: Leaf, boxes: Iterable[Box]) -> int:
    """Counts as `stored_bytes`, but takes what is in one run of a byte range as stored together.

    Columns of an array are read over the gaps between them: two processes that read some of one row would read it
    twice.
    """
    if leaf.chunks is not None or not leaf.shape:
        return stored_bytes(leaf, boxes)
    *outer, last = leaf.shape
    chunks = (*(1 for _ in outer), max(1, min(last, _RUN_BYTES // leaf.dtype.itemsize)))
    return leaf.bytes_of(tuple([to_chunks(box, chunks, leaf.shape) for box in boxes]))


def _joined_pieces(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, tuple[int, ...]]]:
    """Joins the pieces of each entry where they are a box together; yields each box with the numbers of its pieces."""
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


def _piece_bytes(piece: Piece) -> int:
    return box_size(piece.box) * piece.view.dtype.itemsize


def _host_bytes(piece: Piece) -> int:
    return _piece_bytes(piece) + piece.view.scratch_bytes(piece.box)


# -- rounds


class _Queue:
    """Queue of what the members of one set send one another, in order, until it is in a round."""

    def __init__(self, members: tuple[int, ...], limit: int):
        self.members = members
        self.buffer_limit = _buffer_limit(limit, len(members))
        self._queues: dict[int, collections.deque[Message]] = {member: collections.deque() for member in members}
        self._size = 0
        self._largest_box = 0

    def add(self, owner: int, message: Message, box_bytes: int) -> None:
        """Adds a message of `owner`, and the bytes of the box of `EntryNeeds` that it belongs to."""
        self._queues[owner].append(message)
        self._size += _aligned(message.size)
        self._largest_box = max(self._largest_box, box_bytes)

    def is_full(self) -> bool:
        """Tests whether a round is due.

        Chunks that are larger than a send buffer fill it only where several members have such a chunk. Processes that
        need them have memory for the whole box already: they may wait for as much as that.
        """
        return self._size >= max(self.buffer_limit * len(self.members), self._largest_box)

    def is_empty(self) -> bool:
        return not self._size

    def next_round(self) -> BroadcastRound:
        """Takes the messages of the next round."""
        messages: list[tuple[Message, ...]] = []
        longest = 0
        for queued in self._queues.values():
            taken: list[Message] = []
            used = 0
            while queued and used + _aligned(queued[0].size) <= self.buffer_limit:
                message = queued.popleft()
                used += _aligned(message.size)
                taken.append(message)
            self._size -= used
            longest = max(longest, used)
            messages.append(tuple(taken))
        # Few sizes: what sends a buffer is compiled for each.
        rounded = max(_LEAST_ROUNDED_BYTES, 1 << (longest - 1).bit_length())
        return BroadcastRound(self.members, tuple(messages), min(self.buffer_limit, rounded))


def _rounds(
    chunks: Sequence[BroadcastChunk], needs: Mapping[PlanEntry, EntryNeeds], limit: int
) -> Iterator[BroadcastRound]:
    queues: dict[tuple[int, ...], _Queue] = {}
    for number, chunk in enumerate(chunks):
        if chunk.members not in queues:
            queues[chunk.members] = _Queue(chunk.members, limit)
        queue = queues[chunk.members]
        for message in _messages(number, chunk, queue.buffer_limit):
            piece = chunk.pieces[message.piece]
            box = needs[piece.entry].boxes[piece.box_index]
            queue.add(chunk.owner, message, box_size(box) * piece.view.dtype.itemsize)
        while queue.is_full():
            yield queue.next_round()
    for queue in queues.values():
        while not queue.is_empty():
            yield queue.next_round()


def _messages(number: int, chunk: BroadcastChunk, buffer_limit: int) -> Iterator[Message]:
    for index, piece in enumerate(chunk.pieces):
        itemsize = piece.view.dtype.itemsize
        for box in _message_boxes(piece.box, itemsize, buffer_limit):
            yield Message(number, index, box, box_size(box) * itemsize)


def _message_boxes(box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """Cuts a box into boxes of at most `limit` bytes, in row-major order."""
    if not box or box_size(box) * itemsize <= limit:
        yield box
        return
    (low, high), *rest = box
    rows = limit // (math.prod([stop - start for start, stop in rest]) * itemsize)
    if rows:
        for start, stop in itertools.pairwise([*range(low, high, rows), high]):
            yield ((start, stop), *rest)
        return
    for index in range(low, high):
        for inner in _message_boxes(tuple(rest), itemsize, limit):
            yield ((index, index + 1), *inner)


def _buffer_limit(limit: int, members: int) -> int:
    """Returns the bytes of a send buffer for which all of a round, and what they are made of, are within the limit."""
    return max(_LEAST_BUFFER_BYTES, limit // (members + _OWN_BUFFERS) // ALIGNMENT * ALIGNMENT)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
