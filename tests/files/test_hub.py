"""Models of the Hugging Face hub, on stand-ins: one sends its files itself, one sends on to another server."""

import json
import logging
import shutil
import sys
import traceback

import flax.serialization
import huggingface_hub
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from huggingface_hub import constants

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, CheckpointIOError, CheckpointNotFoundError, UnsupportedCheckpointError
from orbax_t5x.files import hub as hub_module
from orbax_t5x.files.hub import parse_hub_path
from tests.support.bundle_writer import bundle_of
from tests.support.format_suites import write_t5x
from tests.support.gguf_files import gguf_bytes
from tests.support.hub_server import B, RedirectingHub, Storage, W, model
from tests.support.torch_files import save_torch

pytestmark = pytest.mark.slow


@pytest.fixture
def hub(tmp_path, monkeypatch):
    storage = Storage()
    server = RedirectingHub(storage)
    storage.files = server.files
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "odd-t0ken")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield server
    server.close()
    storage.close()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a/b", ("a/b", None, "")),
        ("a/b/c/d", ("a/b", None, "c/d")),
        ("a/b@v1", ("a/b", "v1", "")),
        ("a/b@refs/pr/3/c.safetensors", ("a/b", "refs/pr/3", "c.safetensors")),
        ("a/b@refs%2Fpr%2F3/c", ("a/b", "refs/pr/3", "c")),
        ("a/b@refsx/pr/3", ("a/b", "refsx", "pr/3")),
    ],
)
def test_revisions_with_slashes(path, expected):
    assert parse_hub_path(f"hf://{path}") == expected


@pytest.mark.parametrize("path", ["a/b@refs/pr", "a/b@refs/", "a/b@", "tiny", "google", "a b/c"])
def test_paths_that_are_none(path):
    with pytest.raises(UnsupportedCheckpointError, match="hf://org/name"):
        ot.open_checkpoint(f"hf://{path}")


def test_an_eighth_is_read_by_range(hub, tmp_path):
    model(hub)
    with ot.open_checkpoint("hf://google/tiny") as checkpoint:
        assert checkpoint.path == f"hf://google/tiny@{hub.commit}"
        assert checkpoint.metadata["config"] == {"model_type": "t5"}
        hub.storage.forget()
        np.testing.assert_array_equal(checkpoint.leaves["w"][128:256].get(), W[128:256])
        assert W.nbytes // 8 <= hub.storage.bytes_sent < W.nbytes // 8 + 10_000
        mesh = jax.make_mesh((8,), ("x",))
        target = {"w": jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=jax.NamedSharding(mesh, jax.P(None, "x")))}
        restored = ot.restore(checkpoint, {**target, "b": np.zeros_like(B)})
    np.testing.assert_array_equal(restored["w"], W)
    assert not (tmp_path / "cache").exists()


def test_the_token_goes_to_the_hub_alone(hub):
    model(hub)
    ot.restore("hf://google/tiny", None)
    assert hub.log and {request.authorization for request in hub.log} == {"Bearer odd-t0ken"}
    assert hub.storage.log and {request.authorization for request in hub.storage.log} == {None}


def test_files_of_all_kinds_in_directories(hub, tmp_path):
    bundle_of({"w": B}).write(tmp_path, "model.ckpt-7")
    hub.files |= {f"tf/{path.name}": path.read_bytes() for path in tmp_path.glob("model.ckpt-7*")}
    hub.files["gguf/tiny.gguf"] = gguf_bytes({"w": B})
    hub.files["st/model.safetensors.index.json"] = json.dumps({"weight_map": {"w": "a.safetensors"}}).encode()
    hub.files["st/a.safetensors"] = safetensors.numpy.save({"w": B})
    hub.files["flax/flax_model.msgpack"] = flax.serialization.msgpack_serialize({"w": B})
    hub.files["torch/pytorch_model.bin"] = save_torch(tmp_path / "pytorch_model.bin", {"w": B}).read_bytes()
    paths = {"tf/model.ckpt-7": "tf_bundle", "tf": "tf_bundle", "gguf": "gguf", "gguf/tiny.gguf": "gguf"}
    paths |= {"st": "safetensors", "st/a.safetensors": "safetensors", "st/model.safetensors.index.json": "safetensors"}
    paths |= {"torch": "torch", "torch/pytorch_model.bin": "torch"}
    paths |= {"flax": "flax_msgpack", "flax/flax_model.msgpack": "flax_msgpack"}
    for revision in ("", "@v1", "@refs/pr/3", f"@{hub.commit}"):
        for path, format in paths.items():
            with ot.open_checkpoint(f"hf://google/tiny{revision}/{path}") as checkpoint:
                assert checkpoint.format == format
                assert checkpoint.path.startswith(f"hf://google/tiny@{hub.commit}/{path}")
                np.testing.assert_array_equal(checkpoint.leaves["w"].get(), B)


def test_one_model_in_several_encodings_is_safetensors(hub):
    model(hub)
    hub.files |= {"pytorch_model.bin": b"\x80\x02", "flax_model.msgpack": b"", "tf_model.h5": b"\x89HDF"}
    with ot.open_checkpoint("hf://google/tiny") as checkpoint:
        assert checkpoint.format == "safetensors"


@pytest.mark.parametrize("writer", ["orbax", "t5x"])
def test_arrays_in_chunks_are_downloaded_to_the_cache(hub, tmp_path, caplog, writer):
    path = tmp_path / "checkpoint_3"
    if writer == "orbax":
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(path, {"b": B, "w": W})
    else:
        write_t5x(path, {"b": B, "w": W})
    files = {f"run/checkpoint_3/{file.relative_to(path)}": file for file in path.rglob("*") if file.is_file()}
    hub.files |= {name: file.read_bytes() for name, file in files.items()}
    expected = ot.restore(path, None)
    with ot.open_checkpoint("hf://google/tiny/run/checkpoint_3") as checkpoint:
        assert not (tmp_path / "cache").exists(), "opening downloads nothing"
        with caplog.at_level(logging.WARNING):
            restored = ot.restore(checkpoint, None)
    jax.tree.map(np.testing.assert_array_equal, restored, expected)
    assert "are downloaded" in caplog.text
    hub.storage.forget()
    jax.tree.map(np.testing.assert_array_equal, ot.restore("hf://google/tiny/run/checkpoint_3", None), expected)
    assert hub.storage.bytes_sent < W.nbytes // 2, "the arrays are in the cache"


def test_a_file_in_the_cache_is_read_there(hub):
    model(hub)
    huggingface_hub.snapshot_download("google/tiny", endpoint=hub.url)
    hub.storage.forget()
    np.testing.assert_array_equal(ot.restore("hf://google/tiny", None)["w"], W)
    assert not hub.storage.log


def test_without_a_network_the_cache_is_read_with_one_warning(hub, monkeypatch, caplog):
    model(hub)
    huggingface_hub.snapshot_download("google/tiny", endpoint=hub.url)
    hub_module._COMMITS.clear()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with caplog.at_level(logging.WARNING):
        np.testing.assert_array_equal(ot.restore("hf://google/tiny", None)["w"], W)
        np.testing.assert_array_equal(ot.restore(f"hf://google/tiny@{hub.commit}/model.safetensors", None)["w"], W)
    assert hub.commit in caplog.text
    shutil.rmtree(constants.HF_HUB_CACHE)
    with pytest.raises(CheckpointIOError, match="the hub failed"):
        ot.open_checkpoint("hf://google/tiny")


def test_what_is_not_on_the_hub(hub):
    hub.files = {"tf_model.h5": b"\x89HDF"}
    with pytest.raises(UnsupportedCheckpointError, match="HDF5"):
        ot.open_checkpoint("hf://google/tiny")
    for path in ("google/other", "google/tiny@v9", "google/tiny/model.safetensors"):
        with pytest.raises(CheckpointNotFoundError):
            ot.open_checkpoint(f"hf://{path}")
    with pytest.raises(ot.errors.UnsafeCheckpointError):
        ot.open_checkpoint("hf://google/tiny/../../etc")


@pytest.mark.parametrize("answer", [b"{}", b"[]", b"3", b"null", b"{"])
def test_answers_of_the_hub_of_another_form_are_typed(hub, answer, monkeypatch):
    model(hub)
    right = hub.answer_to
    monkeypatch.setattr(hub, "answer_to", lambda name, query: answer if name.startswith("api/") else right(name, query))
    with pytest.raises(CheckpointError):
        ot.open_checkpoint("hf://google/tiny")


def test_secrets_are_masked(hub, monkeypatch):
    model(hub)
    with ot.open_checkpoint("hf://google/tiny") as checkpoint:
        hub.storage.fault = lambda request: "403"
        with pytest.raises(CheckpointError) as caught:
            checkpoint.leaves["w"][512:].get()
    text = "".join(traceback.format_exception(caught.value))
    assert "odd-t0ken" not in text and "Signature=" not in text


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "orbax_t5x.files.hub", raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnsupportedCheckpointError, match=r"pip install 'orbax-t5x\[hf\]'"):
        ot.open_checkpoint("hf://google/tiny")
