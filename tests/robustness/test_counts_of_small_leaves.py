"""Reading many small leaves costs by the bytes, not by the leaf, from a disk, a web server and a bucket.

Counted are requests, reads of files, proofs that they are unchanged, arrays that TensorStore opens, and tasks and
wake-ups of event loops. A leaf of some formats is a file of its own: there the count is one file's, for each.
"""

import asyncio
import collections
import os

import flax.serialization
import jax
import numpy as np
import pytest
import safetensors.numpy
import tensorstore

import orbax_t5x as ot
from tests.support.bundle_writer import bundle_of
from tests.support.checkpoint_writers import orbax_writer
from tests.support.format_suites import write_t5x
from tests.support.gguf_files import write_gguf
from tests.support.google_store import GoogleStore
from tests.support.http_store import serving
from tests.support.torch_files import save_torch

COUNT = 1500
MIB = 1 << 20
RANDOM = np.random.default_rng(0)
# Not one after the other in their files, whose order is that of names or of the tree.
SMALL = {f"l{number * 37 % COUNT:05}": RANDOM.normal(size=512).astype(np.float32) for number in range(COUNT)}
WINDOWS = -(-sum(value.nbytes for value in SMALL.values()) // MIB)


def write_safetensors(path):
    safetensors.numpy.save_file(SMALL, path / "model.safetensors")
    return path


def write_msgpack(path):
    (path / "checkpoint_1").write_bytes(flax.serialization.msgpack_serialize(SMALL))
    return path / "checkpoint_1"


def write_npz(path):
    np.savez(path / "model.npz", **SMALL)
    return path / "model.npz"


def write_torch(path):
    return save_torch(path / "model.pt", SMALL)


def write_bundle(path):
    return bundle_of(SMALL).write(path)


def write_ocdbt(path):
    return orbax_writer(ocdbt=True, zarr3=False)(path, SMALL)


def write_ocdbt_zarr3(path):
    return orbax_writer(ocdbt=True, zarr3=True)(path, SMALL)


FORMATS = {
    "safetensors": write_safetensors,
    "msgpack": write_msgpack,
    "npz": write_npz,
    "torch": write_torch,
    "gguf": lambda path: write_gguf(path / "model.gguf", SMALL),
    "bundle": write_bundle,
    "ocdbt": write_ocdbt,
    "ocdbt_zarr3": write_ocdbt_zarr3,
}
# Each array is a file of its own.
FILE_EACH = {
    "t5x": lambda path: write_t5x(path / "checkpoint_1", SMALL),
    "zarr": lambda path: orbax_writer(ocdbt=False, zarr3=False)(path, SMALL),
}
TARGET = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in SMALL.items()}


def data_files(path):
    """Counts the data files of a database, each of which is opened and proven; 0 for other formats."""
    return len(list(path.rglob("d/*")))


def require_values(restored):
    for name, value in SMALL.items():
        np.testing.assert_array_equal(restored[name], value)


@pytest.fixture
def calls(monkeypatch):
    """Counts calls that read files or prove them unchanged, arrays that are opened, and what event loops do."""
    counts = collections.Counter()

    def count(owner, name):
        function = getattr(owner, name)

        def call(*args, **options):
            counts[name] += 1
            return function(*args, **options)

        monkeypatch.setattr(owner, name, call)

    for name in ("pread", "preadv", "fstat", "stat", "open"):
        count(os, name)
    count(asyncio.BaseEventLoop, "create_task")
    count(asyncio.SelectorEventLoop, "_write_to_self")
    opened = tensorstore.open

    def open_array(*args, **options):
        counts["arrays"] += 1
        return opened(*args, **options)

    monkeypatch.setattr(tensorstore, "open", open_array)
    return counts


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder and the path of each format, written once."""
    known = {}

    def write(kind):
        if kind not in known:
            folder = tmp_path_factory.mktemp(kind)
            known[kind] = folder, FORMATS[kind](folder).relative_to(folder)
        return known[kind]

    return write


def require_few_steps(calls):
    """Of the event loop, and of TensorStore: by the kinds of arrays and by windows, not by arrays."""
    assert calls["create_task"] <= 4 + WINDOWS
    assert calls["_write_to_self"] <= 8 + 2 * WINDOWS
    # Of alike arrays only one is opened; each thread may find that it was not opened yet.
    assert calls["arrays"] <= 40


@pytest.mark.parametrize("kind", FORMATS)
def test_local_reads_and_proofs_follow_the_bytes(kind, written, calls):
    folder, path = written(kind)
    calls.clear()
    require_values(ot.restore(folder / path, TARGET))
    assert calls["pread"] + calls["preadv"] <= 20 + 10 * WINDOWS
    assert calls["fstat"] + calls["stat"] + calls["open"] <= 40 + 12 * data_files(folder)
    require_few_steps(calls)


@pytest.mark.parametrize("kind", FORMATS)
def test_requests_follow_the_bytes(kind, written, calls):
    folder, path = written(kind)
    with serving(folder) as store:
        calls.clear()
        require_values(ot.restore(f"{store.url}/{path}".rstrip("./"), TARGET))
        assert len(store.log) <= 40 + 4 * WINDOWS + 3 * data_files(folder)
        assert sum(request.method == "HEAD" for request in store.log) <= 35 + data_files(folder)
    require_few_steps(calls)


@pytest.mark.parametrize("kind", FORMATS)
def test_operations_of_a_bucket_follow_the_bytes(kind, written, calls, monkeypatch):
    folder, path = written(kind)
    google = GoogleStore()
    google.files = {f"run/{one.relative_to(folder)}": one.read_bytes() for one in folder.rglob("*") if one.is_file()}
    for name, value in google.environment.items():
        monkeypatch.setenv(name, value)
    try:
        calls.clear()
        require_values(ot.restore(f"gs://bucket/run/{path}".rstrip("./"), TARGET))
    finally:
        google.close()
    # Small headers of a file are read one behind the other, by windows that grow.
    assert len(google.operations) <= 60 + 8 * WINDOWS + 3 * data_files(folder)
    require_few_steps(calls)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_small_file_in_memory_is_proven_once(kind, tmp_path, monkeypatch):
    """A server's file of less than 1 MiB is fetched whole: what is left is one proof, however many its leaves are."""
    few = {name: SMALL[name] for name in list(SMALL)[:200]}
    monkeypatch.setattr(f"{__name__}.SMALL", few)
    path = FORMATS[kind](tmp_path)
    with serving(tmp_path) as store:
        with ot.open_checkpoint(f"{store.url}/{path.relative_to(tmp_path)}".rstrip("./")) as checkpoint:
            store.forget()
            ot.restore(checkpoint, {name: TARGET[name] for name in few})
        assert len(store.log) <= 2 + 2 * data_files(tmp_path)


@pytest.mark.parametrize("kind", FILE_EACH)
def test_an_array_that_is_a_file_costs_a_few_requests(kind, tmp_path, monkeypatch):
    """Its metadata, its one chunk, a stat of each, and a proof that it is unchanged."""
    few = {name: SMALL[name] for name in list(SMALL)[:100]}
    monkeypatch.setattr(f"{__name__}.SMALL", few)
    path = FILE_EACH[kind](tmp_path)
    path = tmp_path / "checkpoint_1" if path is None else path
    with serving(tmp_path) as store:
        restored = ot.restore(f"{store.url}/{path.relative_to(tmp_path)}", None)
        assert len(jax.tree.leaves(restored)) == len(few)
        assert len(store.log) <= 60 + 5 * len(few)


@pytest.mark.parametrize("kind", FILE_EACH)
def test_an_array_that_is_a_file_costs_a_few_calls(kind, tmp_path, monkeypatch, calls):
    """Metadata and chunk are opened and read once each; TensorStore and event loops have no part for each array."""
    few = {name: SMALL[name] for name in list(SMALL)[:100]}
    monkeypatch.setattr(f"{__name__}.SMALL", few)
    path = FILE_EACH[kind](tmp_path)
    calls.clear()
    restored = ot.restore(tmp_path / "checkpoint_1" if path is None else path, None)
    assert len(jax.tree.leaves(restored)) == len(few)
    assert calls["arrays"] <= 2 and calls["create_task"] <= 4 and calls["_write_to_self"] <= 8
    assert calls["pread"] + calls["preadv"] <= 20 + 2 * len(few)
    # Of the directory as of the files in it: opened, and compared when it was opened. TensorStore opens none unseen.
    assert calls["open"] <= 40 + 4 * len(few) and calls["stat"] + calls["fstat"] <= 40 + 4 * len(few)
