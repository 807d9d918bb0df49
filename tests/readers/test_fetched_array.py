"""Chunked arrays over HTTP: shards are read by their chunks, chunks are bounded, threads take them one by one."""

import asyncio
import json
import threading

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

import orbax_t5x as ot
from orbax_t5x.concurrency import Budget
from orbax_t5x.errors import CheckpointIOError, CorruptCheckpointError, LimitExceededError
from orbax_t5x.lazy.leaf import Request
from orbax_t5x.testing.leaf_reads import leaf_of, read_boxes
from tests.support.http_store import serving

W = np.random.default_rng(0).random((64, 96), np.float32)
_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}


def sharding(chunk, codecs=(_BYTES,), **settings):
    return {"name": "sharding_indexed", "configuration": {"chunk_shape": chunk, "codecs": list(codecs), **settings}}


def write(directory, value=W, *, shard=(32, 48), codecs, **metadata):
    with ocp.PyTreeCheckpointer(use_ocdbt=False, use_zarr3=True) as checkpointer:
        checkpointer.save(directory / "item", {"w": value})
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{directory}/item/w/"}}
    grid = {"name": "regular", "configuration": {"chunk_shape": shard}}
    metadata = {"shape": value.shape, "data_type": "float32", "chunk_grid": grid, "codecs": codecs, **metadata}
    ts.open({**spec, "metadata": metadata}, create=True, delete_existing=True).result().write(value).result()


@pytest.mark.parametrize("location", ["start", "end"])
@pytest.mark.parametrize("inner", [[_BYTES], [_BYTES, {"name": "gzip"}, {"name": "crc32c"}]])
@pytest.mark.parametrize("encoding", ["default", "v2"])
def test_shards(tmp_path, location, inner, encoding):
    codecs = [sharding([16, 16], inner, index_location=location)]
    write(tmp_path, codecs=codecs, chunk_key_encoding={"name": encoding})
    with serving(tmp_path) as store, ot.open_checkpoint(f"{store.url}/item") as checkpoint:
        leaf = checkpoint.leaves["w"]
        np.testing.assert_array_equal(leaf.get(), W)
        np.testing.assert_array_equal(leaf[5:40, 90:].get(), W[5:40, 90:])


def test_a_chunk_of_a_shard_costs_its_own_bytes(tmp_path):
    write(tmp_path, shard=(64, 96), codecs=[sharding([16, 16])])
    with serving(tmp_path) as store, ot.open_checkpoint(f"{store.url}/item") as checkpoint:
        store.forget()
        np.testing.assert_array_equal(checkpoint.leaves["w"][3:5, 17:20].get(), W[3:5, 17:20])
        assert store.bytes_sent == 16 * 16 * 4 + 24 * 16 + 4


def test_chunks_that_are_not_in_a_shard(tmp_path):
    """Of zeros nothing is stored: the chunk, or the whole shard, stands for the fill value."""
    value = W.copy()
    value[:16, :16] = 0
    value[32:, 48:] = 0
    write(tmp_path, value, codecs=[sharding([16, 16])])
    metadata = tmp_path / "item" / "_METADATA"
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "store_array_data_equal_to_fill_value": False}))
    with serving(tmp_path) as store, ot.open_checkpoint(f"{store.url}/item") as checkpoint:
        reading = read_boxes(leaf_of(checkpoint, "w"), [((0, 64), (0, 96))])
        np.testing.assert_array_equal(reading.arrays[0], value)
        assert reading.stats.fill_chunks == 1 + 6
        assert not [one for one in store.log if one.name.startswith("item/w/c") and one.range is None]


@pytest.mark.parametrize(
    "codecs",
    [
        [sharding([16, 16], [sharding([8, 8])])],
        [{"name": "transpose", "configuration": {"order": [1, 0]}}, sharding([16, 16])],
        [sharding([16, 16], index_codecs=[{"name": "bytes", "configuration": {"endian": "big"}}])],
    ],
)
def test_other_shards_are_fetched_whole(tmp_path, codecs):
    write(tmp_path, codecs=codecs)
    with serving(tmp_path) as store, ot.open_checkpoint(f"{store.url}/item") as checkpoint:
        store.forget()
        np.testing.assert_array_equal(checkpoint.leaves["w"][3:5, 40:60].get(), W[3:5, 40:60])
        assert sorted(one.name for one in store.log if one.range) == ["item/w/c/0/0", "item/w/c/0/1"]
    with ot.open_checkpoint(tmp_path / "item") as checkpoint:
        np.testing.assert_array_equal(checkpoint.leaves["w"].get(), W)


@pytest.mark.parametrize("at", [0, 9, -1])
def test_an_index_that_is_damaged(tmp_path, at):
    write(tmp_path, codecs=[sharding([16, 16])])
    shard = tmp_path / "item" / "w" / "c" / "0" / "0"
    data = bytearray(shard.read_bytes())
    start = len(data) - 4 - 16 * 6
    data[start + at if at >= 0 else at] ^= 1
    shard.write_bytes(data)
    with serving(tmp_path) as store, ot.open_checkpoint(f"{store.url}/item") as checkpoint:
        with pytest.raises(CorruptCheckpointError, match="index of the shard"):
            checkpoint.leaves["w"].get()


def test_an_index_that_claims_too_much(tmp_path):
    plain = [{"name": "bytes", "configuration": {"endian": "little"}}]
    write(tmp_path, codecs=[sharding([16, 16], index_codecs=plain)])
    shard = tmp_path / "item" / "w" / "c" / "0" / "0"
    data = bytearray(shard.read_bytes())
    data[-8:] = (1 << 40).to_bytes(8, "little")
    shard.write_bytes(data)
    with serving(tmp_path) as store, ot.open_checkpoint(f"{store.url}/item") as checkpoint:
        with pytest.raises(CorruptCheckpointError, match="1099511627776 bytes"):
            checkpoint.leaves["w"].get()


def test_a_chunk_that_is_too_long(tmp_path):
    """No codec makes so much of a chunk; the file is not read, however long it is."""
    with ocp.PyTreeCheckpointer(use_ocdbt=False) as checkpointer:
        checkpointer.save(tmp_path / "item", {"w": W, "s": np.float32(3)})
    with serving(tmp_path) as store, ot.open_checkpoint(f"{store.url}/item") as checkpoint:
        store.files["item/w/0.0"] = bytes(W.nbytes * 2 + (1 << 17))
        with pytest.raises(LimitExceededError, match="more bytes") as caught:
            checkpoint.leaves["w"].get()
        assert caught.value.leaf == "w"
        np.testing.assert_array_equal(checkpoint.leaves["s"].get(), np.float32(3))


def test_reads_of_one_chunk_at_a_time(tmp_path):
    """A read that fails does not take away what another one needs, and both leave nothing in memory."""
    with ocp.PyTreeCheckpointer(use_ocdbt=False) as checkpointer:
        checkpointer.save(tmp_path / "item", {"w": W})
    with serving(tmp_path) as store, ot.open_checkpoint(f"{store.url}/item") as checkpoint:
        (leaf,) = checkpoint.leaves["w"].leaves()
        decoder, data = leaf._kind.decoder, (tmp_path / "item" / "w" / "0.0").read_bytes()
        outs = [np.zeros((2, 96), np.float32) for _ in range(2)]
        begun = [decoder.begin(data, [Request(((1, 3), (0, 96)), out)]) for out in outs]
        with pytest.raises(ValueError):
            decoder.end(*decoder.begin(data[:-1], [Request(((1, 3), (0, 96)), np.zeros((2, 96), np.float32))]))
        for one in begun[::-1]:
            decoder.end(*one)
        for out in outs:
            np.testing.assert_array_equal(out, W[1:3])
        assert not decoder._memory.list().result()


# Threads that take the chunks.

ROWS = np.random.default_rng(0).random((40, 64), np.float32)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("written")
    with ocp.PyTreeCheckpointer(use_ocdbt=False) as checkpointer:
        save_args = {"w": ocp.SaveArgs(chunk_byte_size=256)}
        checkpointer.save(directory / "item", args=ocp.args.PyTreeSave({"w": ROWS}, save_args))
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
    asyncio.run(array.read(requests, "w", budget, is_near=False))
    assert budget._used == 0
    return outs


@pytest.mark.parametrize("limit", [1, 600, 1 << 20])
def test_boxes_of_chunks_and_their_memory(array, limit):
    store, fetched = array
    boxes = [((0, 40), (0, 64)), ((3, 5), (60, 64)), ((39, 40), (1, 2))]
    for box, out in zip(boxes, read(fetched, boxes, Budget(limit)), strict=True):
        np.testing.assert_array_equal(out, ROWS[tuple(slice(*side) for side in box)])
    chunks = [request for request in store.log if request.name.startswith("item/w/") and request.range]
    assert len(chunks) == len({request.name for request in chunks}) == 41, "each chunk once, and the metadata"
    assert not fetched.kind.decoder._memory.list().result()


@pytest.mark.parametrize("is_near", [False, True])
def test_few_threads_read_from_a_server_that_answers_at_once(array, is_near):
    store, fetched = array
    out, threads, gate = np.zeros_like(ROWS), set(), threading.Barrier(2 if is_near else 40)

    def together(request):
        threads.add(threading.current_thread())  # each connection has one of its own
        if len(store.log) <= gate.parties:
            gate.wait(30)

    store.forget()
    store.fault = together
    requests = [Request(((0, 40), (0, 64)), out)]
    asyncio.run(fetched.read(requests, "w", Budget(1 << 20), is_near=is_near))
    np.testing.assert_array_equal(out, ROWS)
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
    out = np.zeros_like(ROWS)

    async def cancelled():
        budget = Budget(1 << 20)
        reading = asyncio.ensure_future(fetched.read([Request(((0, 40), (0, 64)), out)], "w", budget, is_near=False))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert budget._used == 0

    asyncio.run(cancelled())
    assert store.wait_until_closed(30)
    assert not out.any()
