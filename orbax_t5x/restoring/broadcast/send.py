"""A broadcast: this process reads its shares of what is stored, and all processes send one another what they need.

While the rows of one round travel, what the next one sends is being read. Host memory is bounded by what stays on the
host plus the budget: the rows of a round, and the shares that this round and the next are made of; a share larger than
the budget goes alone.

Where a process fails, the others must not wait for it: it goes on sending rows, of anything, until the next of the
points at which all processes tell each other whether they go on. There all stop together.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence

import numpy as np

from orbax_t5x.concurrency import CallThread, run_in_pool
from orbax_t5x.errors import CheckpointIOError
from orbax_t5x.lazy import BlockingLeaf, Box, slices_within
from orbax_t5x.lazy.box import box_shape, box_size
from orbax_t5x.multihost.collectives import any_failed, gather_texts
from orbax_t5x.restoring.broadcast.all_gather import empty_row, exchange_rows
from orbax_t5x.restoring.broadcast.schedule import Message, Round, Schedule, row_starts
from orbax_t5x.restoring.execute.buffers import pieces_of
from orbax_t5x.restoring.execute.lowering import Shard
from orbax_t5x.restoring.execute.reading import Reader
from orbax_t5x.restoring.plan_data import PlanEntry
from orbax_t5x.storage.memory import empty_array, naming_memory_errors

# How many rounds pass until all processes tell each other whether they go on. More: rows for nothing for longer after a
# failure. Fewer: more waiting of processes that have no round together.
_ROUNDS_PER_CHECK = 16

Place = Callable[[PlanEntry, list[np.ndarray]], Awaitable[None]]
"""Makes the value of an entry from the buffers of its boxes."""


class Broadcast:
    """One broadcast, on this process.

    Attributes:
      is_parted: whether another process does not answer any more: nobody is left to whom anything could be told.
      bytes_received: from other processes, of what this one needs.
    """

    def __init__(
        self,
        schedule: Schedule,
        texts: Sequence[PlanEntry],
        reader: Reader,
        place: Place,
        *,
        process: int,
        processes: int,
        limit: int,
        path: str | None,
    ):
        """Begins nothing.

        Args:
          schedule: which all processes have alike.
          texts: entries of strings, which all processes need whole.
          reader: reads this process's shares.
          place: called with each entry whose boxes are filled.
          process, processes: the index of this one, and how many there are.
          limit: bytes in flight.
          path: of what is being restored, for errors.
        """
        self._schedule = schedule
        self._texts = texts
        self._reader = reader
        self._place = place
        self._process = process
        self._processes = processes
        self._limit = limit
        self._path = path
        self._reads: dict[int, asyncio.Task[list[np.ndarray]]] = {}
        self._last_round = _last_rounds(schedule, process)
        self._new_shares = _new_shares(schedule, process)
        self._arriving = {entry: _Arriving(entry) for entry in schedule.wanted}
        self.is_parted = False
        self.bytes_received: int = 0

    async def run(self, pool: concurrent.futures.Executor, error: Exception | None) -> None:
        """Takes part to the end, or until some process fails.

        Args:
          pool: for what blocks.
          error: why this process cannot go on, if it has failed before; it takes part until all know.

        Raises:
          CheckpointIOError: a process does not answer.
          CheckpointError: this process could not read its shares. Where only others failed it returns.
        """
        self._thread = CallThread("orbax_t5x-rounds")
        try:
            error = await self._send_texts(pool, error)
            error = await self._go_through_rounds(pool, error)
        finally:
            self._thread.close()
            for task in self._reads.values():
                task.cancel()
            await asyncio.gather(*self._reads.values(), return_exceptions=True)
        if error is not None:
            raise error

    async def _with_all(self, function: Callable[[], object]) -> object:
        """Awaits a call that waits for other processes; in a thread that no read takes."""
        try:
            return await run_in_pool(None, function)
        except CheckpointIOError:
            self.is_parted = True
            raise

    # -- rounds

    async def _go_through_rounds(self, pool: concurrent.futures.Executor, error: Exception | None) -> Exception | None:
        rounds = self._schedule.rounds
        own = [number for number, one in enumerate(rounds) if self._process in one.members]
        following = dict(itertools.pairwise(own))
        # One for all rounds: its memory is free again when a round has ended.
        whole_row = empty_row(max((rounds[number].row_bytes for number in own), default=0))
        if error is None:
            error = await _error_of(self._place_complete([entry for entry in self._arriving], pool))
        for number, one in enumerate(rounds):
            if number % _ROUNDS_PER_CHECK == 0:
                failed = error is not None
                if await self._with_all(lambda failed=failed: any_failed(failed, self._path)):
                    break
            if self._process not in one.members:
                continue
            row = whole_row[: one.row_bytes]
            if error is None:
                error = await _error_of(self._fill_row(row, number, pool))
            if error is None:
                self._read_ahead(one, following.get(number), pool)
            rows = await self._with_all(
                lambda row=row, one=one: exchange_rows(row, one.members, self._path, self._thread)
            )
            assert isinstance(rows, np.ndarray)
            if error is None:
                error = await _error_of(self._take(one, rows, pool))
        return error

    def _read_ahead(self, one: Round, following: int | None, pool: concurrent.futures.Executor) -> None:
        """Begins to read what the next round sends, where there is memory for it beside the rows of this one."""
        if following is None:
            return
        shares = self._schedule.shares
        held = sum(shares[number].size for number in self._reads)
        wanted = sum(shares[number].size for number in self._new_shares.get(following, ()))
        if held + wanted + (len(one.members) + 1) * one.row_bytes <= self._limit:
            self._begin_reads(following, pool)

    def _begin_reads(self, number: int, pool: concurrent.futures.Executor) -> None:
        """Begins to read the shares of which a round is the first to send something."""
        for share in self._new_shares.pop(number, ()):
            self._reads[share] = asyncio.create_task(self._read(share, pool))

    async def _read(self, number: int, pool: concurrent.futures.Executor) -> list[np.ndarray]:
        """What the parts of a share hold."""
        share = self._schedule.shares[number]
        first = share.parts[0].entry
        shards: list[Shard] = []
        outs: dict[int, np.ndarray] = {}
        with naming_memory_errors(first.leaves[0].path, first.name):
            for whole, inside in share.reads:
                out = empty_array(box_shape(whole.box), whole.view.dtype)
                shards.append(Shard(whole.view, whole.box, out))
                for part in inside:
                    outs[part] = out[(*slices_within(share.parts[part].box, whole.box), ...)]  # a view of rank 0, too
        steps = [shards]
        if all(isinstance(leaf, BlockingLeaf) for part in share.parts for leaf in part.entry.leaves):
            await run_in_pool(pool, self._reader.fill, steps, first)
        else:
            await self._reader.fill_awaited(steps, first, pool)
        return [outs[part] for part in range(len(share.parts))]

    async def _fill_row(self, row: np.ndarray, number: int, pool: concurrent.futures.Executor) -> None:
        """This process's messages of a round; what was sent to the end is let go."""
        self._begin_reads(number, pool)
        one = self._schedule.rounds[number]
        messages = one.rows[one.members.index(self._process)]
        outs = {message.share: await self._reads[message.share] for message in messages}
        await run_in_pool(pool, self._copy_into, row, messages, outs)
        for share in outs:
            if self._last_round[share] == number:
                del self._reads[share]

    def _copy_into(
        self, row: np.ndarray, messages: Sequence[Message], outs: Mapping[int, Sequence[np.ndarray]]
    ) -> None:
        for start, message in row_starts(messages):
            part = self._schedule.shares[message.share].parts[message.part]
            values = outs[message.share][message.part][slices_within(message.box, part.box)]
            _as_values(row, start, message, values.dtype)[...] = values

    # -- what arrives

    async def _take(self, one: Round, rows: np.ndarray, pool: concurrent.futures.Executor) -> None:
        touched = await run_in_pool(pool, self._copy_from, one, rows)
        await self._place_complete(touched, pool)

    def _copy_from(self, one: Round, rows: np.ndarray) -> list[PlanEntry]:
        """Takes what this process needs of the rows; returns the entries that it is of."""
        touched: dict[PlanEntry, None] = {}
        for sender, row, messages in zip(one.members, rows, one.rows, strict=True):
            for start, message in row_starts(messages):
                part = self._schedule.shares[message.share].parts[message.part]
                wanted = self._schedule.wanted[part.entry]
                if self._process not in wanted.needers[part.place]:
                    continue
                values = _as_values(row, start, message, part.view.dtype)
                self._arriving[part.entry].take(wanted.boxes[part.place], message.box, values)
                touched[part.entry] = None
                if sender != self._process:
                    self.bytes_received += message.size
        return list(touched)

    async def _place_complete(self, entries: Sequence[PlanEntry], pool: concurrent.futures.Executor) -> None:
        for entry in entries:
            if not self._arriving[entry].elements_left:
                buffers = await run_in_pool(pool, self._arriving.pop(entry).buffers)
                await self._place(entry, buffers)

    # -- strings

    async def _send_texts(self, pool: concurrent.futures.Executor, error: Exception | None) -> Exception | None:
        """Strings, whose sizes nobody knows before they are read: all at once, each process a part of them."""
        if not self._texts:
            return error
        mine: list[bytes] = []
        if error is None:
            error = await _error_of(self._read_texts(mine, pool))
        failed = error is not None
        told = await self._with_all(lambda: gather_texts([] if failed else mine, self._path))
        assert isinstance(told, list)
        if await self._with_all(lambda: any_failed(failed, self._path)):
            return error
        left = [iter(texts) for texts in told]
        for number, entry in enumerate(self._texts):
            outs, _ = pieces_of(entry).allocate(np.dtype(object))
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
                outs, _ = pieces_of(entry).allocate(np.dtype(object))
                assert entry.view is not None
                shards = [Shard(entry.view, box, out) for box, out in zip(entry.boxes(), outs, strict=True)]
                await self._reader.fill_awaited([shards], entry, pool)
                texts += [text for out in outs for text in out.ravel().tolist()]


class _Arriving:
    """An entry of which this process waits for elements.

    Attributes:
      elements_left: how many have not come yet.
    """

    def __init__(self, entry: PlanEntry):
        self._entry = entry
        self._buffers: list[np.ndarray] | None = None
        self.elements_left = sum(map(box_size, entry.boxes()))

    def buffers(self) -> list[np.ndarray]:
        """Those of the entry's boxes on this process, made when the first is wanted."""
        if self._buffers is None:
            assert self._entry.view is not None
            with naming_memory_errors(self._entry.leaves[0].path, self._entry.name):
                self._buffers, _ = pieces_of(self._entry).allocate(np.dtype(self._entry.view.dtype))
        return self._buffers

    def take(self, whole: Box, box: Box, values: np.ndarray) -> None:
        """Takes the elements of a box of one of the entry's boxes."""
        place = self._entry.boxes().index(whole)
        self.buffers()[place][slices_within(box, whole)] = values
        self.elements_left -= values.size


def _as_values(row: np.ndarray, start: int, message: Message, dtype: np.dtype) -> np.ndarray:
    """The elements of a message, in the memory of the row."""
    return row[start : start + message.size].view(dtype).reshape(box_shape(message.box))


async def _error_of(awaitable: Awaitable[None]) -> Exception | None:
    """What an awaitable raises, as a value: who fails must go on sending."""
    try:
        await awaitable
    except Exception as error:
        return error
    return None


def _new_shares(schedule: Schedule, process: int) -> dict[int, list[int]]:
    """The shares of a process by the first round in which it sends something of them."""
    first: dict[int, int] = {}
    for number, message in _sent_by(schedule, process):
        first.setdefault(message.share, number)
    by_round: dict[int, list[int]] = {}
    for share, number in first.items():
        by_round.setdefault(number, []).append(share)
    return by_round


def _last_rounds(schedule: Schedule, process: int) -> dict[int, int]:
    """The last round in which a process sends something of each of its shares."""
    return {message.share: number for number, message in _sent_by(schedule, process)}


def _sent_by(schedule: Schedule, process: int) -> list[tuple[int, Message]]:
    return [
        (number, message)
        for number, one in enumerate(schedule.rounds)
        if process in one.members
        for message in one.rows[one.members.index(process)]
    ]
