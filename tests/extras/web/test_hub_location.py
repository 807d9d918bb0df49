"""Where a path on the hub is read: by range, or whole with a word, or from the cache."""

import contextlib
import shutil

import huggingface_hub
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from huggingface_hub import constants

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, CheckpointNotFoundError
from orbax_t5x.extras.web import hub as hub_module
from orbax_t5x.readers.format_table import FORMATS
from tests.support import t5x_steps
from tests.support.bundle_writer import bundle_of
from tests.support.gguf_files import write_gguf
from tests.support.http_store import serving
from tests.support.hub_server import B, W, model
from tests.support.torch_files import save_torch

pytestmark = pytest.mark.slow


@pytest.fixture
def hub(redirecting_hub):
    model(redirecting_hub)
    return redirecting_hub


def test_a_hub_without_ranges_is_read_whole_with_a_word(hub, caplog, tmp_path):
    hub.storage.fault = lambda request: "no ranges"
    with ot.open_checkpoint("hf://google/tiny") as checkpoint:
        np.testing.assert_array_equal(checkpoint.leaves["b"].get(), B)
        assert checkpoint.path.startswith(str(tmp_path / "cache"))
    assert "answers no byte ranges; the files are downloaded whole" in caplog.text


def test_arrays_in_chunks_are_read_whole_with_a_word(hub, caplog, tmp_path):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "item", {"w": B})
    for file in (tmp_path / "item").rglob("*"):
        if file.is_file():
            hub.files[f"step/{file.relative_to(tmp_path / 'item')}"] = file.read_bytes()
    with ot.open_checkpoint("hf://google/tiny/step") as checkpoint:
        assert checkpoint.format == "orbax"
        np.testing.assert_array_equal(checkpoint.leaves["w"].get(), B)
    assert "arrays in chunks" in caplog.text


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("orbax_t5x")]


def test_what_is_in_the_cache_is_read_there(hub, caplog):
    huggingface_hub.snapshot_download("google/tiny", endpoint=hub.url)
    hub.storage.forget()
    with ot.open_checkpoint("hf://google/tiny") as checkpoint:
        np.testing.assert_array_equal(checkpoint.leaves["w"].get(), W)
    assert not hub.storage.log and not warnings_of(caplog)


def _files_of(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def _adapter(directory):
    safetensors.numpy.save_file({"w": B}, directory / "adapter_model.safetensors")
    (directory / "README.md").write_text("an adapter")
    (directory / ".gitattributes").touch()


def _bundle(directory):
    bundle_of({"w": B}).write(directory, "model.ckpt-3")


def _parts(directory):
    for number, name in enumerate("ab", 1):
        write_gguf(directory / f"big-0000{number}-of-00002.gguf", {name: B})


def _item(directory):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(directory, {"w": B}, force=True)
    (directory / "flax_model.msgpack").write_bytes(b"\x81\xa1w\x07")


def _step(directory):
    t5x_steps.array(directory / "bad")
    t5x_steps.array(directory / "good")
    t5x_steps.save(directory, t5x_steps.spec())


def _encodings(directory):
    (directory / "flax_model.msgpack").write_bytes(b"\x81\xa1w\x07")
    save_torch(directory / "pytorch_model.bin", {"w": B})


def _strangers(directory):
    safetensors.numpy.save_file({"w": B}, directory / "weights.safetensors")
    save_torch(directory / "pytorch_model.bin", {"w": B})


def _found(path):
    try:
        with ot.open_checkpoint(path) as checkpoint:
            return checkpoint.format, {name: view.get().tolist() for name, view in checkpoint.leaves.items()}
    except CheckpointError as error:
        return type(error), [format for format in FORMATS.names() if f"format={format!r}" in str(error)]


@pytest.mark.parametrize("cached", [0, 1, 99])
@pytest.mark.parametrize(
    ("write", "path"),
    [
        (_adapter, ""),
        (_bundle, "/model.ckpt-3"),
        (_bundle, "/model.ckpt-3.index"),
        (_parts, "/big-00001-of-00002.gguf"),
        (_item, ""),
        (_step, ""),
        (_step, "/checkpoint"),
        (_encodings, ""),
        (_strangers, ""),
    ],
)
def test_a_path_on_the_hub_is_what_it_is_on_a_disk_whatever_is_cached(hub, write, path, cached, tmp_path):
    (tmp_path / "here").mkdir()
    write(tmp_path / "here")
    hub.files.clear()
    hub.files |= _files_of(tmp_path / "here")
    if names := sorted(hub.files)[:cached]:
        huggingface_hub.snapshot_download("google/tiny", endpoint=hub.url, allow_patterns=names)
    assert _found(f"hf://google/tiny{path}") == _found(f"{tmp_path / 'here'}{path}")


def reset_sessions():
    """Versions of the package before 1.0 ask for the setting when they make a session."""
    getattr(huggingface_hub.utils, "reset_sessions", lambda: None)()


@contextlib.contextmanager
def offline(hub):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        reset_sessions()
        yield
    reset_sessions()


@contextlib.contextmanager
def unreachable(hub):
    with pytest.MonkeyPatch.context() as patch:
        with serving() as gone:
            patch.setenv("HF_ENDPOINT", gone.url)
        yield


@contextlib.contextmanager
def silent(hub):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub_module, "IO_TIMEOUT_SECS", 0.3)
        hub.fault = lambda request: "stall"
        yield
    hub.fault = lambda request: None


@pytest.mark.parametrize("kind", [offline, unreachable, silent])
def test_without_a_network_the_cached_commit_is_read_with_one_warning(hub, caplog, kind):
    """A commit itself needs no warning, and without a cache there is nothing to read."""
    with kind(hub), pytest.raises(CheckpointError, match="does not answer"):
        ot.open_checkpoint("hf://google/tiny")
    huggingface_hub.snapshot_download("google/tiny", endpoint=hub.url)
    huggingface_hub.snapshot_download("google/tiny", revision=hub.commit, endpoint=hub.url)
    for revision, count in {"": 1, f"@{hub.commit}": 0}.items():
        caplog.clear()
        hub.forget()
        with kind(hub), ot.open_checkpoint(f"hf://google/tiny{revision}") as checkpoint:
            np.testing.assert_array_equal(checkpoint.leaves["w"].get(), W)
            assert hub.commit in checkpoint.path
        assert len(warnings_of(caplog)) == count and all(hub.commit in text for text in warnings_of(caplog))
        assert len(hub.log) == (kind is silent)


ANSWERS = {
    "401": (401, b"{}", {"X-Error-Code": "RepoNotFound"}),
    "403": (403, b"{}", {}),
    "gated": (403, b"{}", {"X-Error-Code": "GatedRepo"}),
    "404": (404, b"{}", {"X-Error-Code": "RepoNotFound"}),
    "429": (429, b"{}", {}),
    "500": (500, b"{}", {}),
    "503": (503, b"{}", {}),
    "a login page": (200, b"<html>please log in</html>", {"Content-Type": "text/html"}),
    "no commit": (200, b"{}", {}),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_an_answer_of_the_hub_is_never_replaced_by_the_cache(hub, monkeypatch, kind):
    """Unless a commit was asked for, which never changes."""
    huggingface_hub.snapshot_download("google/tiny", endpoint=hub.url)
    huggingface_hub.snapshot_download("google/tiny", revision=hub.commit, endpoint=hub.url)
    monkeypatch.setattr(hub, "answer_to", lambda name, query: ANSWERS[kind])
    for path in ("hf://google/tiny", "hf://google/tiny@main", "hf://google/tiny/model.safetensors"):
        with pytest.raises(CheckpointError):
            ot.open_checkpoint(path)
    with ot.open_checkpoint(f"hf://google/tiny@{hub.commit}") as checkpoint:
        np.testing.assert_array_equal(checkpoint.leaves["w"].get(), W)


def test_hosts_with_and_without_a_cache_have_one_name_for_it(hub):
    """Processes compare what they are about to restore; one of them may have the files in its cache."""
    for path in ("hf://google/tiny", "hf://google/tiny/model.safetensors"):
        with ot.open_checkpoint(path) as without:
            assert without.shared_path == without.path
        huggingface_hub.snapshot_download("google/tiny", endpoint=hub.url)
        with ot.open_checkpoint(path) as cached:
            assert cached.path != without.path
            assert cached.shared_path == without.shared_path
        shutil.rmtree(constants.HF_HUB_CACHE)


def test_what_is_not_there(hub):
    for path in ("google/other", "google/tiny@v9", "google/tiny/other.safetensors"):
        with pytest.raises(CheckpointNotFoundError):
            ot.open_checkpoint(f"hf://{path}")
