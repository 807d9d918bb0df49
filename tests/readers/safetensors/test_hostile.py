"""Damaged and hostile safetensors files: a typed error that names the file, at once, and never a wrong value."""

import json
import os
import socket

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CorruptCheckpointError, UnsafeCheckpointError, UnsupportedCheckpointError
from tests.support.safetensors_files import container, tensor

# A guard against hangs and bombs, not a claim about speed: machines that run tests are shared.


GOOD = {"a": tensor(0, 8, [2]), "b": tensor(8, 12, [])}
DATA = bytes(range(12))


def test_the_good_one_opens(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(container(GOOD, DATA))
    with ot.open_checkpoint(path) as checkpoint:
        np.testing.assert_array_equal(checkpoint.leaves["a"].get(), np.frombuffer(DATA[:8], np.float32))


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F128", "object", "pickle"])
def test_an_unknown_dtype_is_that_leafs_error(tmp_path, dtype):
    path = tmp_path / "model.safetensors"
    header = {"bad": tensor(0, 3, [6] if dtype == "F4" else [4], dtype), "good": tensor(3, 7, [])}
    path.write_bytes(container(header, bytes(7)))
    with ot.open_checkpoint(path) as checkpoint:
        assert list(checkpoint.leaves) == ["bad", "good"]
        assert checkpoint.leaves["good"].get() == 0
        for _ in range(2):
            with pytest.raises(UnsupportedCheckpointError, match=dtype) as caught:
                checkpoint.leaves["bad"].get()
            assert (caught.value.path, caught.value.leaf) == (str(path), "bad")


def test_a_git_lfs_pointer(tmp_path):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 990\n"
    (tmp_path / "model.safetensors").write_bytes(pointer)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(UnsupportedCheckpointError, match="git lfs pull"):
            ot.open_checkpoint(path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model.safetensors.index.json")
    with pytest.raises(UnsupportedCheckpointError, match="git lfs pull"):
        ot.open_checkpoint(tmp_path)


def write_index(directory, weight_map, **files):
    for name, header in files.items():
        size = max((said["data_offsets"][1] for said in header.values()), default=0)
        (directory / f"{name}.safetensors").write_bytes(container(header, bytes(size)))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("file", "error"),
    [
        ("/etc/passwd", CorruptCheckpointError),
        ("/etc/x.safetensors", UnsafeCheckpointError),
        ("../x.safetensors", UnsafeCheckpointError),
        ("a/../../x.safetensors", UnsafeCheckpointError),
        ("..\\x.safetensors", UnsafeCheckpointError),
        ("http://example.com/x.safetensors", UnsafeCheckpointError),
        ("x.safetensors\0.safetensors", UnsafeCheckpointError),
        ("x.bin", CorruptCheckpointError),
        ("missing.safetensors", CorruptCheckpointError),
        ("x" * 300 + ".safetensors", CorruptCheckpointError),
        (7, CorruptCheckpointError),
        (None, CorruptCheckpointError),
    ],
)
def test_an_index_that_names_something_else(tmp_path, file, error):
    directory = tmp_path / "model"
    directory.mkdir()
    (tmp_path / "x.safetensors").write_bytes(container(GOOD, DATA))
    write_index(directory, {"a": file})
    with pytest.raises(error) as caught:
        ot.open_checkpoint(directory)
    assert str(directory) in str(caught.value)


def test_an_index_that_is_wrong_about_its_tensors(tmp_path):
    one = {"a": tensor(0, 4, [])}
    two = {"b": tensor(0, 4, [])}
    write_index(tmp_path, {"a": "two.safetensors", "b": "one.safetensors"}, one=one, two=two)
    with pytest.raises(CorruptCheckpointError, match="and it is in '"):
        ot.open_checkpoint(tmp_path)
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}, one=one, two=one | {"b": tensor(4, 8, [])})
    with pytest.raises(CorruptCheckpointError, match=r"is in 'one\.safetensors' and in 'two\.safetensors'"):
        ot.open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
        "{" * 200_000,
    ],
)
def test_a_broken_index(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CorruptCheckpointError, match=r"index\.json"):
        ot.open_checkpoint(tmp_path)


def test_several_indexes(tmp_path):
    write_index(tmp_path, {"a": "one.safetensors"}, one={"a": tensor(0, 4, [])})
    text = (tmp_path / "model.safetensors.index.json").read_text()
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "x.safetensors.index.json").write_text(text)
    assert list(ot.open_checkpoint(tmp_path).leaves) == ["a"]
    (tmp_path / "y.safetensors.index.json").write_text(text)
    with pytest.raises(UnsupportedCheckpointError, match="several indexes"):
        ot.open_checkpoint(tmp_path)
    with ot.open_checkpoint(tmp_path / "y.safetensors.index.json") as checkpoint:
        assert list(checkpoint.leaves) == ["a"]


@pytest.mark.parametrize("kind", ["fifo", "directory", "socket", "link out", "dangling", "circle", "device"])
def test_a_shard_that_is_no_file(tmp_path, kind):
    directory = tmp_path / "model"
    directory.mkdir()
    write_index(directory, {"a": "one.safetensors"})
    shard = directory / "one.safetensors"
    expected = CorruptCheckpointError
    if kind == "fifo":
        os.mkfifo(shard)
    elif kind == "directory":
        shard.mkdir()
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(directory)  # the path of a socket has some hundred bytes at most
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind("one.safetensors")
        os.chdir(here)
    elif kind == "dangling":
        shard.symlink_to("nowhere.safetensors")
    elif kind == "circle":
        shard.symlink_to("one.safetensors")
    else:
        outside = "/dev/zero" if kind == "device" else tmp_path / "outside.safetensors"
        if kind == "link out":
            outside.write_bytes(container(GOOD, DATA))
        shard.symlink_to(outside)
        expected = UnsafeCheckpointError
    with pytest.raises(expected) as caught:
        ot.open_checkpoint(directory)
    assert "one.safetensors" in str(caught.value)


def test_a_file_cut_after_it_was_opened(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(container({"a": tensor(0, 1 << 20, [1 << 18])}, bytes(1 << 20)))
    with ot.open_checkpoint(path) as checkpoint:
        os.truncate(path, 1 << 19)
        with pytest.raises(ot.errors.CheckpointGoneError) as caught:
            checkpoint.leaves["a"].get()
        assert (caught.value.path, caught.value.leaf) == (str(path), "a")


def test_a_file_that_is_gone(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(container(GOOD, DATA))
    with ot.open_checkpoint(path) as checkpoint:
        path.unlink()
        try:
            value = checkpoint.leaves["a"].get()
        except ot.errors.CheckpointGoneError as error:
            assert error.leaf == "a"
        else:
            np.testing.assert_array_equal(value, np.frombuffer(DATA[:8], np.float32))
