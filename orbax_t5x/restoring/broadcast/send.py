"""Runs a broadcast: reads own chunks, and exchanges them in rounds.

While the send buffers of one round travel, what the next one sends is being read. Host memory is bounded by what stays
on the host plus the budget: the buffers of a round, and the chunks that this round and the next are made of; a chunk
larger than the budget is sent by itself.

Where a process fails, the others must not wait for it: it goes on sending buffers of any content until the next of the
points at which all processes exchange whether they go on. There all stop together. A send buffer travels as unsigned
bytes with which nothing is computed: signs of zeros and payloads of NaNs arrive unchanged.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence

import numpy as np

from orbax_t5x.concurrency import CallThread, run_in_pool
from orbax_t5x.errors import CheckpointIOError
from orbax_t5x.files.memory import empty_array, naming_memory_errors
from orbax_t5x.lazy import BlockingLeaf, Box, slices_within
from orbax_t5x.lazy.box import box_shape, box_size
from orbax_t5x.multihost.collectives import any_failed, exchange_buffers, gather_texts
from orbax_t5x.multihost.groups import ProcessGroup
from orbax_t5x.restoring.broadcast.schedule import ALIGNMENT, BroadcastRound, Message, Schedule, Slots, message_starts
from orbax_t5x.restoring.execute.buffers import layout_of
from orbax_t5x.restoring.execute.groups import Piece
from orbax_t5x.restoring.executor import BufferedPiece, Reader
from orbax_t5x.restoring.plan import PlanEntry


def empty_buffer(size: int) -> np.ndarray:
    """Allocates aligned zeros for JAX to take without a copy."""
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + size]


# After how many rounds all processes exchange whether they go on. More: more rounds of no use after a failure.
# Fewer: more waiting of processes that have no round together.
_ROUNDS_PER_CHECK = 16

PlaceEntry = Callable[[PlanEntry, list[np.ndarray]], Awaitable[None]]
"""Makes the value of an entry from the buffers of its boxes."""


class Broadcast:
    """Broadcast of a restore on this process.

    Attributes:
      lost_peer: whether another process does not answer any more: the process group is broken.
      bytes_received: from other processes, of what this one needs.
    """

    def __init__(
        self,
        schedule: Schedule,
        texts: Sequence[PlanEntry],
        reader: Reader,
        place: PlaceEntry,
        *,
        group: ProcessGroup,
        limit: int,
        path: str | None,
    ):
        """Begins nothing; `place` takes each entry with its buffers.

        `texts` are the entries of strings, which all processes need whole.
        """
        self._schedule = schedule
        self._texts = texts
        self._reader = reader
        self._place = place
        self._group = group
        self._process = group.rank  # as the schedule numbers the members
        self._processes = group.size
        self._limit = limit
        self._path = path
        self._reads: dict[int, asyncio.Task[list[np.ndarray]]] = {}
        sent = [
            (number, message.chunk)
            for number, one in enumerate(schedule.rounds)
            if group.rank in one.members
            for messages in one.sent_by(group.rank)
            for message in messages
        ]
        self._last_round = {chunk: number for number, chunk in sent}
        # The chunks of each round that no round before it sends.
        self._new_chunks: dict[int, list[int]] = {}
        seen: set[int] = set()
        for number, chunk in sent:
            if chunk not in seen:
                seen.add(chunk)
                self._new_chunks.setdefault(number, []).append(chunk)
        self._received = {entry: _ReceivedEntry(entry) for entry in schedule.needs}
        self.lost_peer = False
        self.bytes_received: int = 0

    async def run(self, pool: concurrent.futures.Executor, error: Exception | None) -> None:
        """Takes part to the end, or until some process fails.

        With an `error` this process has failed before; it takes part until all know. Where only others failed it
        returns.
        """
        self._thread = CallThread("orbax_t5x-rounds")
        try:
            error = await self._send_texts(pool, error)
            error = await self._run_rounds(pool, error)
        finally:
            self._thread.close()
            for task in self._reads.values():
                task.cancel()
            await asyncio.gather(*self._reads.values(), return_exceptions=True)
        if error is not None:
            raise error

    async def _with_all(self, function: Callable[[], object]) -> object:
        """Awaits a call that waits for other processes."""
        try:
            return await run_in_pool(None, function)
        except CheckpointIOError:
            self.lost_peer = True
            raise

    # -- rounds

    async def _run_rounds(self, pool: concurrent.futures.Executor, error: Exception | None) -> Exception | None:
        rounds = self._schedule.rounds
        own = [number for number, one in enumerate(rounds) if self._process in one.members]
        following = dict(itertools.pairwise(own))
        # One for all rounds: its memory is free again when a round has ended.
        whole_buffer = empty_buffer(
            max((rounds[number].slots * rounds[number].slot_bytes for number in own), default=0)
        )
        if error is None:
            error = await _error_of(self._place_complete([entry for entry in self._received], pool))
        for number, one in enumerate(rounds):
            if number % _ROUNDS_PER_CHECK == 0:
                failed = error is not None
                if await self._with_all(lambda failed=failed: any_failed(failed, self._group, self._path)):
                    break
            if self._process not in one.members:
                continue
            buffer = whole_buffer[: one.slots * one.slot_bytes].reshape(one.slots, one.slot_bytes)
            if error is None:
                error = await _error_of(self._fill_buffer(buffer, number, pool))
            if error is None:
                self._read_ahead(one, following.get(number), pool)
            buffers = await self._with_all(
                lambda buffer=buffer, one=one: exchange_buffers(
                    buffer, self._group.part(one.members), self._path, self._thread
                )
            )
            assert isinstance(buffers, np.ndarray)
            if error is None:
                error = await _error_of(self._receive(one, buffers, pool))
        return error

    def _read_ahead(self, one: BroadcastRound, following: int | None, pool: concurrent.futures.Executor) -> None:
        """Prefetches the next round if memory allows."""
        if following is None:
            return
        chunks = self._schedule.chunks
        in_memory = sum(chunks[number].size for number in self._reads)
        needed = sum(chunks[number].size for number in self._new_chunks.get(following, ()))
        if in_memory + needed + one.host_bytes <= self._limit:
            self._begin_reads(following, pool)

    def _begin_reads(self, number: int, pool: concurrent.futures.Executor) -> None:
        """Begins to read the chunks new in a round."""
        for chunk in self._new_chunks.pop(number, ()):
            self._reads[chunk] = asyncio.create_task(self._read(chunk, pool))

    async def _read(self, number: int, pool: concurrent.futures.Executor) -> list[np.ndarray]:
        """Reads the pieces of a chunk."""
        chunk = self._schedule.chunks[number]
        first = chunk.pieces[0].entry
        stage: list[BufferedPiece] = []
        outs: dict[int, np.ndarray] = {}
        with naming_memory_errors(first.leaves[0].path, first.name):
            for whole, inside in chunk.reads:
                out = empty_array(box_shape(whole.box), whole.view.dtype)
                stage.append((whole, out))
                for piece in inside:
                    outs[piece] = out[
                        (*slices_within(chunk.pieces[piece].box, whole.box), ...)
                    ]  # a view of rank 0, too
        stages = [stage]
        if all(isinstance(leaf, BlockingLeaf) for piece in chunk.pieces for leaf in piece.entry.leaves):
            await run_in_pool(pool, self._reader.fill, stages, first)
        else:
            await self._reader.fill_awaited(stages, first, pool)
        return [outs[piece] for piece in range(len(chunk.pieces))]

    async def _fill_buffer(self, buffer: np.ndarray, number: int, pool: concurrent.futures.Executor) -> None:
        """Fills the send buffer of a round; releases sent chunks."""
        self._begin_reads(number, pool)
        slots = self._schedule.rounds[number].sent_by(self._process)
        outs = {message.chunk: await self._reads[message.chunk] for messages in slots for message in messages}
        await run_in_pool(pool, self._copy_into, buffer, slots, outs)
        for chunk in outs:
            if self._last_round[chunk] == number:
                del self._reads[chunk]

    def _copy_into(self, buffer: np.ndarray, slots: Slots, outs: Mapping[int, Sequence[np.ndarray]]) -> None:
        for slot, messages in zip(buffer, slots, strict=True):
            for start, message in message_starts(messages):
                piece = self._schedule.chunks[message.chunk].pieces[message.piece]
                values = outs[message.chunk][message.piece][slices_within(message.box, piece.box)]
                _as_values(slot, start, message, values.dtype)[...] = values

    # -- receiving

    async def _receive(self, one: BroadcastRound, buffers: np.ndarray, pool: concurrent.futures.Executor) -> None:
        touched = await run_in_pool(pool, self._copy_from, one, buffers)
        await self._place_complete(touched, pool)

    def _copy_from(self, one: BroadcastRound, buffers: np.ndarray) -> list[PlanEntry]:
        """Copies needed elements from buffers; returns the touched entries."""
        touched: dict[PlanEntry, None] = {}
        for sender, buffer, messages in zip(one.members, buffers, one.received_by(self._process), strict=True):
            for start, message in message_starts(messages):
                piece = self._schedule.chunks[message.chunk].pieces[message.piece]
                needs = self._schedule.needs[piece.entry]
                if self._process not in needs.needers[piece.box_index]:
                    continue
                values = _as_values(buffer, start, message, piece.view.dtype)
                self._received[piece.entry].take(needs.boxes[piece.box_index], message.box, values)
                touched[piece.entry] = None
                if sender != self._process:
                    self.bytes_received += message.size
        return list(touched)

    async def _place_complete(self, entries: Sequence[PlanEntry], pool: concurrent.futures.Executor) -> None:
        for entry in entries:
            if not self._received[entry].elements_left:
                buffers = await run_in_pool(pool, self._received.pop(entry).buffers)
                await self._place(entry, buffers)

    # -- strings

    async def _send_texts(self, pool: concurrent.futures.Executor, error: Exception | None) -> Exception | None:
        """Sends all strings at once; each process reads some."""
        if not self._texts:
            return error
        mine: list[bytes] = []
        if error is None:
            error = await _error_of(self._read_texts(mine, pool))
        failed = error is not None
        sent = await self._with_all(lambda: gather_texts([] if failed else mine, self._group, self._path))
        assert isinstance(sent, list)
        if await self._with_all(lambda: any_failed(failed, self._group, self._path)):
            return error
        left = [iter(texts) for texts in sent]
        for number, entry in enumerate(self._texts):
            outs, _ = layout_of(entry).allocate(np.dtype(object))
            for out in outs:
                texts = left[number % self._processes]
                out[...] = np.asarray([next(texts) for _ in range(out.size)], object).reshape(out.shape)
                if number % self._processes != self._process:
                    self.bytes_received += sum(map(len, out.ravel().tolist()))
            error = error or await _error_of(self._place(entry, outs))
        return error

    async def _read_texts(self, texts: list[bytes], pool: concurrent.futures.Executor) -> None:
        for number, entry in enumerate(self._texts):
            if number % self._processes == self._process:
                outs, _ = layout_of(entry).allocate(np.dtype(object))
                boxes = enumerate(entry.boxes())
                pieces = [(Piece(entry, at, box), out) for (at, box), out in zip(boxes, outs, strict=True)]
                await self._reader.fill_awaited([pieces], entry, pool)
                texts += [text for out in outs for text in out.ravel().tolist()]


class _ReceivedEntry:
    """Entry that awaits `elements_left` on this process."""

    def __init__(self, entry: PlanEntry):
        self._entry = entry
        self._buffers: list[np.ndarray] | None = None
        self.elements_left = sum(map(box_size, entry.boxes()))

    def buffers(self) -> list[np.ndarray]:
        """Returns the buffers of the entry's boxes on this process."""
        if self._buffers is None:
            assert self._entry.view is not None
            with naming_memory_errors(self._entry.leaves[0].path, self._entry.name):
                self._buffers, _ = layout_of(self._entry).allocate(np.dtype(self._entry.view.dtype))
        return self._buffers

    def take(self, whole: Box, box: Box, values: np.ndarray) -> None:
        index = self._entry.boxes().index(whole)
        self.buffers()[index][slices_within(box, whole)] = values
        self.elements_left -= values.size


def _as_values(buffer: np.ndarray, start: int, message: Message, dtype: np.dtype) -> np.ndarray:
    """Returns a message's elements as a view of the buffer."""
    return buffer[start : start + message.size].view(dtype).reshape(box_shape(message.box))


async def _error_of(awaitable: Awaitable[None]) -> Exception | None:
    """Returns the exception of an awaitable, or None."""
    try:
        await awaitable
    except Exception as error:
        return error
    return None
