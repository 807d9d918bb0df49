"""Requests for detection: a URL that names a file is opened with few, and so is found that it is missing."""

import flax.serialization
import numpy as np
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointNotFoundError
from tests.support.bundle_writer import bundle_of
from tests.support.gguf_files import write_gguf
from tests.support.http_store import serving
from tests.support.torch_files import save_torch

MOST_REQUESTS = 4


def write_bundle(path, arrays):
    bundle_of(arrays).write(path.parent, path.stem)


def write_t5x(path, arrays):
    tree = {"version": 3, "optimizer": {"target": arrays, "state": {}}}
    path.write_bytes(flax.serialization.msgpack_serialize(tree))


FILES = {
    "model.index": ("tf_bundle", write_bundle),
    "checkpoint_3": ("t5x", write_t5x),
    "flax_model.msgpack": ("flax_msgpack", lambda path, arrays: path.write_bytes(flax.serialization.to_bytes(arrays))),
    "model.safetensors": ("safetensors", lambda path, arrays: safetensors.numpy.save_file(arrays, path)),
    "weights": ("safetensors", lambda path, arrays: safetensors.numpy.save_file(arrays, path)),
    "pytorch_model.bin": ("torch", save_torch),
    "arrays.npz": ("npz", lambda path, arrays: np.savez(path, **arrays)),
    "model.gguf": ("gguf", write_gguf),
}


@pytest.mark.parametrize("size", [10, 1 << 19])
@pytest.mark.parametrize("name", FILES)
def test_a_file_is_opened_with_few_requests(name, size, tmp_path):
    format, write = FILES[name]
    write(tmp_path / name, {"a": np.arange(size, dtype=np.float32), "b": np.arange(5, dtype=np.float32)})
    with serving(tmp_path) as store, ot.open_checkpoint(f"{store.url}/{name}") as checkpoint:
        assert checkpoint.format == format
        log = [f"{request.method} {request.name} {request.range}" for request in store.log]
        assert len(log) <= MOST_REQUESTS, log


@pytest.mark.parametrize("name", ["model.safetensors", "model.index", "arrays.npz", "pytorch_model.bin", "model.gguf"])
def test_few_requests_find_that_a_file_is_missing(name, tmp_path):
    with serving(tmp_path) as store:
        with pytest.raises(CheckpointNotFoundError, match="no such file"):
            ot.open_checkpoint(f"{store.url}/{name}")
        assert len(store.log) <= 2  # it may be a bundle's prefix


def test_a_page_for_a_directory_is_no_file(tmp_path):
    """Some servers answer so instead of sending to the name with a slash."""
    safetensors.numpy.save_file({"w": np.arange(3)}, tmp_path / "model.safetensors")
    with serving() as store:
        store.files = {
            "run": b"<!doctype html><a href=model.safetensors>model.safetensors</a>",
            "run/model.safetensors": (tmp_path / "model.safetensors").read_bytes(),
        }
        with ot.open_checkpoint(f"{store.url}/run") as checkpoint:
            assert (checkpoint.format, [*checkpoint.leaves]) == ("safetensors", ["w"])
