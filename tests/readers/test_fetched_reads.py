"""Chunks that threads take one after the other: within the memory for them, and none after a failure."""

import asyncio
import threading

import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.concurrency import Budget
from orbax_t5x.errors import CheckpointIOError
from orbax_t5x.lazy.leaf import Request
from orbax_t5x.readers.fetched_reads import read_fetched
from tests.support.http_store import serving

W = np.random.default_rng(0).random((40, 64), np.float32)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("written")
    with ocp.PyTreeCheckpointer(use_ocdbt=False) as checkpointer:
        save_args = {"w": ocp.SaveArgs(chunk_byte_size=256)}
        checkpointer.save(directory / "item", args=ocp.args.PyTreeSave({"w": W}, save_args))
    return directory


@pytest.fixture
def array(written):
    with serving(written) as store, ot.open_checkpoint(f"{store.url}/item") as checkpoint:
        (leaf,) = checkpoint.leaves["w"].leaves()
        assert int(np.prod(leaf.chunks)) == 64
        yield store, leaf._opened()


def read(array, boxes, budget):
    outs = [np.zeros([high - low for low, high in box], np.float32) for box in boxes]
    requests = [Request(box, out) for box, out in zip(boxes, outs, strict=True)]
    asyncio.run(read_fetched(array, requests, "w", budget, is_near=False))
    assert budget._used == 0
    return outs


@pytest.mark.parametrize("limit", [1, 600, 1 << 20])
def test_boxes_of_chunks_and_their_memory(array, limit):
    store, fetched = array
    boxes = [((0, 40), (0, 64)), ((3, 5), (60, 64)), ((39, 40), (1, 2))]
    for box, out in zip(boxes, read(fetched, boxes, Budget(limit)), strict=True):
        np.testing.assert_array_equal(out, W[tuple(slice(*side) for side in box)])
    chunks = [request for request in store.log if request.name.startswith("item/w/") and request.range]
    assert len(chunks) == len({request.name for request in chunks}) == 41, "each chunk once, and the metadata"
    assert not fetched._users and not fetched._memory.list().result()


@pytest.mark.parametrize("is_near", [False, True])
def test_few_threads_read_from_a_server_that_answers_at_once(array, is_near):
    store, fetched = array
    out, threads, gate = np.zeros_like(W), set(), threading.Barrier(2 if is_near else 40)

    def together(request):
        threads.add(threading.current_thread())  # each connection has one of its own
        if len(store.log) <= gate.parties:
            gate.wait(30)

    store.forget()
    store.fault = together
    requests = [Request(((0, 40), (0, 64)), out)]
    asyncio.run(read_fetched(fetched, requests, "w", Budget(1 << 20), is_near=is_near))
    np.testing.assert_array_equal(out, W)
    assert len(threads) <= 4 if is_near else len(threads) == 40


def test_nothing_is_requested_after_a_failure(array):
    store, fetched = array
    store.forget()
    store.fault = lambda request: "403"
    # Memory for one chunk at a time.
    with pytest.raises(CheckpointIOError, match="credentials"):
        read(fetched, [((0, 40), (0, 64))], Budget(1))
    assert len(store.log) == 1


def test_a_read_that_is_cancelled_ends_its_requests(array):
    store, fetched = array
    store.fault = lambda request: "chunks without end"
    out = np.zeros_like(W)

    async def cancelled():
        budget = Budget(1 << 20)
        reading = asyncio.ensure_future(
            read_fetched(fetched, [Request(((0, 40), (0, 64)), out)], "w", budget, is_near=False)
        )
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert budget._used == 0

    asyncio.run(cancelled())
    assert store.wait_until_closed(30)
    assert not out.any()
