"""Rounds of a broadcast: which messages some processes send one another at once.

In one round each member sends the others a buffer of bytes of one size. Rounds have one order, and each process takes
part in those that it is a member of, in that order: no circle of processes wait for each other. Pure geometry: nothing
is allocated, read or sent.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from orbax_t5x.lazy import Box
from orbax_t5x.lazy.box import box_size
from orbax_t5x.restoring.broadcast.chunks import BroadcastChunk
from orbax_t5x.restoring.broadcast.needs import EntryNeeds
from orbax_t5x.restoring.plan_data import PlanEntry

# Each message of a send buffer begins at a multiple, so that its elements are aligned.
ALIGNMENT = 64
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
class BroadcastRound:
    """Round of a broadcast: what some processes send one another at once.

    The messages are by member, in order; `buffer_bytes` are those of each send buffer, the same for all.
    """

    members: tuple[int, ...]
    messages: tuple[tuple[Message, ...], ...]
    buffer_bytes: int


def message_starts(messages: Iterable[Message]) -> Iterator[tuple[int, Message]]:
    """Yields each message of a send buffer with the byte at which it begins."""
    start = 0
    for message in messages:
        yield start, message
        start += _aligned(message.size)


class _Queue:
    """Queue of what the members of one set send one another, in order, until it is in a round."""

    def __init__(self, members: tuple[int, ...], limit: int):
        self.members = members
        self.limit = buffer_limit(limit, len(members))
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
        return self._size >= max(self.limit * len(self.members), self._largest_box)

    def is_empty(self) -> bool:
        return not self._size

    def next_round(self) -> BroadcastRound:
        """Takes the messages of the next round."""
        messages: list[tuple[Message, ...]] = []
        longest = 0
        for queued in self._queues.values():
            taken: list[Message] = []
            used = 0
            while queued and used + _aligned(queued[0].size) <= self.limit:
                message = queued.popleft()
                used += _aligned(message.size)
                taken.append(message)
            self._size -= used
            longest = max(longest, used)
            messages.append(tuple(taken))
        # Few sizes: what sends a buffer is compiled for each.
        rounded = max(_LEAST_ROUNDED_BYTES, 1 << (longest - 1).bit_length())
        return BroadcastRound(self.members, tuple(messages), min(self.limit, rounded))


def rounds_of(
    chunks: Sequence[BroadcastChunk], needs: Mapping[PlanEntry, EntryNeeds], limit: int
) -> Iterator[BroadcastRound]:
    """Yields the rounds that send all chunks, with `limit` bytes in flight in each process."""
    queues: dict[tuple[int, ...], _Queue] = {}
    for number, chunk in enumerate(chunks):
        if chunk.members not in queues:
            queues[chunk.members] = _Queue(chunk.members, limit)
        queue = queues[chunk.members]
        for message in _messages(number, chunk, queue.limit):
            piece = chunk.pieces[message.piece]
            box = needs[piece.entry].boxes[piece.box_index]
            queue.add(chunk.owner, message, box_size(box) * piece.view.dtype.itemsize)
        while queue.is_full():
            yield queue.next_round()
    for queue in queues.values():
        while not queue.is_empty():
            yield queue.next_round()


def _messages(number: int, chunk: BroadcastChunk, limit: int) -> Iterator[Message]:
    for index, piece in enumerate(chunk.pieces):
        itemsize = piece.view.dtype.itemsize
        for box in _message_boxes(piece.box, itemsize, limit):
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


def buffer_limit(limit: int, members: int) -> int:
    """Returns the bytes of a send buffer for which all of a round, and what they are made of, are within the limit."""
    return max(_LEAST_BUFFER_BYTES, limit // (members + _OWN_BUFFERS) // ALIGNMENT * ALIGNMENT)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
