"""Models of the Hugging Face hub, on a stand-in."""

import json
import sys
import traceback
from pathlib import Path

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, CheckpointNotFoundError, LimitExceededError, UnsupportedCheckpointError
from orbax_t5x.extras.web import hub as hub_module
from orbax_t5x.extras.web.hub import find_commit, known_commit, parse_hub_path
from tests.support.http_store import HttpStore
from tests.support.hub_server import Hub, model
from tests.support.torch_files import save_torch

pytestmark = pytest.mark.slow
W = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    from huggingface_hub import constants

    server = Hub()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    # A stand-in hub has no store of chunks.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield server
    server.close()


def asked_for(server: HttpStore) -> set[str]:
    return {
        Path(request.name).name for request in server.log if "/resolve/" in request.name and request.method == "GET"
    }


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a/b", ("a/b", None, "")),
        ("a/b/c/d", ("a/b", None, "c/d")),
        ("a/b@v1", ("a/b", "v1", "")),
        ("a/b@v1/refs/pr/3", ("a/b", "v1", "refs/pr/3")),
        ("a/b@refs/pr/3", ("a/b", "refs/pr/3", "")),
        ("a/b@refs/pr/3/", ("a/b", "refs/pr/3", "")),
        ("a/b@refs/pr/3/c.safetensors", ("a/b", "refs/pr/3", "c.safetensors")),
        ("a/b@refs/convert/parquet/c/d", ("a/b", "refs/convert/parquet", "c/d")),
        ("a/b@refs%2Fpr%2F3/c", ("a/b", "refs/pr/3", "c")),
        ("a/b@refs", ("a/b", "refs", "")),
        ("a/b@refsx/pr/3", ("a/b", "refsx", "pr/3")),
    ],
)
def test_revisions_with_slashes(path, expected):
    assert parse_hub_path(f"hf://{path}") == expected


@pytest.mark.parametrize("path", ["a/b@refs/pr", "a/b@refs/", "a/b@", "a/b@/c"])
def test_revisions_that_are_none(path):
    with pytest.raises(UnsupportedCheckpointError, match="hf://org/name"):
        parse_hub_path(f"hf://{path}")


@pytest.mark.parametrize(
    "path", ["google/tiny", "google/tiny@v1", "google/tiny@refs/pr/3", "google/tiny/model.safetensors"]
)
def test_safetensors_of_the_hub(hub, path):
    hub.files = {
        "model.safetensors": safetensors.numpy.save({"w": W}),
        "config.json": b'{"model_type": "t5"}',
        "pytorch_model.bin": b"\x80\x02",
        "flax_model.msgpack": b"",
    }
    target = {"w": jax.ShapeDtypeStruct(W.shape, jnp.float32)}
    np.testing.assert_array_equal(ot.restore(f"hf://{path}", target)["w"], W)
    assert asked_for(hub) == {"model.safetensors", "config.json"}
    with ot.open_checkpoint(f"hf://{path}") as checkpoint:
        assert checkpoint.metadata["config"] == {"model_type": "t5"}


def test_shards_and_directories_of_the_hub(hub):
    index = {"metadata": {}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}
    for prefix in ("", "other/"):
        hub.files[f"{prefix}model.safetensors.index.json"] = json.dumps(index).encode()
        hub.files[f"{prefix}model-00001-of-00001.safetensors"] = safetensors.numpy.save({"w": W})
    for path in ("", "/model.safetensors.index.json", "/other", "/other/model.safetensors.index.json"):
        with ot.open_checkpoint(f"hf://google/tiny{path}") as checkpoint:
            np.testing.assert_array_equal(checkpoint.leaves["w"].get(), W)


def test_flax_of_the_hub(hub):
    hub.files = {"flax_model.msgpack": flax.serialization.msgpack_serialize({"w": W}), "config.json": b"{}"}
    with ot.open_checkpoint("hf://google/tiny") as checkpoint:
        assert checkpoint.format == "flax_msgpack"
        np.testing.assert_array_equal(checkpoint.leaves["w"].get(), W)


@pytest.mark.parametrize("sharded", [False, True])
def test_pytorch_of_the_hub(hub, tmp_path, sharded):
    file = "pytorch_model-00001-of-00001.bin" if sharded else "pytorch_model.bin"
    hub.files = {file: save_torch(tmp_path / file, {"w": W}).read_bytes(), "config.json": b"{}"}
    if sharded:
        hub.files["pytorch_model.bin.index.json"] = json.dumps({"weight_map": {"w": file}}).encode()
    for path in ("", f"/{file}", *(["/pytorch_model.bin.index.json"] if sharded else [])):
        with ot.open_checkpoint(f"hf://google/tiny{path}") as checkpoint:
            assert checkpoint.format == "torch"
            np.testing.assert_array_equal(checkpoint.leaves["w"].get(), W)


ODD_ANSWERS = [b"{}", b"[]", b"3", b"null", b"[1]", b'[{"type": "file"}]', b'[{"a": 1}]', b"{"]


@pytest.mark.parametrize("answer", ODD_ANSWERS)
def test_answers_of_the_hub_of_another_form_are_typed(hub, answer, monkeypatch):
    hub.files = {"model.safetensors": safetensors.numpy.save({"w": W})}
    right = hub.answer_to
    monkeypatch.setattr(hub, "answer_to", lambda name, query: answer if name.startswith("api/") else right(name, query))
    with pytest.raises(ot.errors.CheckpointError):
        ot.open_checkpoint("hf://google/tiny")


def test_a_token_that_the_hub_sends_back_is_masked(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "odd-t0ken")
    echoed = (403, b"{}", {"X-Error-Message": "not for Bearer odd-t0ken, that is odd-t0ken"})
    monkeypatch.setattr(hub, "answer_to", lambda name, query: echoed)
    with pytest.raises(ot.errors.CheckpointError) as caught:
        ot.open_checkpoint("hf://google/tiny")
    assert "odd-t0ken" not in "".join(traceback.format_exception(caught.value))


def test_what_is_not_on_the_hub(hub):
    hub.files = {"tf_model.h5": b"\x89HDF"}
    with pytest.raises(UnsupportedCheckpointError, match=r"neither model\.safetensors"):
        ot.open_checkpoint("hf://google/tiny")
    for path in ("google/other", "google/tiny@v9", "google/tiny/model.safetensors"):
        with pytest.raises(CheckpointNotFoundError):
            ot.open_checkpoint(f"hf://{path}")
    for path in ("tiny", "google", "a b/c"):
        with pytest.raises(UnsupportedCheckpointError, match="hf://org/name"):
            ot.open_checkpoint(f"hf://{path}")
    with pytest.raises(ot.errors.UnsafeCheckpointError):
        ot.open_checkpoint("hf://google/tiny/../../etc")


@pytest.fixture
def commits(redirecting_hub):
    model(redirecting_hub)
    return redirecting_hub


def test_revisions(commits):
    for revision in ("", "@v1", "@refs/pr/3", f"@{commits.commit}"):
        commit = find_commit(parse_hub_path(f"hf://google/tiny{revision}"))
        assert (commit.revision, set(commit.sizes)) == (commits.commit, set(commits.files))
    assert known_commit(f"hf://google/tiny@{commits.commit}") == commit
    assert {request.authorization for request in commits.log} == {"Bearer odd-t0ken"}
    for path in ("hf://google/other", "hf://google/tiny@v9"):
        with pytest.raises(CheckpointNotFoundError):
            find_commit(parse_hub_path(path))


SHA = "0" * 40
ODD = [b"[]", b"{", b"{}", b'{"sha": 3}', b'{"sha": "a/b"}', b'{"sha": "a", "siblings": [3]}', b"\xff", b"[" * 99_999]
ODD += [json.dumps({"sha": SHA, "siblings": [{"rfilename": 3}]}).encode()]


def test_answers_of_another_form(commits, monkeypatch):
    for answer in ODD:
        monkeypatch.setattr(commits, "answer_to", lambda name, query, answer=answer: answer)
        with pytest.raises(CheckpointError) as caught:
            find_commit(parse_hub_path("hf://google/tiny"))
        assert caught.value.path == "hf://google/tiny"


def test_sizes_that_are_none_are_unknown(commits, monkeypatch):
    sizes = [3, -3, "3", 1 << 63, None, True, 2.0]
    files = [{"rfilename": str(number), "size": size} for number, size in enumerate(sizes)]
    answer = json.dumps({"id": "google/tiny", "sha": SHA, "siblings": files}).encode()
    monkeypatch.setattr(commits, "answer_to", lambda name, query: answer)
    assert list(find_commit(parse_hub_path("hf://google/tiny")).sizes.values()) == [3, *[None] * 6]


def test_the_list_of_files_is_bounded(commits, monkeypatch):
    """However much the hub sends, no more than the limit is kept."""
    files = [{"rfilename": f"file-{number}", "size": 1} for number in range(10_000)]
    answer = json.dumps({"sha": SHA, "siblings": files}).encode()
    monkeypatch.setattr(commits, "answer_to", lambda name, query: answer)
    monkeypatch.setattr(hub_module, "Limits", lambda: ot.Limits(index_bytes=len(answer) - 1))
    with pytest.raises(LimitExceededError, match=r"Limits\.index_bytes") as caught:
        find_commit(parse_hub_path("hf://google/tiny"))
    assert caught.value.path == "hf://google/tiny"
    monkeypatch.setattr(hub_module, "Limits", lambda: ot.Limits(index_bytes=len(answer)))
    assert len(find_commit(parse_hub_path("hf://google/tiny")).sizes) == 10_000


def test_a_hub_that_does_not_answer(commits, monkeypatch):
    monkeypatch.setattr(hub_module, "IO_TIMEOUT_SECS", 0.3)
    commits.fault = lambda request: "stall"
    with pytest.raises(ConnectionError):
        find_commit(parse_hub_path("hf://google/tiny"))
    assert len(commits.log) == 1


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnsupportedCheckpointError, match=r"pip install 'orbax-t5x\[hf\]'"):
        ot.open_checkpoint("hf://google/tiny")
