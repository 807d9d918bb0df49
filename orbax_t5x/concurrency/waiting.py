"""Coroutines awaited together, in full, or within a budget of bytes."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, NamedTuple, TypeVar

from orbax_t5x.concurrency.carried import as_carried, call_carried, first_failure

_Result = TypeVar("_Result")

# Blocks of small arrays in flight at once; more only lengthen the queue.
_MOST_BLOCKS = 128


async def wait_all(coroutines: Iterable[Coroutine[Any, Any, Any]] | AsyncIterable[Coroutine[Any, Any, Any]]) -> None:
    """Awaits coroutines; the first failure cancels the rest."""
    failure: BaseException | None = None
    tasks: list[asyncio.Task[Any]] = []
    cancelled: list[asyncio.Task[Any]] = []

    def note_end(task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            cancelled.append(task)

    try:
        async with asyncio.TaskGroup() as group:
            if isinstance(coroutines, AsyncIterable):  # which may give more than are worth keeping
                async for coroutine in coroutines:
                    group.create_task(coroutine).add_done_callback(note_end)
            else:
                tasks += [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        failure = first_failure(failures)
    if failure is None and (cancelled or any([task.cancelled() for task in tasks])):
        # A task group takes a task that was cancelled from elsewhere for one that is done.
        failure = asyncio.CancelledError("a task was cancelled from within")
    if failure is not None:
        raise as_carried(failure)


async def await_to_end(awaitable: Awaitable[_Result]) -> _Result:
    """Awaits to the end; a cancellation is raised afterwards."""
    waiting = asyncio.ensure_future(awaitable)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        await asyncio.wait([waiting])
        if not waiting.cancelled():
            waiting.exception()  # which asyncio would otherwise report on standard error
        raise


class Budget:
    """Budget of bytes in flight on an event loop.

    It is first in, first out; a request for more than all of it waits until nothing is in flight.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._used = 0
        self._waiting: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()

    async def take(self, size: int) -> None:
        """Waits until `size` bytes may be in flight."""
        if not self._waiting and self._fits(size):
            self._used += size
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, granted))
        await granted

    def give(self, size: int) -> None:
        """Gives bytes back that were taken."""
        self._used -= size
        while self._waiting and self._fits(self._waiting[0][0]):
            next_size, granted = self._waiting.popleft()
            if not granted.cancelled():
                self._used += next_size
                granted.set_result(None)

    def _fits(self, size: int) -> bool:
        return self._used == 0 or self._used + size <= self.limit


class Block(NamedTuple):
    """Piece of work on a block of an array.

    Attributes:
      work: does it; called when there is room for it.
      memory: bytes that it takes.
      nbytes: bytes of the block, for progress.
      name: of the array.
    """

    work: Callable[[], Coroutine[Any, Any, None]]
    memory: int
    nbytes: int
    name: str


async def for_each_block(
    blocks: Iterable[Block], limit: int, total: int = 0, on_progress: Callable[[int, int, str], None] | None = None
) -> None:
    """Works on several blocks at once; the first failure cancels all."""
    budget, count, done = Budget(limit), asyncio.Semaphore(_MOST_BLOCKS), 0

    async def run(block: Block) -> None:
        nonlocal done
        try:
            await block.work()
            done += block.nbytes
            if on_progress is not None:
                call_carried(on_progress, done, total, block.name)
        finally:
            budget.give(block.memory)
            count.release()

    async def admitted() -> AsyncIterator[Coroutine[Any, Any, None]]:
        for block in blocks:
            await count.acquire()
            await budget.take(block.memory)
            yield run(block)

    await wait_all(admitted())
