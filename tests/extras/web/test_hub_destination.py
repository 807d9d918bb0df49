"""Conversions to `hf://`, on a stand-in of the hub."""

import os

import numpy as np
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.cli.main import main
from orbax_t5x.errors import CheckpointIOError, CheckpointNotFoundError, UnsupportedCheckpointError
from orbax_t5x.operations.convert import safetensors_layout
from orbax_t5x.operations.convert.work_directory import WorkDirectory
from tests.support.bundle_writer import bundle_of
from tests.support.hub_server import WritableHub

# The hub's package sends files by an argument of its HTTP client that will go.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")]

ARRAYS = {f"leaf_{index}": np.full((16, 8), index, np.float32) for index in range(4)}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    from huggingface_hub import constants

    server = WritableHub()
    server.files = {"README.md": b"mine", "pytorch_model.bin": b"old"}
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    (tmp_path / "staging").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "staging"))
    yield server
    assert not os.listdir(tmp_path / "staging")
    server.close()


@pytest.fixture
def source(tmp_path):
    (tmp_path / "source").mkdir()
    return bundle_of(ARRAYS).write(tmp_path / "source")


def assert_holds(path, arrays):
    found = ot.restore(path, None)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


def test_one_commit_adds_the_files_and_leaves_all_others(hub, source, tmp_path):
    (tmp_path / "model").mkdir()
    for name in ("config.json", "spiece.model"):
        (tmp_path / "model" / name).write_text('{"model_type": "t5"}')
    command = ["convert", str(source), "hf://google/tiny", "--no-translate", "--format", "safetensors"]
    command += ["--from", str(tmp_path / "model")]
    assert main(command) == 0
    names = {"model.safetensors", "config.json", "spiece.model"}
    assert hub.commits == [("Add a model as safetensors files", names, set())]
    assert hub.files.keys() == {"README.md", "pytorch_model.bin"} | names and hub.files["README.md"] == b"mine"
    assert safetensors.numpy.load(hub.files["model.safetensors"]).keys() == ARRAYS.keys()
    assert_holds("hf://google/tiny", ARRAYS)
    assert main(command) == 1, "it exists"
    assert len(hub.commits) == 1


def test_old_files_are_replaced_by_the_same_commit(hub, source, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(safetensors_layout, "MAX_FILE_BYTES", 1000)
        ot.convert(source, "hf://google/tiny@main/small", format="safetensors")
    old = {name for name in hub.files if name.startswith("small/")}
    assert len(old) > 2
    hub.files["small/tokenizer.json"] = b"{}"
    with pytest.raises(CheckpointIOError, match="exists already"):
        ot.convert(source, "hf://google/tiny/small", format="safetensors")
    renamed = ot.transforms.Rename([("leaf_(.*)", r"part_\1")])
    ot.convert(source, "hf://google/tiny/small", renamed, format="safetensors", overwrite=True)
    assert hub.commits[1:] == [("Add small/safetensors files", {"small/model.safetensors"}, old)]
    assert {name for name in hub.files if name.startswith("small/")} == {
        "small/tokenizer.json",
        "small/model.safetensors",
    }
    assert_holds("hf://google/tiny/small", {name.replace("leaf", "part"): array for name, array in ARRAYS.items()})


def test_a_commit_of_somebody_else_meanwhile_is_an_error_and_calling_again_commits(hub, source, monkeypatch):
    committed = hub.add
    monkeypatch.setattr(hub, "add", lambda lines: committed([{**lines[0], "value": {"parentCommit": "0" * 40}}]))
    with pytest.raises(CheckpointIOError, match="the hub failed"):
        ot.convert(source, "hf://google/tiny", format="safetensors")
    assert not hub.commits
    monkeypatch.setattr(hub, "add", committed)
    ot.convert(source, "hf://google/tiny", format="safetensors")
    assert len(hub.commits) == 1
    assert_holds("hf://google/tiny", ARRAYS)


def test_a_kill_leaves_the_hub_as_it_was(hub, source, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(lines):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(WorkDirectory, "__exit__", lambda work, *exception: work._lock.close())
        patch.setattr("orbax_t5x.extras.web.hub_destination.commit_files", lambda *arguments: killed(arguments))
        with pytest.raises(Killed):
            ot.convert(source, "hf://google/tiny", format="safetensors")
    assert hub.files.keys() == {"README.md", "pytorch_model.bin"}
    ot.convert(source, "hf://google/tiny", format="safetensors")
    assert_holds("hf://google/tiny", ARRAYS)


def test_files_that_the_hub_leaves_out_are_an_error(hub, source):
    hub.ignored = {"model.safetensors"}
    with pytest.raises(CheckpointIOError, match=r"did not take 'model\.safetensors'; is there a \.gitignore"):
        ot.convert(source, "hf://google/tiny", format="safetensors")
    hub.ignored = set()
    ot.convert(source, "hf://google/tiny", format="safetensors")


def test_what_cannot_be_written_is_refused_first(hub, source):
    with pytest.raises(UnsupportedCheckpointError, match="format='orbax' is not written"):
        ot.convert(source, "hf://google/tiny")
    for path in ("hf://google/none", "hf://google/tiny@none"):
        with pytest.raises(CheckpointNotFoundError, match="not on the hub"):
            ot.convert(source, path, format="safetensors")
    assert not hub.commits
