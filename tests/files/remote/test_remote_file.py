"""Files of remote stores: sizes that no protocol tells, reads that are announced, and bytes that are not fetched."""

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.extras.web import web_server
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.places import files_at, opening
from orbax_t5x.files.remote import remote_file, server
from tests.support.http_store import serving

DATA = np.random.default_rng(1).bytes(5 << 20)


def file_of(store, data):
    store.files["file"] = data
    with opening(Limits()):
        return files_at(store.url).file("file")


@pytest.fixture(params=[True, False], ids=["named by the server", "searched for, as in buckets"])
def sizes_are_named(request, monkeypatch):
    monkeypatch.setattr(web_server.WebServer, "is_bounded", request.param)


@pytest.mark.usefixtures("sizes_are_named")
@pytest.mark.parametrize("size", [0, 1, 100, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, 1 << 18, 1 << 20, 3_333_333])
def test_sizes_are_found(store, size):
    assert file_of(store, DATA[:size]).size == size
    file = file_of(store, DATA[:size])
    assert file.known_size is None
    assert file.require_size(size)
    assert file.known_size == size
    assert not file_of(store, DATA[:size]).require_size(size + 1)
    if size:
        assert not file_of(store, DATA[:size]).require_size(size - 1)


def test_small_reads_come_from_few_requests(store):
    file = file_of(store, DATA[:200_000])
    store.forget()
    for offset in range(0, 60_000, 100):
        assert bytes(file.read(offset, 100)) == DATA[offset : offset + 100]
    assert len(store.log) == 1
    with pytest.raises(ot.errors.CorruptCheckpointError, match="of a file of 200000 bytes"):
        file.read(199_950, 100)


def test_a_server_that_has_bytes_at_every_offset_has_no_file(store):
    file = file_of(store, DATA[:100_000])
    store.fault = lambda request: "206 to every range"
    try:
        with pytest.raises(ot.errors.CheckpointIOError, match="any range"):
            _ = file.size
    finally:
        store.fault = lambda request: None


def test_a_size_is_named_by_one_answer(store):
    file = file_of(store, DATA)
    store.forget()
    assert file.size == len(DATA)
    assert (len(store.log), store.bytes_sent) == (1, 1)


@pytest.mark.slow
def test_a_size_is_searched_for_with_single_bytes(store, monkeypatch):
    monkeypatch.setattr(web_server.WebServer, "is_bounded", False)
    file = file_of(store, DATA)
    store.forget()
    assert file.size == len(DATA)
    assert store.bytes_sent < 1 << 17


def test_another_size_is_another_file(store, monkeypatch):
    """Where the server sends no ETag, the size of the file in each answer is compared."""
    monkeypatch.setattr(store, "etag", lambda data: None)
    file = file_of(store, DATA[:100_000])
    assert file.size == 100_000
    store.files["file"] = DATA[:200_000]
    with pytest.raises(ot.errors.CheckpointGoneError, match="has 200000 bytes, and had 100000"):
        file.read_into(0, [np.zeros(1000, np.uint8)])


@pytest.mark.slow
@given(st.data())
def test_announced_reads_are_the_files_bytes(data):
    """By pieces that are smaller than the ranges, into buffers that are smaller and larger than the pieces."""
    ranges = data.draw(st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 300)), max_size=8))
    cuts = data.draw(st.integers(1, 120))
    buffers = [[np.zeros(min(cuts, size - at), np.uint8) for at in range(0, size, cuts)] for _, size in ranges]
    into = data.draw(st.sampled_from([(), buffers]))  # those of one buffer are received in place
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_file, "_PIECE_BYTES", 64)
        patch.setattr(server, "_AHEAD_BYTES", 200)
        file = file_of(STORE, DATA[:5000])
        ahead = file.ahead(iter(ranges), into)
        for (offset, size), outs in zip(ranges, buffers, strict=True):
            ahead.read_into(offset, outs)
            assert b"".join(out.tobytes() for out in outs) == DATA[offset : offset + size]


def test_reads_ahead_share_one_bound_and_give_it_back(store, monkeypatch):
    monkeypatch.setattr(remote_file, "_PIECE_BYTES", 10_000)
    monkeypatch.setattr(server, "_AHEAD_BYTES", 50_000)
    file = file_of(store, DATA)
    bound = file._server.ahead
    outs = [np.zeros(20_000, np.uint8) for _ in range(2)]
    readers = [file.ahead([(0, 100_000)]) for _ in outs]
    for reader, out in zip(readers, outs, strict=True):
        reader.read_into(0, [out])
        assert out.tobytes() == DATA[:20_000]
    assert not bound.take(10_000, needed=False), "the first reader is ahead by the whole bound"
    readers[1].read_into(20_000, [np.zeros(80_000, np.uint8)])
    readers.pop(0)
    del reader
    assert bound.take(50_000, needed=False), "what a reader leaves unread is given back with it"


STORE = None


@pytest.fixture(autouse=True, scope="module")
def shared(store):
    """For the property, which pytest gives no fixtures of a function."""
    global STORE
    STORE = store


def test_a_file_that_is_loaded_is_fetched_once(store):
    file = file_of(store, DATA[:300_000])
    file.load(1 << 20)
    store.forget()
    out = np.zeros(1000, np.uint8)
    file.read_into(77_777, [out])
    assert out.tobytes() == DATA[77_777:78_777]
    assert bytes(file.read(0, 300_000)) == DATA[:300_000]
    assert not store.log
    large = file_of(store, DATA)
    store.forget()
    large.load(1 << 20)
    assert store.bytes_sent < 100, "what is larger than the limit is not fetched"


def test_a_box_costs_its_own_bytes(tmp_path):
    """Rows of an array are fetched, not the array; columns as the gaps between them allow."""
    w = np.random.default_rng(0).random((2048, 1024), np.float32)
    safetensors.numpy.save_file({"w": w}, tmp_path / "model.safetensors")
    with serving(tmp_path) as running, ot.open_checkpoint(f"{running.url}/model.safetensors") as checkpoint:
        opening = running.bytes_sent
        assert opening < 200_000
        running.forget()
        np.testing.assert_array_equal(checkpoint.leaves["w"][256:512].get(), w[256:512])
        assert running.bytes_sent == w[256:512].nbytes
        assert len(running.log) <= 2
        running.forget()
        np.testing.assert_array_equal(checkpoint.leaves["w"][:4, 1000:].get(), w[:4, 1000:])
        assert running.bytes_sent <= 4 * 4096 + 4096
