"""Schedules a broadcast: readers of chunks and rounds.

In a round, processes send one another messages. Processes are numbered by their rank in the group of the restore. In
one round each member has a send buffer of one size. Where most need most of it, a buffer has one slot, and all members
receive all buffers (all-gather). Else it has a slot for each member, which receives that of each buffer (all-to-all): a
process of 512 that need columns of a matrix receives its own, not those of all. Rounds have one order, and each process
takes part in those that it is a member of, in that order: no circle of processes wait for each other. Pure geometry:
nothing is allocated, read or sent.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from orbax_t5x.errors import RestorePlanError
from orbax_t5x.lazy import Box, Leaf
from orbax_t5x.lazy.box import box_size
from orbax_t5x.multihost.coordination import has_backend
from orbax_t5x.multihost.groups import ProcessGroup
from orbax_t5x.restoring.broadcast.chunks import (
    JOINED_BYTES,
    REQUEST_BYTES,
    BroadcastChunk,
    ReadDecision,
    decide_reads,
    divide,
    host_bytes,
    join_neighbours,
    may_join,
    piece_bytes,
    with_neighbours,
)
from orbax_t5x.restoring.broadcast.needs import EntryNeeds, StoreKind, Stores, is_text, needs_of_shardings
from orbax_t5x.restoring.execute.groups import clusters_of
from orbax_t5x.restoring.options import MEMORY_LIMIT_BYTES
from orbax_t5x.restoring.plan import PlanEntry, RestorePlan

# Each message of a send buffer begins at a multiple, so that its elements are aligned.
ALIGNMENT = 64
# Below this a round costs as much as it does without a byte.
_LEAST_BUFFER_BYTES = 64 << 10
_LEAST_ROUNDED_BYTES = 4 << 10
# What a process holds beside the buffers that it receives, in buffers: its own, and the chunks that this and the next
# are made of.
_OWN_BUFFERS = 5


class Message(NamedTuple):
    """A box within a chunk's piece, as it is sent."""

    chunk: int
    piece: int
    box: Box
    size: int


Slots = tuple[tuple[Message, ...], ...]
"""The messages of each slot of a send buffer."""


@dataclasses.dataclass(frozen=True)
class BroadcastRound:
    """Round of a broadcast: simultaneous messages between processes.

    `sent` has the slots of each member's send buffer, in order; `slot_bytes` are those of each slot, the same for all.
    """

    members: tuple[int, ...]
    sent: tuple[Slots, ...]
    slot_bytes: int

    @property
    def slots(self) -> int:
        """The number of slots of a send buffer."""
        return len(self.sent[0])

    @property
    def host_bytes(self) -> int:
        """The bytes of a process's send and receive buffers."""
        return (self.slots + len(self.members)) * self.slot_bytes

    def sent_by(self, process: int) -> Slots:
        """Lists the messages that a member sends."""
        return self.sent[self.members.index(process)]

    def received_by(self, process: int) -> list[tuple[Message, ...]]:
        """Lists the messages to a member, by sender."""
        slot = 0 if self.slots == 1 else self.members.index(process)
        return [slots[slot] for slots in self.sent]


def message_starts(messages: Iterable[Message]) -> Iterator[tuple[int, Message]]:
    """Yields each message of a send buffer with its start."""
    start = 0
    for message in messages:
        yield start, message
        start += _aligned(message.size)


class _QueuedChunk:
    """Messages of a chunk without a round, by slot."""

    def __init__(self, size: int):
        self.size = size
        self._messages: dict[int, collections.deque[Message]] = collections.defaultdict(collections.deque)

    def add(self, slot: int, message: Message) -> None:
        self._messages[slot].append(message)

    def take(self, slots: list[list[Message]], used: list[int], slot_bytes: int) -> bool:
        """Moves messages into slots as far as they fit."""
        for slot, queued in self._messages.items():
            while queued and used[slot] + _aligned(queued[0].size) <= slot_bytes:
                message = queued.popleft()
                used[slot] += _aligned(message.size)
                slots[slot].append(message)
        return not any(self._messages.values())


class _Queue:
    """Queue of messages between a set's members."""

    def __init__(self, members: tuple[int, ...], is_exchanged: bool, limit: int):
        self.members = members
        self.slots = len(members) if is_exchanged else 1
        self._buffer_bytes = buffer_limit(limit, len(members), is_exchanged)
        self.slot_bytes = _aligned(self._buffer_bytes // self.slots)
        self._queues: dict[int, collections.deque[_QueuedChunk]] = {member: collections.deque() for member in members}
        self._size = 0
        self._largest_chunk = 0

    def add(self, owner: int, chunk: _QueuedChunk, size: int) -> None:
        """Adds a chunk of `owner` with messages of `size` bytes."""
        self._queues[owner].append(chunk)
        self._size += size
        self._largest_chunk = max(self._largest_chunk, size)

    def is_full(self) -> bool:
        """Tests if a round is due.

        Each member may have as much to send as its buffer or a chunk has.
        """
        return self._size >= len(self.members) * max(self.slot_bytes * self.slots, self._largest_chunk)

    def is_empty(self) -> bool:
        return not self._size

    def next_round(self) -> BroadcastRound:
        """Takes the messages of the next round."""
        sent: list[Slots] = []
        longest = 0
        for queued in self._queues.values():
            slots: list[list[Message]] = [[] for _ in range(self.slots)]
            used = [0] * self.slots
            self._take(queued, slots, used)
            self._size -= sum(used)
            longest = max(longest, *used)
            sent.append(tuple(map(tuple, slots)))
        # Few sizes: what sends a buffer is compiled for each.
        rounded = max(_LEAST_ROUNDED_BYTES, 1 << (longest - 1).bit_length())
        return BroadcastRound(self.members, tuple(sent), min(self.slot_bytes, rounded))

    def _take(self, queued: collections.deque[_QueuedChunk], slots: list[list[Message]], used: list[int]) -> None:
        """Moves the messages of a member's chunks into its slots.

        Of chunks that stay, as one slot is full and another is not, no more are begun than a send buffer holds.
        """
        begun: list[_QueuedChunk] = []
        while queued and (sum(chunk.size for chunk in begun) < self._buffer_bytes if self.slots > 1 else not begun):
            chunk = queued.popleft()
            if not chunk.take(slots, used, self.slot_bytes):
                begun.append(chunk)
        queued.extendleft(reversed(begun))


def rounds_of(
    chunks: Sequence[BroadcastChunk], needs: Mapping[PlanEntry, EntryNeeds], limit: int
) -> Iterator[BroadcastRound]:
    """Yields the rounds that send all chunks."""
    queues: dict[tuple[tuple[int, ...], bool], _Queue] = {}
    for number, chunk in enumerate(chunks):
        kind = chunk.members, chunk.is_exchanged
        if kind not in queues:
            queues[kind] = _Queue(*kind, limit)
        queue = queues[kind]
        queued, size = _QueuedChunk(chunk.size), 0
        slot_of = {member: slot for slot, member in enumerate(chunk.members)}
        for index, piece in enumerate(chunk.pieces):
            itemsize = piece.view.dtype.itemsize
            needers = needs[piece.entry].needers[piece.box_index]
            slots = [slot_of[needer] for needer in needers] if chunk.is_exchanged else [0]
            for box in _message_boxes(piece.box, itemsize, queue.slot_bytes):
                message = Message(number, index, box, box_size(box) * itemsize)
                for slot in slots:
                    queued.add(slot, message)
                size += _aligned(message.size) * len(slots)
        queue.add(chunk.owner, queued, size)
        while queue.is_full():
            yield queue.next_round()
    for queue in queues.values():
        while not queue.is_empty():
            yield queue.next_round()


def _message_boxes(box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """Cuts a box into boxes of at most `limit` bytes."""
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


def buffer_limit(limit: int, members: int, is_exchanged: bool) -> int:
    """Returns the send buffer's bytes within the limit."""
    received = 1 if is_exchanged else members
    return max(_LEAST_BUFFER_BYTES, limit // (received + _OWN_BUFFERS) // ALIGNMENT * ALIGNMENT)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


# A chunk is read at once. Larger: reading and sending overlap less. Smaller: more requests.
_CHUNK_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Schedule of a broadcast."""

    unshared: tuple[PlanEntry, ...]
    needs: Mapping[PlanEntry, EntryNeeds]
    chunks: tuple[BroadcastChunk, ...]
    rounds: tuple[BroadcastRound, ...]
    decisions: Mapping[str, ReadDecision]


def schedule_broadcast(
    needs: Sequence[EntryNeeds], processes: int, limit: int, stores: Stores | None = None
) -> Schedule:
    """Schedules all processes' needs, in plan order.

    `limit` bytes are in flight in each. With `stores`, only what costs less when it is read once and sent than when
    each process reads it for itself.
    """
    unshared: list[PlanEntry] = []
    sent: list[EntryNeeds] = []
    to_send: list[BroadcastChunk] = []
    chunks: list[BroadcastChunk] = []
    load = [0] * processes
    decisions: dict[str, ReadDecision] = {}
    gathered_bytes, exchanged_bytes = (
        min(_CHUNK_BYTES, buffer_limit(limit, processes, is_exchanged)) for is_exchanged in (False, True)
    )
    for cluster in clusters_of(needs, with_neighbours):
        store = StoreKind.BUCKET if stores is None else stores.of(leaf for one in cluster for leaf in one.leaves)
        is_unshared = _is_unshared(cluster)
        divided = None
        if not is_unshared or (processes > 1 and may_join(cluster, store)):
            divided = divide(cluster, gathered_bytes, exchanged_bytes, joins=is_unshared)
        if stores is not None or is_unshared:
            decision = decide_reads(cluster, divided, store)
            if is_unshared and not decision.is_broadcast:
                decision = decision._replace(once=None)
            decisions.update((one.entry.name, decision) for one in cluster)
            divided = divided if decision.is_broadcast else None
        if divided is None:
            unshared += [one.entry for one in cluster]
            continue
        sent += cluster
        to_send += divided
    for one in join_neighbours(to_send, min(JOINED_BYTES, gathered_bytes, exchanged_bytes)):
        owner = min(one.candidates, key=lambda process: (load[process], process))
        load[owner] += sum(map(piece_bytes, one.pieces)) + len(one.reads) * REQUEST_BYTES[StoreKind.BUCKET]
        chunks.append(one._replace(owner=owner, size=sum(host_bytes(whole) for whole, _ in one.reads)))
    by_entry = {one.entry: one for one in sent}
    rounds = tuple(rounds_of(chunks, by_entry, limit))
    return Schedule(tuple(unshared), by_entry, tuple(chunks), rounds, decisions)


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
            separate += with_neighbours(leaf, boxes)
            together[leaf] += boxes
    return separate == sum(with_neighbours(leaf, boxes) for leaf, boxes in together.items())


def decisions_of(plan: RestorePlan) -> Mapping[str, ReadDecision]:
    """Returns the decisions of `broadcast="auto"` by entry name."""
    if plan.decisions is None:
        if not has_backend() or jax.process_count() == 1 or (group := ProcessGroup.of(plan.processes)).size == 1:
            return {}
        arrays = [entry for entry in plan.entries if entry.view is not None and not is_text(entry)]
        needs = needs_of_shardings(arrays, group.members)
        try:
            stores = Stores.of_plan(plan)
        except RestorePlanError:  # which an execution raises that has to decide
            return {}
        plan.decisions = schedule_broadcast(needs, group.size, MEMORY_LIMIT_BYTES, stores).decisions
    return plan.decisions
