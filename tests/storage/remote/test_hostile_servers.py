"""Servers that want to do harm: a typed error or the right values, in bounded memory, and nothing goes on afterwards.

Each kind of answer is given at each place of each format. Answers without end are sent until the client closes the
connection, which the server sees.
"""

import itertools

import flax.serialization
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
import tensorstore as ts

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, CheckpointIOError
from tests.support.bundle_writer import bundle_of
from tests.support.hostile_answers import KINDS
from tests.support.http_store import serving
from tests.support.t5x_steps import GOOD, array, save
from tests.support.traced_memory import peak_of

W = np.random.default_rng(0).random((640, 512), np.float32)
LIMITS = ot.Limits(io_timeout_secs=0.5)
# What any of these answers may take: far below what a server sends in the time that it has.
MOST_BYTES = 24 << 20


def _orbax(ocdbt):
    def write(directory):
        with ocp.PyTreeCheckpointer(use_ocdbt=ocdbt) as checkpointer:
            checkpointer.save(directory / "model", {"good": W})

    return write


def _sharded(directory):
    with ocp.PyTreeCheckpointer(use_ocdbt=False, use_zarr3=True) as checkpointer:
        checkpointer.save(directory / "model", {"good": W})
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{directory}/model/good/"}}
    inner = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "gzip"}]
    sharding = {"name": "sharding_indexed", "configuration": {"chunk_shape": [64, 256], "codecs": inner}}
    grid = {"name": "regular", "configuration": {"chunk_shape": [128, 512]}}
    metadata = {"shape": [640, 512], "data_type": "float32", "codecs": [sharding], "chunk_grid": grid}
    ts.open({**spec, "metadata": metadata}, create=True, delete_existing=True).result().write(W).result()


def _t5x(directory):
    (directory / "model").mkdir()
    array(directory / "model" / "good")
    save(directory / "model", 7)


def _bundle(directory):
    (directory / "model").mkdir()
    bundle_of({"good": W}).write(directory / "model", "model.ckpt-3")
    (directory / "model" / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-3"\n')


def _safetensors(directory):
    (directory / "model").mkdir()
    safetensors.numpy.save_file({"good": W}, directory / "model" / "model.safetensors")


def _msgpack(directory):
    (directory / "model").mkdir()
    data = flax.serialization.msgpack_serialize({"good": W})
    (directory / "model" / "flax_model.msgpack").write_bytes(data)


FORMATS = {
    "Orbax": _orbax(False),
    "OCDBT": _orbax(True),
    "sharded zarr3": _sharded,
    "T5X": _t5x,
    "TensorFlow": _bundle,
    "safetensors": _safetensors,
    "msgpack": _msgpack,
}
# The requests that are answered so, before the checkpoint is open and after.
PLACES = {
    "stats": (lambda request: request.method == "HEAD", None),
    "bodies": (lambda request: request.method == "GET", None),
    "everything": (lambda request: True, None),
    "data": (None, lambda request: request.method == "GET"),
    "everything, once it is open": (None, lambda request: True),
}
CASES = list(itertools.product(KINDS, FORMATS, PLACES))
# Of what runs each time: 1 runs all 1,015. No number of formats or places divides it.
_STRIDE = 29


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint of each format."""
    directories = {}
    for format, write in FORMATS.items():
        directories[format] = tmp_path_factory.mktemp("written")
        write(directories[format])
    return directories


def outcome(store, kind, place):
    """The value that is read from a server, or the typed error."""

    def answering(picked):
        return lambda request: kind if picked is not None and picked(request) else None

    before, later = PLACES[place]
    store.fault = answering(before)
    try:
        with ot.open_checkpoint(f"{store.url}/model", limits=LIMITS) as checkpoint:
            store.fault = answering(later or before)
            return checkpoint.leaves["good"].get()
    except CheckpointError as error:
        return error


def check(directory, kind, format, place):
    with serving(directory) as store:
        found = []
        peak = peak_of(lambda: found.append(outcome(store, kind, place)))
        assert peak < MOST_BYTES, peak
        assert store.wait_until_closed(30), "the answer goes on after the error"
        if isinstance(found[0], CheckpointError):
            assert found[0].path is not None and found[0].path.startswith(store.url)
        else:
            np.testing.assert_array_equal(found[0], GOOD if format == "T5X" else W)


@pytest.mark.parametrize(("kind", "format", "place"), CASES[::_STRIDE])
def test_hostile_answers(written, kind, format, place):
    check(written[format], kind, format, place)


# What the bytes of an array are answered with, and how the error says it.
TEXTS = {
    "chunks without end": "more bytes",
    "a length of a terabyte": "more bytes",
    "a body longer than its range": "more bytes",
    "a gzip bomb": "compresses its answer",
    "several parts": "in several parts",
    "a range of another place": "Content-Range",
    "an empty body": "fewer bytes",
}


@pytest.mark.parametrize("format", ["safetensors", "Orbax", "OCDBT"])
@pytest.mark.parametrize("kind", TEXTS)
def test_errors_say_what_the_server_did(written, format, kind):
    with serving(written[format]) as store:
        found = outcome(store, kind, "data")
        assert type(found) is CheckpointIOError
        assert TEXTS[kind] in found.message and found.leaf == "good"
