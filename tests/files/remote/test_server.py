"""What goes wrong with a store: typed errors that name URL and leaf, within the time limit, and never other bytes."""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointIOError,
    CorruptCheckpointError,
    LimitExceededError,
    UnsupportedCheckpointError,
)
from orbax_t5x.files import places
from tests.support.http_store import serving

W = np.random.default_rng(0).random((1024, 512), np.float32)
# What each fault is, while array bytes are read. A store that fails for ever is given up after the limit.
FAULTS = {
    "stall": CheckpointIOError,
    "reset": CheckpointIOError,
    "403": CheckpointIOError,
    "404": CheckpointGoneError,
    "429": CheckpointIOError,
    "500": CheckpointIOError,
    "503": CheckpointIOError,
    "301": CheckpointIOError,
    "302": CheckpointIOError,
    "no ranges": UnsupportedCheckpointError,
    "html": CheckpointError,
    "html for a range": CheckpointError,
    "truncated": CheckpointIOError,
    "shorter": CheckpointError,
    "no content range": UnsupportedCheckpointError,
}


@pytest.fixture
def store(tmp_path):
    safetensors.numpy.save_file({"w": W, "b": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with serving(tmp_path) as running:
        yield running


@pytest.fixture
def chunked(tmp_path):
    with ocp.PyTreeCheckpointer(use_ocdbt=False) as checkpointer:
        checkpointer.save(tmp_path / "item", {"w": W, "b": np.ones(3, np.float32)})
    with serving(tmp_path) as running:
        yield running


@pytest.fixture
def patience(monkeypatch):
    """Sets how long a store may be silent, where its silence is expected; others may take as long as they need."""
    return lambda error, secs=3.0: error is CheckpointIOError and monkeypatch.setattr(places, "IO_TIMEOUT_SECS", secs)


def url_of(store):
    return f"{store.url}/{'model.safetensors' if (store.directory / 'model.safetensors').exists() else 'item'}"


@pytest.mark.parametrize("fault", FAULTS)
def test_byte_ranges(store, fault, patience):
    patience(FAULTS[fault])
    with ot.open_checkpoint(url_of(store)) as checkpoint:
        store.fault = lambda request: fault
        begun = time.monotonic()
        with pytest.raises(FAULTS[fault]) as caught:
            checkpoint.leaves["w"].get()
        assert time.monotonic() - begun < 30, "a guard against waits without end"
        assert (caught.value.path, caught.value.leaf) == (url_of(store), "w")
        store.fault = lambda request: None
        np.testing.assert_array_equal(checkpoint.leaves["w"].get(), W)


def test_a_table_on_a_server_without_ranges(tmp_path):
    """The checkpoint is not damaged; it is the server that cannot be read."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "item", {"w": W})
    with serving(tmp_path) as store, ot.open_checkpoint(f"{store.url}/item") as checkpoint:
        store.fault = lambda request: "no ranges"
        with pytest.raises(UnsupportedCheckpointError, match="only a server that answers byte ranges"):
            checkpoint.leaves["w"].get()


# Chunks are read whole: nothing asks for a range of them.
OF_WHOLE_FILES = sorted(FAULTS.keys() - {"no ranges", "html for a range", "shorter", "no content range"})


@pytest.mark.parametrize("fault", OF_WHOLE_FILES)
def test_chunks(chunked, fault, patience):
    """A chunk that is not there is damage; one that is a page of HTML is as well."""
    expected = {"404": CorruptCheckpointError, "html": CorruptCheckpointError}.get(fault, CheckpointIOError)
    patience(expected)
    with ot.open_checkpoint(url_of(chunked)) as checkpoint:
        chunked.fault = lambda request: fault if request.name == "item/w/0.0" else None
        with pytest.raises(CheckpointError) as caught:
            checkpoint.leaves["w"].get()
        assert type(caught.value) is expected
        assert caught.value.leaf == "w"
        assert caught.value.path is not None and caught.value.path.startswith(chunked.url)
        np.testing.assert_array_equal(checkpoint.leaves["b"].get(), np.ones(3))


@pytest.mark.parametrize("fault", ["503", "429", "reset", "truncated"])
@pytest.mark.parametrize("kind", ["store", "chunked"])
def test_what_passes_is_retried(kind, fault, request):
    server = request.getfixturevalue(kind)
    failed: set[str] = set()

    def once(asked):
        key = f"{asked.method} {asked.name} {asked.range}"
        if key in failed:
            return None
        failed.add(key)
        return fault

    server.fault = once
    target = {"w": jax.ShapeDtypeStruct(W.shape, W.dtype), "b": jax.ShapeDtypeStruct((3,), jnp.float32)}
    restored = ot.restore(url_of(server), target)
    np.testing.assert_array_equal(restored["w"], W)
    assert failed


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - {"shorter"}))
def test_opening(store, fault, patience):
    """Before anything is known of a store, what it refuses or does not have is one or the other."""
    patience(CheckpointIOError, 0.5)
    store.fault = lambda request: fault
    with pytest.raises(CheckpointError) as caught:
        ot.open_checkpoint(url_of(store))
    assert caught.value.path is not None and caught.value.path.startswith(store.url)


def test_a_changed_etag_is_never_mixed_bytes(store):
    """The file is replaced by one of the same length between two requests for parts of one leaf."""
    path = store.directory / "model.safetensors"
    old = path.read_bytes()
    with ot.open_checkpoint(url_of(store)) as checkpoint:
        store.files["model.safetensors"] = old[:-5000] + bytes(5000)
        with pytest.raises(CheckpointGoneError, match="changed after the checkpoint was opened"):
            checkpoint.leaves["w"].get()


def test_a_file_that_changes_between_two_ranges(store):
    data = (store.directory / "model.safetensors").read_bytes()
    with ot.open_checkpoint(url_of(store)) as checkpoint:
        seen: list[object] = []

        def swap(request):
            seen.append(request)
            if len(seen) == 2:
                store.files["model.safetensors"] = bytes(len(data))
            return None

        store.fault = swap
        # Two columns far apart: several requests.
        plan = ot.plan_restore(checkpoint, {"w": np.zeros_like(W), "b": np.zeros(3, np.float32)})
        with pytest.raises(CheckpointGoneError):
            plan.execute()
        assert len(seen) >= 2


def test_a_changed_metadata_file_of_a_chunked_array(chunked):
    with ot.open_checkpoint(url_of(chunked)) as checkpoint:
        metadata = json.loads((chunked.directory / "item" / "w" / ".zarray").read_text())
        chunked.files["item/w/.zarray"] = json.dumps(metadata, indent=3).encode()
        with pytest.raises(CheckpointGoneError, match="changed"):
            checkpoint.leaves["w"].get()


def test_a_server_without_etags_is_read(store):
    store.etag = lambda data: None
    with ot.open_checkpoint(url_of(store)) as checkpoint:
        np.testing.assert_array_equal(checkpoint.leaves["w"].get(), W)


def test_a_file_that_became_shorter(store):
    data = (store.directory / "model.safetensors").read_bytes()
    with ot.open_checkpoint(url_of(store)) as checkpoint:
        store.files["model.safetensors"] = data[:1000]
        with pytest.raises(CheckpointGoneError):
            checkpoint.leaves["w"].get()


def test_a_file_that_is_cut_from_the_start(store):
    store.files["model.safetensors"] = (store.directory / "model.safetensors").read_bytes()[:-7]
    with pytest.raises(CorruptCheckpointError, match=r"the tensors end at byte \d+, and the file at byte \d+"):
        ot.open_checkpoint(url_of(store))


def test_metadata_that_are_too_large_are_not_fetched(store):
    limits = ot.Limits(index_bytes=100)
    store.files["sharded/model.safetensors.index.json"] = b" " * 200
    with pytest.raises(LimitExceededError):
        ot.open_checkpoint(f"{store.url}/sharded", limits=limits)
    assert store.bytes_sent < 1000


def test_a_stalled_store_is_given_up_in_a_restore(chunked, patience):
    """The rest of the process goes on, and the buffer of the abandoned read stays until TensorStore is done with it."""
    patience(CheckpointIOError)
    chunked.fault = lambda request: "stall" if request.name == "item/w/0.0" else None
    with pytest.raises(CheckpointIOError, match=r"no answer for 3 s"):
        ot.restore(url_of(chunked), {"w": np.zeros_like(W), "b": np.zeros(3, np.float32)})
    chunked.fault = lambda request: None
    restored = ot.restore(url_of(chunked), {"w": np.zeros_like(W), "b": np.zeros(3, np.float32)})
    np.testing.assert_array_equal(restored["w"], W)


def test_slow_answers_are_not_silence(store, patience):
    """The clock is of the store, not of one request: what takes longer than the limit in all is waited for."""
    patience(CheckpointIOError, 4.0)
    store.latency = 0.8
    with ot.open_checkpoint(url_of(store)) as checkpoint:
        np.testing.assert_array_equal(checkpoint.leaves["w"].get(), W)
