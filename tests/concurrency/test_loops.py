"""Event loops in threads: what ends a loop elsewhere does not end these, and failures reach the caller as they are."""

import asyncio
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import tensorstore as ts

from orbax_t5x.concurrency import LoopThread, carry, process_threads, run_in_pool, run_on_read_thread, wait_all
from orbax_t5x.errors import CheckpointIOError

KINDS = [
    ValueError,
    StopIteration,
    StopAsyncIteration,
    KeyboardInterrupt,
    SystemExit,
    GeneratorExit,
    asyncio.CancelledError,
]


def seen_as(kind):
    return RuntimeError if kind is StopIteration else kind


def raising(kind):
    raise kind("by the user")


async def raising_later(kind):
    await asyncio.sleep(0)
    raise kind("by the user")


async def plain_task(kind):
    # A child task of its own: one that fails with KeyboardInterrupt ends the loop that it runs in.
    await asyncio.gather(asyncio.ensure_future(raising_later(kind)))


async def in_a_group(kind):
    await wait_all([carry(raising_later(kind)), asyncio.sleep(3600)])


async def in_a_pool(kind):
    with ThreadPoolExecutor(1) as pool:
        await wait_all([run_in_pool(pool, raising, kind), asyncio.sleep(3600)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [raising_later, plain_task, in_a_group, in_a_pool])
def test_whatever_is_raised_reaches_the_caller_and_the_thread_serves_on(make, kind):
    with LoopThread() as thread:
        with pytest.raises(seen_as(kind), match="StopIteration" if kind is StopIteration else "by the user") as caught:
            thread.run(make(kind))
        if kind is StopIteration:
            assert isinstance(caught.value.__cause__, StopIteration)
        done = []

        async def later():
            done.append(True)

        thread.run(later())
        assert done


def test_the_first_failure_cancels_the_rest_and_one_that_names_a_leaf_is_shown():
    ended = []

    async def waiting():
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("waiting")

    async def failing(error):
        raise error

    async def both():
        failures = [KeyError("x"), CheckpointIOError("broken", path="/p", leaf="a")]
        await wait_all([waiting(), *(failing(failure) for failure in failures)])

    with LoopThread() as thread, pytest.raises(CheckpointIOError, match="broken"):
        thread.run(both())
    assert ended == ["waiting"]


def test_a_task_that_is_cancelled_from_within_counts_as_failed():
    async def cancels_itself():
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    with LoopThread() as thread, pytest.raises(asyncio.CancelledError):
        thread.run(wait_all([cancels_itself()]))


def test_cancelling_a_carried_coroutine_cancels_it():
    async def main():
        task = asyncio.ensure_future(carry(asyncio.sleep(3600)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_a_coroutine_that_stops_the_loop_stops_nothing():
    async def stops():
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)

    with LoopThread() as thread:
        thread.run(stops())
        thread.run(stops())


def test_a_caller_notices_that_the_thread_has_ended():
    thread = LoopThread()
    begun = threading.Event()
    closer = threading.Thread(target=lambda: begun.wait(60) and thread.close())
    closer.start()

    async def waits():
        begun.set()
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="thread that reads has ended"):
        thread.run(waits())
    closer.join()


def test_a_result_that_comes_after_the_end_of_a_loop_is_ignored(monkeypatch):
    """TensorStore tells the loop, in a thread of its own, also of what was cancelled in that very moment."""
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    promise, future = ts.Promise.new()
    waiting = []

    async def waits():
        waiting.append(future.__await__())

    with LoopThread() as thread:
        thread.run(waits())
    promise.set_result(1)
    assert future.done() and not told


def test_a_closed_thread_is_an_error():
    async def nothing():
        pass

    with LoopThread() as thread:
        pass
    with pytest.raises(RuntimeError, match="thread that reads has ended"):
        thread.run(nothing())


def test_an_ended_read_thread_is_replaced():
    done = []

    async def read():
        done.append(threading.current_thread())

    run_on_read_thread(read())
    process_threads._process_threads.read_thread().close()
    run_on_read_thread(read())
    assert len(set(done)) == 2


@pytest.mark.slow
def test_an_interrupted_caller_waits_until_the_coroutine_has_ended():
    # In a process of its own, whose main thread sends itself the signal.
    code = """
import asyncio, signal, threading
from orbax_t5x.concurrency import LoopThread
signal.signal(signal.SIGINT, signal.default_int_handler)
ended = []

async def waits():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        await asyncio.sleep(0)
        ended.append(True)

with LoopThread() as thread:
    try:
        thread.run(waits())
    except KeyboardInterrupt:
        assert ended
        print("interrupted")
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=800, check=False, env=environment
    )
    assert done.stdout.strip() == "interrupted", done.stderr


def test_the_end_of_a_loop_waits_for_threads_that_call_it(monkeypatch):
    """A native thread that waits for the interpreter's lock when Python ends would abort the process."""
    thread, entered, leave = LoopThread(), threading.Event(), threading.Event()
    wake = type(thread._loop)._write_to_self

    def slowly(loop):
        wake(loop)
        if threading.current_thread().name == "native":
            entered.set()
            assert leave.wait(60)

    monkeypatch.setattr(type(thread._loop), "_write_to_self", slowly)
    calling = threading.Thread(target=lambda: thread._loop.call_soon_threadsafe(print), name="native")
    calling.start()
    assert entered.wait(60)
    closing = threading.Thread(target=thread.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    leave.set()
    for one in (calling, closing):
        one.join(60)
        assert not one.is_alive()
