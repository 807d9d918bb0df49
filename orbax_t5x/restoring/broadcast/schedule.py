"""Who reads what in a broadcast, and in which rounds it is sent: derived alike by all processes from what all want.

What is stored is cut into *shares*, so that no stored byte lies in two of them. One process reads a share, and finishes
what views have left to do; the others that need some of it get that from the owner. Owners are chosen so that all read
about as much. What is sent goes in *rounds*: in one round each member sends the others a row of bytes of one size.
Rounds have one order, and each process takes part in those that it is a member of, in that order: none waits for
another in a circle. Pure geometry: nothing is allocated, read or sent.
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
from orbax_t5x.restoring.broadcast.wanted import Wanted
from orbax_t5x.restoring.execute.groups import clusters_of
from orbax_t5x.restoring.execute.steps import Part, cut_clean, parts_stored_bytes, stored_bytes, to_chunks
from orbax_t5x.restoring.plan_data import PlanEntry

# Each message of a row begins at a multiple, so that its elements are aligned.
ALIGNMENT = 64
# A share is read at once. Larger: reading and sending overlap less. Smaller: more requests.
_SHARE_BYTES = 16 << 20
# Of a byte range this is read by one process where several need some of it. Gaps of 4 KiB are read over.
_RUN_BYTES = 256 << 10
# Below this a round costs as much as it does without a byte.
_LEAST_ROW_BYTES = 64 << 10
_LEAST_ROUNDED_BYTES = 4 << 10
# What a process holds beside the rows that it receives, in rows: its own, and the shares that this and the next are
# made of.
_OWN_ROWS = 5


class Message(NamedTuple):
    """A part of what one share gives, as it is sent.

    Attributes:
      share: its number in the schedule.
      part: the number of the part among those of the share.
      box: within the box of that part.
      size: in bytes.
    """

    share: int
    part: int
    box: Box
    size: int


@dataclasses.dataclass(frozen=True)
class Share:
    """What one process reads at once.

    Attributes:
      owner: the process that reads it.
      members: the processes that need some of it, ascending.
      parts: what becomes of it; `place` is the number of a box of `Wanted`.
      reads: boxes of entries, each with the parts that lie in it. Parts that are a box together are read as one: one
        request for a chunk, whose parts TensorStore might else fetch one after the other.
      size: bytes on the owner's host while it is read: results and scratch.
    """

    owner: int
    members: tuple[int, ...]
    parts: tuple[Part, ...]
    reads: tuple[tuple[Part, tuple[int, ...]], ...]
    size: int


@dataclasses.dataclass(frozen=True)
class Round:
    """What some processes send one another at once.

    Attributes:
      members: ascending; one alone has only its own.
      rows: the messages that each member sends, in order.
      row_bytes: of each row, the same for all.
    """

    members: tuple[int, ...]
    rows: tuple[tuple[Message, ...], ...]
    row_bytes: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A broadcast.

    Attributes:
      alone: what each process reads by itself: nothing stored is needed by two.
      wanted: what is broadcast, by entry.
      shares: in order.
      rounds: in order.
    """

    alone: tuple[PlanEntry, ...]
    wanted: Mapping[PlanEntry, Wanted]
    shares: tuple[Share, ...]
    rounds: tuple[Round, ...]


def schedule_of(wanted: Sequence[Wanted], processes: int, limit: int) -> Schedule:
    """The schedule of what all processes want.

    Args:
      wanted: in plan order.
      processes: how many there are.
      limit: bytes that a process may have in flight.
    """
    alone: list[PlanEntry] = []
    sent: list[Wanted] = []
    shares: list[Share] = []
    load = [0] * processes
    share_bytes = min(_SHARE_BYTES, _row_limit(limit, processes))
    for cluster in clusters_of(wanted, _with_neighbours):
        divided = None if _is_apart(cluster) else _divide(cluster, share_bytes)
        if divided is None:
            alone += [one.entry for one in cluster]
            continue
        sent += cluster
        for parts, candidates, members in divided:
            owner = min(candidates, key=lambda process: (load[process], process))
            load[owner] += sum(map(_part_bytes, parts))
            reads = tuple(_joined_parts(parts))
            size = sum(_host_bytes(whole) for whole, _ in reads)
            shares.append(Share(owner, members, tuple(parts), reads, size))
    by_entry = {one.entry: one for one in sent}
    return Schedule(tuple(alone), by_entry, tuple(shares), tuple(_rounds(shares, by_entry, limit)))


def row_starts(messages: Iterable[Message]) -> Iterator[tuple[int, Message]]:
    """Where each message of a row begins, in bytes."""
    start = 0
    for message in messages:
        yield start, message
        start += _aligned(message.size)


# -- shares


def _is_apart(cluster: Sequence[Wanted]) -> bool:
    """Whether no stored byte is needed by two processes."""
    by_process: dict[int, dict[Leaf, list[Box]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for one in cluster:
        for box, needers in zip(one.boxes, one.needers, strict=True):
            for leaf, wanted in one.view.requests(box):
                if leaf.is_value or not box_size(wanted):
                    continue
                if len(needers) > 1:
                    return False
                for process in needers:
                    by_process[process][leaf].append(wanted)
    if len(by_process) < 2:
        return True
    together: dict[Leaf, list[Box]] = collections.defaultdict(list)
    alone = 0
    for reads in by_process.values():
        for leaf, boxes in reads.items():
            alone += _with_neighbours(leaf, boxes)
            together[leaf] += boxes
    return alone == sum(_with_neighbours(leaf, boxes) for leaf, boxes in together.items())


def _divide(
    cluster: Sequence[Wanted], share_bytes: int
) -> list[tuple[list[Part], tuple[int, ...], tuple[int, ...]]] | None:
    """The shares of a cluster: the parts, who can read them, who needs some of them; None where nobody can read one.

    Values in memory are those of one process, and may be sharded: what is made with them is read by a process that
    needs all of it.
    """
    needers = {id(one.entry): one.needers for one in cluster}
    has_values = any(leaf.is_value for one in cluster for leaf in one.leaves)
    divided: list[tuple[list[Part], tuple[int, ...], tuple[int, ...]]] = []
    parts = [Part(one.entry, place, box) for one in cluster for place, box in enumerate(one.boxes) if box_size(box)]
    for some in _cut(parts, share_bytes):
        sets = [set(needers[id(part.entry)][part.place]) for part in some]
        members = tuple(sorted(set().union(*sets)))
        candidates = tuple(sorted(set(members).intersection(*sets))) if has_values else members
        if not candidates:
            return None
        divided.append((some, candidates, members))
    return divided


def _cut(parts: list[Part], share_bytes: int) -> Iterator[list[Part]]:
    """Parts that share no stored byte with others, of about `share_bytes` where that is possible."""
    apart = sum(parts_stored_bytes([part], _with_neighbours) for part in parts)
    if len(parts) > 1 and apart == parts_stored_bytes(parts, _with_neighbours):
        for part in parts:
            yield from _cut([part], share_bytes)
        return
    while parts and (size := sum(map(_host_bytes, parts))) > share_bytes:
        axes = range(max(len(part.box) for part in parts))
        cuts = (cut_clean(parts, size, share_bytes, axis, _with_neighbours) for axis in axes)
        cut = next((cut for cut in cuts if cut is not None), None)
        if cut is None:
            break
        head, parts = cut
        # What was cut along another dimension may still be cut along this one.
        yield from (_cut(head, share_bytes) if sum(map(_host_bytes, head)) > 2 * share_bytes else [head])
    if parts:
        yield parts


def _with_neighbours(leaf: Leaf, boxes: Iterable[Box]) -> int:
    """`stored_bytes`, where what lies in one run of a byte range is stored together.

    Columns of an array are read over the gaps between them: two processes that read some of one row would read it
    twice.
    """
    if leaf.chunks is not None or not leaf.shape:
        return stored_bytes(leaf, boxes)
    *outer, last = leaf.shape
    chunks = (*(1 for _ in outer), max(1, min(last, _RUN_BYTES // leaf.dtype.itemsize)))
    return leaf.bytes_of(tuple([to_chunks(box, chunks, leaf.shape) for box in boxes]))


def _joined_parts(parts: Sequence[Part]) -> Iterator[tuple[Part, tuple[int, ...]]]:
    """The parts of each entry as one where they are a box together, and the numbers of those that lie in it."""
    by_entry: dict[PlanEntry, list[int]] = {}
    for number, part in enumerate(parts):
        by_entry.setdefault(part.entry, []).append(number)
    for numbers in by_entry.values():
        boxes = tuple([parts[number].box for number in numbers])
        whole = bounding_box(boxes)
        if union_size(boxes) == box_size(whole):
            yield parts[numbers[0]]._replace(box=whole), tuple(numbers)
        else:
            yield from ((parts[number], (number,)) for number in numbers)


def _part_bytes(part: Part) -> int:
    return box_size(part.box) * part.view.dtype.itemsize


def _host_bytes(part: Part) -> int:
    return _part_bytes(part) + part.view.scratch_bytes(part.box)


# -- rounds


class _Queue:
    """What the members of one set send one another, in order, as long as it is not in a round."""

    def __init__(self, members: tuple[int, ...], limit: int):
        self.members = members
        self.row_limit = _row_limit(limit, len(members))
        self._rows: dict[int, collections.deque[Message]] = {member: collections.deque() for member in members}
        self._size = 0
        self._largest_box = 0

    def add(self, owner: int, message: Message, box_bytes: int) -> None:
        """Args: who sends, what, and the bytes of the box of `Wanted` that it belongs to."""
        self._rows[owner].append(message)
        self._size += _aligned(message.size)
        self._largest_box = max(self._largest_box, box_bytes)

    def is_full(self) -> bool:
        """Whether a round is due.

        Rows of shares that are larger than a row are full only where several members have such a share. Who needs them
        has a buffer for the whole box already: it may wait for as much as that.
        """
        return self._size >= max(self.row_limit * len(self.members), self._largest_box)

    def is_empty(self) -> bool:
        return not self._size

    def take(self) -> Round:
        """The next round."""
        rows: list[tuple[Message, ...]] = []
        longest = 0
        for queued in self._rows.values():
            row: list[Message] = []
            used = 0
            while queued and used + _aligned(queued[0].size) <= self.row_limit:
                message = queued.popleft()
                used += _aligned(message.size)
                row.append(message)
            self._size -= used
            longest = max(longest, used)
            rows.append(tuple(row))
        # Few sizes: what sends a row is compiled for each.
        rounded = max(_LEAST_ROUNDED_BYTES, 1 << (longest - 1).bit_length())
        return Round(self.members, tuple(rows), min(self.row_limit, rounded))


def _rounds(shares: Sequence[Share], wanted: Mapping[PlanEntry, Wanted], limit: int) -> Iterator[Round]:
    queues: dict[tuple[int, ...], _Queue] = {}
    for number, share in enumerate(shares):
        if share.members not in queues:
            queues[share.members] = _Queue(share.members, limit)
        queue = queues[share.members]
        for message in _messages(number, share, queue.row_limit):
            part = share.parts[message.part]
            box = wanted[part.entry].boxes[part.place]
            queue.add(share.owner, message, box_size(box) * part.view.dtype.itemsize)
        while queue.is_full():
            yield queue.take()
    for queue in queues.values():
        while not queue.is_empty():
            yield queue.take()


def _messages(number: int, share: Share, row_limit: int) -> Iterator[Message]:
    for index, part in enumerate(share.parts):
        itemsize = part.view.dtype.itemsize
        for box in _pieces(part.box, itemsize, row_limit):
            yield Message(number, index, box, box_size(box) * itemsize)


def _pieces(box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """A box as boxes of at most `limit` bytes, in row-major order."""
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
        for inner in _pieces(tuple(rest), itemsize, limit):
            yield ((index, index + 1), *inner)


def _row_limit(limit: int, members: int) -> int:
    """Bytes of a row, so that all rows of a round, and what they are made of, are within the limit."""
    return max(_LEAST_ROW_BYTES, limit // (members + _OWN_ROWS) // ALIGNMENT * ALIGNMENT)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
