"""Coroutines that are awaited together, to their end, or within a budget of bytes."""

import asyncio
import functools

import pytest

from orbax_t5x.concurrency.waiting import Block, Budget, await_to_end, for_each_block


def test_a_budget_is_granted_in_order_and_never_exceeded():
    order, most = [], 0

    async def take_all():
        nonlocal most
        budget, used = Budget(10), 0

        async def one(number, size):
            nonlocal used, most
            await budget.take(size)
            order.append(number)
            used += size
            most = max(most, used if size <= 10 else 0)
            assert used <= 10 or used == size, "beside a request above the budget nothing is in flight"
            await asyncio.sleep(0)
            used -= size
            budget.give(size)

        await asyncio.gather(*(one(number, size) for number, size in enumerate((4, 5, 6, 1, 30, 2, 8))))

    asyncio.run(take_all())
    assert order == list(range(7)) and 9 <= most <= 10


def test_a_request_that_was_cancelled_takes_nothing():
    async def run():
        budget = Budget(1)
        await budget.take(1)
        waiting = asyncio.create_task(budget.take(1))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        budget.give(1)
        await asyncio.wait_for(budget.take(1), 60)

    asyncio.run(run())


def test_what_is_awaited_to_its_end_ends_before_the_cancellation():
    ended = []

    async def run():
        release = asyncio.Event()

        async def work():
            await release.wait()
            ended.append("work")

        task = asyncio.create_task(await_to_end(work()))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == ["work"]

    asyncio.run(run())


def test_blocks_wait_for_room_in_order_and_say_what_is_done():
    order, seen = [], []

    async def work(name):
        order.append(f"{name} begins")
        await asyncio.sleep(0)
        order.append(f"{name} ends")

    blocks = [Block(functools.partial(work, name), 6, 4, name) for name in "abc"]
    asyncio.run(for_each_block(iter(blocks), 10, 12, lambda *said: seen.append(said)))
    assert order == [f"{name} {what}" for name in "abc" for what in ("begins", "ends")]
    assert seen == [(4, 12, "a"), (8, 12, "b"), (12, 12, "c")]


def test_the_first_failure_of_a_block_cancels_the_others():
    begun = []

    async def work(name):
        begun.append(name)
        if name == "b":
            raise ValueError(name)
        await asyncio.Event().wait()

    blocks = (Block(functools.partial(work, name), 5, 5, name) for name in "abc")
    with pytest.raises(ValueError, match="b"):
        asyncio.run(for_each_block(blocks, 10))
    assert begun == ["a", "b"]
