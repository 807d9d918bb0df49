"""Files of web servers: few requests, ranges, redirects, changes and failures, on a server of this machine."""

import http.server
import logging
import threading
import urllib.request
from typing import ClassVar

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
    CheckpointNotFoundError,
    UnsupportedCheckpointError,
)
from orbax_t5x.files import remote
from orbax_t5x.files.fetched import fetched_directory
from tests.support.format_suites import write_t5x
from tests.support.http_store import HttpStore, Request, serving

pytestmark = pytest.mark.slow

W = np.random.default_rng(0).normal(size=(1024, 512)).astype(np.float32)
ARRAYS = {"b": np.arange(5, dtype=np.float32), "w": W}


@pytest.fixture
def store():
    with serving() as server:
        server.files["model.safetensors"] = safetensors.numpy.save(ARRAYS)
        yield server


@pytest.fixture
def quick(monkeypatch):
    """Retries that end soon."""
    monkeypatch.setitem(remote.RETRIES, "max_retries", 2)
    monkeypatch.setitem(remote.CLIENT, "read_timeout", "1s")
    monkeypatch.setitem(remote.CLIENT, "timeout", "2s")


def url_of(store):
    return f"{store.url}/model.safetensors"


def test_the_stand_in_answers_ranges(store):
    """It is this suite's own: a range of it is compared with the bytes."""
    store.files["a"] = bytes(range(100))
    request = urllib.request.Request(f"{store.url}/a", headers={"Range": "bytes=10-19"})
    with urllib.request.urlopen(request) as answer:
        assert (answer.status, answer.read()) == (206, bytes(range(10, 20)))
    assert store.log == [Request("GET", "a", "bytes=10-19")]


def test_one_ranged_request_opens_a_file_where_head_is_refused(store):
    store.fault = lambda request: "403" if request.method == "HEAD" else None
    with ot.open_checkpoint(url_of(store)) as checkpoint:
        opened = [request for request in store.log if request.name == "model.safetensors"]
        assert [(request.method, request.range) for request in opened] == [("GET", "bytes=0-65535")]
        store.forget()
        np.testing.assert_array_equal(checkpoint.leaves["w"][256:512].get(), W[256:512])
        assert W.nbytes // 4 <= store.bytes_sent <= W.nbytes // 4 + 1, "and one byte for the ETag at the end"


def test_each_device_reads_its_own_columns(store):
    mesh = jax.make_mesh((8,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.P(None, "x"))
    target = {"b": np.zeros(5, np.float32), "w": jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=sharding)}
    restored = ot.restore(url_of(store), target)
    np.testing.assert_array_equal(restored["w"], W)
    assert restored["w"].sharding == sharding


def test_an_empty_file(store):
    store.files["empty.bin"] = b""
    with pytest.raises(CheckpointError) as caught:
        ot.open_checkpoint(f"{store.url}/empty.bin")
    assert caught.value.path == f"{store.url}/empty.bin"


def test_redirects_are_followed_and_tokens_stay_with_their_host(store):
    other = HttpStore()
    other.files = dict(store.files)
    store.answer_to = lambda name, query: (302, b"", {"Location": f"{other.url}/{name}"})
    try:
        restored = ot.restore(url_of(store), None)
        np.testing.assert_array_equal(restored["w"], W)
        assert other.log and {request.authorization for request in other.log} == {None}
    finally:
        other.close()


def test_a_redirect_in_a_circle_ends(store):
    store.answer_to = lambda name, query: (302, b"", {"Location": f"/{name}"})
    with pytest.raises(CheckpointError):
        ot.open_checkpoint(url_of(store))


@pytest.mark.parametrize("change", [b"x", b"\0" * 24], ids=["another size", "other bytes"])
def test_a_file_that_changed_is_never_taken(store, change):
    with ot.open_checkpoint(url_of(store)) as checkpoint:
        before = store.files["model.safetensors"]
        store.files["model.safetensors"] = before + change if len(change) == 1 else before[:-24] + change
        with pytest.raises(CheckpointGoneError, match="changed after the checkpoint was opened") as caught:
            checkpoint.leaves["w"].get()
    assert caught.value.path == url_of(store)


def test_a_file_that_changes_while_it_is_read_is_noticed_at_the_end(store):
    with ot.open_checkpoint(url_of(store)) as checkpoint:

        def change(request):
            store.files["model.safetensors"] = bytes(len(store.files["model.safetensors"]))

        store.fault = change
        with pytest.raises(CheckpointGoneError):
            ot.restore(checkpoint, {name: np.zeros_like(array) for name, array in ARRAYS.items()})


def test_a_file_that_vanished(store):
    with ot.open_checkpoint(url_of(store)) as checkpoint:
        store.files.clear()
        with pytest.raises(CheckpointGoneError, match="vanished"):
            checkpoint.leaves["w"].get()


def test_a_file_that_is_cut_is_gone_or_corrupt(store):
    with ot.open_checkpoint(url_of(store)) as checkpoint:
        store.files["model.safetensors"] = store.files["model.safetensors"][:1000]
        with pytest.raises(CheckpointGoneError):
            checkpoint.leaves["w"].get()


def test_a_server_without_etags_is_read_by_size_and_time(store):
    store.etag = lambda data: None
    np.testing.assert_array_equal(ot.restore(url_of(store), None)["w"], W)


@pytest.mark.parametrize("fault", ["500", "503", "429", "reset"])
def test_what_passes_is_tried_again(store, fault):
    with ot.open_checkpoint(url_of(store)) as checkpoint:
        faults = [fault, fault]
        store.fault = lambda request: faults.pop() if faults else None
        np.testing.assert_array_equal(checkpoint.leaves["w"].get(), W)
        assert not faults


@pytest.mark.parametrize("fault", ["500", "403", "401", "no ranges", "stall"])
def test_what_does_not_pass_is_typed(store, fault, quick):
    with ot.open_checkpoint(url_of(store)) as checkpoint:
        store.fault = lambda request: fault
        with pytest.raises(CheckpointIOError) as caught:
            checkpoint.leaves["w"].get()
        assert caught.value.path == url_of(store)
    if fault != "stall":
        with pytest.raises((CheckpointIOError, UnsupportedCheckpointError)):
            ot.open_checkpoint(url_of(store))


def test_a_404_is_never_zeros(tmp_path, store):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "item", {"w": W})
    store.directory = tmp_path
    with ot.open_checkpoint(f"{store.url}/item") as checkpoint:
        store.fault = lambda request: "404" if "/d/" in request.name else None
        with pytest.raises(CheckpointError) as caught:
            checkpoint.leaves["w"].get()
        assert caught.value.leaf == "w"


@pytest.mark.parametrize("url", ["https://host/x?a=b", "https://host/x#a", "https://", "https://user:word@host/x"])
def test_urls_to_which_no_name_can_be_appended_are_refused(url):
    with pytest.raises(UnsupportedCheckpointError) as caught:
        ot.open_checkpoint(url)
    assert "user:word" not in str(caught.value)


def test_other_schemes_are_named():
    with pytest.raises(UnsupportedCheckpointError, match="ftp:// paths are not read; http, https, s3, gs, hf"):
        ot.open_checkpoint("ftp://host/x")


def test_a_closed_checkpoint(store):
    with ot.open_checkpoint(url_of(store)) as checkpoint:
        pass
    with pytest.raises(ValueError, match="closed"):
        checkpoint.leaves["w"].get()


class _Proxy(http.server.BaseHTTPRequestHandler):
    """A proxy that keeps what was asked of it."""

    asked: ClassVar[list[str]] = []

    def do_GET(self):
        self.asked.append(self.path)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            urllib.request.Request(self.path, headers={"Range": self.headers["Range"]})
        ) as answer:
            body = answer.read()
            self.send_response(answer.status)
            for name in ("Content-Range", "ETag", "Last-Modified"):
                self.send_header(name, answer.headers[name])
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format, *args):
        pass


def test_proxies_of_the_environment_are_used(store, monkeypatch):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.server_port}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        np.testing.assert_array_equal(ot.restore(url_of(store), None)["w"], W)
        proxy.shutdown()
    assert _Proxy.asked and _Proxy.asked[0] == url_of(store)


# -- arrays, which TensorStore reads


def write_ocdbt(path):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, ARRAYS)
    return path


def write_zarr(path):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(path, ARRAYS)
    return path


WRITERS = {"ocdbt": write_ocdbt, "zarr": write_zarr, "t5x": lambda path: write_t5x(path, ARRAYS)}


def values_of(restored):
    found = restored.get("target", restored)
    return {name: np.asarray(found[name]) for name in ARRAYS}


@pytest.fixture(params=WRITERS)
def item(request, tmp_path):
    return WRITERS[request.param](tmp_path / "checkpoint_1")


def test_arrays_in_chunks(item, store):
    store.directory = item.parent
    expected = ot.restore(item, None)
    restored = ot.restore(f"{store.url}/checkpoint_1", None)
    jax.tree.map(np.testing.assert_array_equal, restored, expected)


def test_a_prefix_that_moved_is_read_where_it_is(item, store):
    with serving(item.parent) as other:
        store.answer_to = lambda name, query: (301, b"", {"Location": f"{other.url}/{name}"})
        restored = ot.restore(f"{store.url}/checkpoint_1", None)
        jax.tree.map(np.testing.assert_array_equal, restored, ot.restore(item, None))
        assert any(request.method == "GET" and "?" not in request.name for request in other.log)


def test_files_that_are_redirected_one_by_one_are_fetched_whole_once(item, store, caplog, tmp_path, monkeypatch):
    """As servers do that send to signed URLs of a store."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with serving(item.parent) as other:
        signed = other.answer_to
        other.answer_to = lambda name, query: (
            signed(name.removeprefix("signed/"), query) if query.get("Signature") == ["s"] else (403, b"", {})
        )
        store.answer_to = lambda name, query: (
            (302, b"", {"Location": f"{other.url}/signed/{name}?Signature=s"})
            if other.contents(name) is not None
            else None
        )
        expected = ot.restore(item, None)
        with caplog.at_level(logging.WARNING):
            restored = ot.restore(f"{store.url}/checkpoint_1", None)
        jax.tree.map(np.testing.assert_array_equal, restored, expected)
        assert "fetched whole" in caplog.text and "Signature" not in caplog.text
        other.forget()
        caplog.clear()
        jax.tree.map(np.testing.assert_array_equal, ot.restore(f"{store.url}/checkpoint_1", None), expected)
        assert "fetched whole" not in caplog.text, "the files are there"


def test_a_file_that_changes_while_it_is_fetched_is_gone(store, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store.files["item/a"], store.files["item/b"] = bytes(100), bytes(200_000)

    def cut(request):
        if request.range is None:
            store.files["item/b"] = bytes(150_000)

    files = remote.RemoteStore(store.url)
    directory = fetched_directory(files, "item", ["a", "c"])
    assert (tmp_path / directory / "a").read_bytes() == bytes(100)
    store.fault = cut
    with pytest.raises(CheckpointGoneError, match="it had 200000 bytes, and 150000 came") as caught:
        fetched_directory(files, "item", ["a", "b"])
    assert caught.value.path == f"{store.url}/item/b"
    assert not [path for path in tmp_path.rglob("b") if path.is_file()]


@pytest.mark.parametrize("name", ["manifest.ocdbt", "w/.zarray"])
def test_an_item_that_changed_is_noticed(store, tmp_path, name):
    write = write_ocdbt if name == "manifest.ocdbt" else write_zarr
    item = write(tmp_path / "checkpoint_1")
    store.files = {f"item/{path.relative_to(item)}": path.read_bytes() for path in item.rglob("*") if path.is_file()}
    with ot.open_checkpoint(f"{store.url}/item") as checkpoint:
        store.files[f"item/{name}"] += b" "
        with pytest.raises(CheckpointGoneError):
            checkpoint.leaves["w"].get()


def test_prng_keys_and_strings_over_http(tmp_path, store):
    tree = {"key": jax.random.key(3), "text": "words", "w": jnp.arange(4)}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "item", tree)
    store.directory = tmp_path
    target = {"key": jax.random.key(0), "w": jnp.zeros(4, int)}
    restored = ot.restore(f"{store.url}/item", target, strict=False)
    assert jax.random.key_data(restored["key"]).tolist() == jax.random.key_data(tree["key"]).tolist()
    with ot.open_checkpoint(f"{store.url}/item") as checkpoint:
        assert checkpoint.leaves["text"].get().tolist() == b"words"


def test_a_missing_directory_says_that_servers_do_not_list(store):
    with pytest.raises((UnsupportedCheckpointError, CheckpointNotFoundError)):
        ot.open_checkpoint(f"{store.url}/nothing")
