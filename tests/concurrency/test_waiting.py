"""Coroutines that are awaited together, to their end, or within a budget of bytes."""

import asyncio

import pytest

from orbax_t5x.concurrency.waiting import BlocksInFlight, Budget, await_to_end


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


def test_blocks_wait_for_the_budget_and_give_it_back_after_a_failure():
    order, seen = [], []

    async def run():
        blocks = BlocksInFlight(10, 12, lambda *said: seen.append(said))

        async def one(name, size, error=None):
            with blocks.admitted(await blocks.admit(size)):
                order.append(f"{name} begins")
                await asyncio.sleep(0)
                order.append(f"{name} ends")
                if error is not None:
                    raise error
                blocks.note_done(size, name)

        return await asyncio.gather(one("a", 6, ValueError("a")), one("b", 6), one("c", 6), return_exceptions=True)

    assert [type(result) for result in asyncio.run(run())] == [ValueError, type(None), type(None)]
    assert order == [f"{name} {what}" for name in "abc" for what in ("begins", "ends")]
    assert seen == [(6, 12, "b"), (12, 12, "c")]
