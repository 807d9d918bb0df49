"""Models of the hub read by byte range, on a stand-in that sends on to another server, as the hub does."""

import json
import threading

import flax.serialization
import jax
import numpy as np
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, CheckpointGoneError
from tests.support.bundle_writer import bundle_of
from tests.support.gguf_files import gguf_bytes
from tests.support.hub_server import B, W, model
from tests.support.torch_files import save_torch

pytestmark = pytest.mark.slow


@pytest.fixture
def hub(redirecting_hub):
    return redirecting_hub


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


def test_files_of_all_kinds_in_directories(hub, tmp_path, caplog):
    bundle_of({"w": B}).write(tmp_path, "model.ckpt-7")
    hub.files |= {f"tf/{path.name}": path.read_bytes() for path in tmp_path.glob("model.ckpt-7*")}
    hub.files["gguf/tiny.gguf"] = gguf_bytes({"w": B})
    hub.files["st/model.safetensors.index.json"] = json.dumps({"weight_map": {"w": "a.safetensors"}}).encode()
    hub.files["st/a.safetensors"] = safetensors.numpy.save({"w": B})
    hub.files["flax/flax_model.msgpack"] = flax.serialization.msgpack_serialize({"w": B})
    paths = {"tf/model.ckpt-7": "tf_bundle", "tf": "tf_bundle", "gguf": "gguf", "gguf/tiny.gguf": "gguf"}
    paths |= {"st": "safetensors", "st/a.safetensors": "safetensors", "st/model.safetensors.index.json": "safetensors"}
    hub.files["torch/pytorch_model.bin"] = save_torch(tmp_path / "pytorch_model.bin", {"w": B}).read_bytes()
    paths |= {"torch": "torch", "torch/pytorch_model.bin": "torch"}
    paths |= {"flax": "flax_msgpack", "flax/flax_model.msgpack": "flax_msgpack"}
    for revision in ("", "@v1", "@refs/pr/3", f"@{hub.commit}"):
        for path, format in paths.items():
            with ot.open_checkpoint(f"hf://google/tiny{revision}/{path}") as checkpoint:
                assert checkpoint.format == format
                assert checkpoint.path.startswith(f"hf://google/tiny@{hub.commit}/{path}")
                np.testing.assert_array_equal(checkpoint.leaves["w"].get(), B)
    assert "whole" not in caplog.text


def test_a_url_whose_time_is_over_is_asked_for_again(hub):
    model(hub)
    with ot.open_checkpoint("hf://google/tiny") as checkpoint:
        for signature in ("second", "third"):
            hub.storage.signature = signature
            np.testing.assert_array_equal(checkpoint.leaves["w"][5].get(), W[5])


def test_two_requests_find_that_the_time_of_a_url_is_over(hub):
    model(hub)
    with ot.open_checkpoint("hf://google/tiny") as checkpoint:
        np.testing.assert_array_equal(checkpoint.leaves["w"][5].get(), W[5])
        hub.storage.signature = "second"
        gate, waiting = threading.Barrier(2), [1, 2]

        def together(request):
            if waiting:
                waiting.pop()
                gate.wait(30)

        hub.storage.fault = together
        np.testing.assert_array_equal(checkpoint.leaves["w"].get(), W)


@pytest.mark.parametrize("change", [b"x", b"\0" * 24], ids=["another size", "other bytes"])
def test_other_bytes_are_never_taken(hub, change):
    model(hub)
    with ot.open_checkpoint("hf://google/tiny") as checkpoint:
        before = hub.files["model.safetensors"]
        data = before + change if len(change) == 1 else before[: -len(change)] + change
        hub.files["model.safetensors"] = hub.storage.files["model.safetensors"] = data
        with pytest.raises(CheckpointGoneError, match="changed after the checkpoint was opened") as caught:
            checkpoint.leaves["w"][5].get()
        assert caught.value.path == f"hf://google/tiny@{hub.commit}/model.safetensors"
        assert caught.value.leaf == "w"


def test_a_hub_that_moved_on_is_another_commit(hub):
    model(hub)
    with ot.open_checkpoint("hf://google/tiny") as checkpoint:
        asked = len(hub.log)
        hub.storage.signature = "second"
        hub.commit = "f" * 40
        hub.revisions = ("main", checkpoint.path.rpartition("@")[2])
        with pytest.raises(CheckpointGoneError, match="another commit"):
            checkpoint.leaves["w"][5].get()
        assert len(hub.log) > asked


@pytest.mark.parametrize("fault", ["500", "reset", "truncated"])
def test_what_passes_is_tried_again(hub, fault):
    model(hub)
    with ot.open_checkpoint("hf://google/tiny") as checkpoint:
        faults = [fault, fault]
        hub.storage.fault = lambda request: faults.pop() if faults else None
        np.testing.assert_array_equal(checkpoint.leaves["w"][5].get(), W[5])
        assert not faults


@pytest.mark.parametrize("fault", ["206 to every range", "html for a range", "no content range", "shorter", "403"])
def test_answers_of_another_form_are_typed(hub, fault):
    model(hub)
    with ot.open_checkpoint("hf://google/tiny") as checkpoint:
        hub.storage.fault = lambda request: fault
        with pytest.raises(CheckpointError) as caught:
            checkpoint.leaves["w"][5].get()
    assert caught.value.leaf == "w"
    assert "Signature" not in str(caught.value) and "odd-t0ken" not in str(caught.value)


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://a/b", "", "/google/tiny/resolve/main/circle"])
def test_redirects_to_elsewhere_are_not_followed(hub, monkeypatch, location):
    model(hub)
    right = hub.answer_to
    with ot.open_checkpoint("hf://google/tiny") as checkpoint:
        hub.storage.signature = "second"
        answer = (302, b"", {"Location": location})
        monkeypatch.setattr(hub, "answer_to", lambda name, query: answer if "resolve" in name else right(name, query))
        with pytest.raises(CheckpointError):
            checkpoint.leaves["w"][5].get()
