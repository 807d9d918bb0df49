"""Arrays of an Orbax item: chunks and metadata that are damaged, replaced or claim too much."""

import json
import os
import shutil

import cramjam
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LimitExceededError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)
from tests.support.orbax_items import FLAT, outcome, right_or

pytestmark = pytest.mark.usefixtures("quiet_logs")


@pytest.mark.parametrize("kind", ["fifo", "link out"])
def test_a_chunk_in_a_directory_of_its_own(item, tmp_path, kind):
    """A zarr v2 array may keep its chunks in directories, where TensorStore would follow a link and wait on a FIFO."""
    path = item(ocdbt=False)
    metadata = json.loads((path / "a" / ".zarray").read_text())
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(256)) * 128)
    (path / "a" / ".zarray").write_text(json.dumps(metadata | {"compressor": None, "dimension_separator": "/"}))
    (path / "a" / "0.0").unlink()
    (path / "a" / "0").mkdir()
    if kind == "fifo":
        os.mkfifo(path / "a" / "0" / "0")
    else:
        (path / "a" / "0" / "0").symlink_to(secret)
    expected = CorruptCheckpointError if kind == "fifo" else UnsafeCheckpointError
    with ot.open_checkpoint(path) as checkpoint:
        with pytest.raises(expected) as caught:
            checkpoint.leaves["a"].get()
        assert caught.value.leaf == "a" and str(caught.value.path).startswith(str(path / "a"))
        np.testing.assert_array_equal(checkpoint.leaves["b/c"].get(), FLAT["b/c"])
    with pytest.raises(CheckpointError):
        ot.restore(path, None)


@pytest.mark.parametrize("kind", ["fifo", "link out"])
def test_a_chunk_replaced_after_opening(item, tmp_path, kind):
    """The same, put there between opening and reading."""
    path = item(ocdbt=False, zarr3=True)
    chunk = path / "a" / "c" / "0" / "0"
    with ot.open_checkpoint(path) as checkpoint:
        shutil.move(chunk, tmp_path / "chunk")
        if kind == "fifo":
            os.mkfifo(chunk)
        else:
            chunk.symlink_to(tmp_path / "chunk")
        with pytest.raises(CorruptCheckpointError if kind == "fifo" else UnsafeCheckpointError):
            checkpoint.leaves["a"].get()


ZARRAY = {
    "chunks": [64, 64],
    "compressor": None,
    "dimension_separator": ".",
    "dtype": "<f8",
    "fill_value": None,
    "filters": None,
    "order": "C",
    "shape": [64, 64],
    "zarr_format": 2,
}


@pytest.mark.parametrize(
    "change",
    [
        {"chunks": [0, 64]},
        {"chunks": [-1, 64]},
        {"chunks": [64]},
        {"shape": [-64, 64]},
        {"shape": [1 << 63, 64]},
        {"shape": [2.5, 64]},
        {"shape": [1] * 33, "chunks": [1] * 33},
        {"dtype": "|O"},
        {"dtype": "<U4"},
        {"dtype": "pickle"},
        {"dtype": [["x", "<f4"], ["y", "<f4"]]},
        {"filters": [{"id": "pickle"}]},
        {"compressor": {"id": "lzma"}},
        {"compressor": {"id": "blosc", "clevel": 100}},
        {"dimension_separator": "x"},
        {"order": "Q"},
        {"zarr_format": 3},
        {"zarr_format": None},
        "{",
        "[]",
        "[" * 100_000,
    ],
)
def test_hostile_array_metadata(item, change):
    path = item(ocdbt=False)
    (path / "a" / ".zarray").write_text(change if isinstance(change, str) else json.dumps(ZARRAY | change))
    wrong = right_or((CorruptCheckpointError, UnsupportedCheckpointError, LimitExceededError), outcome(path))
    assert wrong == {"a"}


def test_a_huge_claim_opens_and_is_not_allocated(item):
    path = item(ocdbt=False)
    shape = [1 << 20, 1 << 20]
    (path / "a" / ".zarray").write_text(json.dumps(ZARRAY | {"shape": shape, "chunks": shape}))
    with ot.open_checkpoint(path) as checkpoint:
        assert checkpoint.leaves["a"].shape == tuple(shape)
        with pytest.raises(LimitExceededError, match="a chunk of shape") as caught:
            checkpoint.leaves["a"][:1, :1].get()
        assert caught.value.leaf == "a"
        np.testing.assert_array_equal(checkpoint.leaves["b/c"].get(), FLAT["b/c"])


@pytest.mark.parametrize("compressor", [None, "gzip", "zstd"])
@pytest.mark.parametrize("size", [0, 1, 32767, 32769, 128 << 20])
def test_chunks_of_another_size(item, compressor, size):
    path = item(ocdbt=False)
    codec = compressor and {"id": compressor, "level": 1}
    (path / "a" / ".zarray").write_text(json.dumps(ZARRAY | {"compressor": codec}))
    if compressor is None:
        with open(path / "a" / "0.0", "wb") as file:
            file.truncate(size)
    else:
        packed = getattr(cramjam, compressor).compress(bytes(size), level=1)
        (path / "a" / "0.0").write_bytes(bytes(packed))
    assert right_or((CorruptCheckpointError,), outcome(path)) == {"a"}


@pytest.mark.parametrize("kind", ["fifo", "directory", "link out", "dangling", "circle", "device"])
@pytest.mark.parametrize("victim", ["a/.zarray", "a/0.0", "a/zarr.json", "a/c/0/0", "a", "manifest.ocdbt", "_METADATA"])
def test_what_is_no_plain_file(item, tmp_path, kind, victim):
    zarr3 = victim in ("a/zarr.json", "a/c/0/0")
    path = item(ocdbt=victim == "manifest.ocdbt", zarr3=zarr3)
    place = path / victim
    outside = tmp_path / "outside"
    shutil.move(place, outside)
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    else:
        place.symlink_to(
            {"link out": outside, "dangling": "nowhere", "circle": place.name, "device": "/dev/zero"}[kind]
        )
    result = outcome(path)
    wrong = right_or((UnsafeCheckpointError, CorruptCheckpointError, CheckpointNotFoundError), result)
    if victim in ("_METADATA", "manifest.ocdbt"):
        assert wrong == {None}
    else:
        assert wrong == {"a"}, "the other leaves can be read"
    if kind == "link out":
        assert isinstance(result[wrong.pop()], UnsafeCheckpointError)


def test_links_inside_are_followed(item):
    path = item(ocdbt=False)
    shutil.move(path / "a", path / "elsewhere")
    (path / "a").symlink_to("elsewhere")
    shutil.move(path / "b.c" / "0.0", path / "chunk")
    (path / "b.c" / "0.0").symlink_to(path / "chunk")
    assert not right_or((), outcome(path))


def test_a_data_file_linked_from_outside(item, tmp_path):
    path = item()
    (node,) = os.listdir(path / "d")
    shutil.move(path / "d" / node, tmp_path / "outside")
    (path / "d" / node).symlink_to(tmp_path / "outside")
    with pytest.raises(UnsafeCheckpointError, match="leads out"):
        ot.open_checkpoint(path)
