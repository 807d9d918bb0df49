"""Index of a model in several files, of each format that has one: what it claims is proven."""

import json

import flax.serialization
import numpy as np
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.errors import CorruptCheckpointError, UnsafeCheckpointError, UnsupportedCheckpointError

FORMATS = {
    "model.safetensors.index.json": (".safetensors", safetensors.numpy.save),
    "flax_model.msgpack.index.json": (".msgpack", flax.serialization.msgpack_serialize),
}
INDEXES = {
    "a file that is missing": ({"w1": "c"}, CorruptCheckpointError, "'c.* is missing"),
    "a leaf of another file": ({"w1": "b", "w2": "b"}, CorruptCheckpointError, "it is in no file"),
    "a leaf of a later file": ({"w1": "b", "w2": "a"}, CorruptCheckpointError, "it is in 'a"),
    "a leaf of no file": ({"w1": "a", "x": "a"}, CorruptCheckpointError, "it is in no file"),
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
