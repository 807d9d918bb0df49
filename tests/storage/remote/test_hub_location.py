"""Where a path on the hub is read: by range, or whole with a word, or from the cache."""

import logging
import shutil

import huggingface_hub
import numpy as np
import orbax.checkpoint as ocp
import pytest
from huggingface_hub import constants

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointNotFoundError
from tests.support.hub_server import B, W, model

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


def test_what_is_in_the_cache_is_read_there(hub, caplog):
    caplog.set_level(logging.INFO)
    huggingface_hub.snapshot_download("google/tiny", endpoint=hub.url)
    hub.storage.forget()
    for fault in (None, "500"):
        hub.fault = lambda request, fault=fault: fault
        with ot.open_checkpoint("hf://google/tiny") as checkpoint:
            np.testing.assert_array_equal(checkpoint.leaves["w"].get(), W)
    assert not hub.storage.log
    assert "does not list its files" in caplog.text


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
