"""A model's configuration, files that Git LFS has not fetched, and the index of a model in several files."""

import json

import flax.serialization
import numpy as np
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.errors import CorruptCheckpointError, UnsafeCheckpointError, UnsupportedCheckpointError
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.local import LocalFiles
from orbax_t5x.readers.hub_files import LFS_POINTER, read_config, refuse_lfs_pointer

FORMATS = {
    "model.safetensors.index.json": (".safetensors", safetensors.numpy.save),
    "flax_model.msgpack.index.json": (".msgpack", flax.serialization.msgpack_serialize),
}
INDEXES = {
    "a file that is missing": ({"w1": "c"}, CorruptCheckpointError, "'c.* is missing"),
    "a leaf of a later file": ({"w1": "b", "w2": "a"}, CorruptCheckpointError, "it is in 'a"),
    "a URL": ({"w1": "http://there/a"}, UnsafeCheckpointError, "URL"),
    "a file outside": ({"w1": "../a"}, UnsafeCheckpointError, "a"),
    "an absolute path": ({"w1": "/a"}, UnsafeCheckpointError, "a"),
}


@pytest.fixture(params=FORMATS.items(), ids=lambda item: item[0])
def written(request, tmp_path):
    index, (suffix, save) = request.param
    directory = tmp_path / "model"
    directory.mkdir()
    for file, leaf in (("a", "w1"), ("b", "w2")):
        (directory / f"{file}{suffix}").write_bytes(save({leaf: np.ones(3, np.float32)}))
    (tmp_path / f"a{suffix}").write_bytes(save({"w1": np.zeros(3, np.float32)}))
    return directory, index, suffix


@pytest.mark.parametrize(("file_of", "kind", "said"), INDEXES.values(), ids=INDEXES)
def test_an_index_that_is_wrong(written, file_of, kind, said):
    directory, index, suffix = written
    text = json.dumps({"weight_map": {leaf: f"{file}{suffix}" for leaf, file in file_of.items()}})
    (directory / index).write_text(text)
    for path in (directory, directory / index):
        with pytest.raises(kind, match=said) as caught:
            ot.open_checkpoint(path)
        assert caught.value.path == str(directory / index)


def test_names_that_no_file_has_are_noted(written):
    """As in the indexes of the hub's converter, which drops tied tensors and copies the index."""
    directory, index, suffix = written
    file_of = {"w1": f"a{suffix}", "tied/w1": f"a{suffix}", "w2": f"b{suffix}"}
    (directory / index).write_text(json.dumps({"weight_map": file_of}))
    with ot.open_checkpoint(directory) as checkpoint:
        assert sorted(checkpoint.leaves) == ["w1", "w2"]
        assert checkpoint.metadata["index_only"] == ["tied/w1"]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("{}", CorruptCheckpointError),
        ('{"weight_map": []}', CorruptCheckpointError),
        ('{"weight_map": {"w1": 3}}', CorruptCheckpointError),
        ('{"weight_map": {"w1": "a.bin"}}', CorruptCheckpointError),
        ("version https://git-lfs.github.com/spec/v1\n", UnsupportedCheckpointError),
    ],
)
def test_an_index_of_another_form(written, text, kind):
    directory, index, _ = written
    (directory / index).write_text(text)
    with pytest.raises(kind) as caught:
        ot.open_checkpoint(directory)
    assert caught.value.path == str(directory / index)


def test_two_files_with_one_leaf(written):
    directory, index, suffix = written
    (directory / f"b{suffix}").write_bytes((directory / f"a{suffix}").read_bytes())
    (directory / index).write_text(json.dumps({"weight_map": {"w1": f"a{suffix}", "w2": f"b{suffix}"}}))
    with pytest.raises(CorruptCheckpointError, match=r"is in 'a.* and in 'b") as caught:
        ot.open_checkpoint(directory)
    assert caught.value.leaf == "w1"


def test_a_configuration_is_read_and_one_that_cannot_be_is_no_error(tmp_path):
    store = LocalFiles(tmp_path)
    assert read_config(store) == {"config": None}
    (tmp_path / "config.json").write_text('{"d_model": 512, "x": NaN}')
    assert read_config(store)["config"]["d_model"] == 512
    damaged = read_config(LocalFiles(tmp_path, limits=Limits(json_bytes=8)))
    assert damaged["config"] is None and "Limits.json_bytes" in damaged["config_error"]
    (tmp_path / "config.json").write_text("[1]")
    assert "config.json" in read_config(store)["config_error"]


def test_a_pointer_is_refused_with_the_command_that_fetches_the_file():
    refuse_lfs_pointer(b"\x82\xa9optimizer", "/a")
    refuse_lfs_pointer(LFS_POINTER[:10], "/a")
    with pytest.raises(UnsupportedCheckpointError, match="git lfs pull") as caught:
        refuse_lfs_pointer(LFS_POINTER + b".github.com/spec/v1", "/a")
    assert caught.value.path == "/a"
