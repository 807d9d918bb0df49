"""Servers that want to do harm: a typed error or the right values, in bounded memory, and nothing goes on afterwards.

Each kind of answer is given at each place of each format. Answers without end are sent until the client closes the
connection, which the server sees.
"""

import itertools

import flax.serialization
import hypothesis
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
import tensorstore as ts
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, CheckpointIOError
from orbax_t5x.extras.web import hub as hub_module
from orbax_t5x.extras.web import hub_ranges
from tests.support.bundle_writer import bundle_of
from tests.support.hostile_answers import KINDS
from tests.support.http_store import serving
from tests.support.t5x_steps import GOOD, array, save
from tests.support.traced_memory import peak_of

W = np.random.default_rng(0).random((640, 512), np.float32)
# An answer that never ends is given up soon, whether it is right or not.
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
# On the hub, whose list of files its own package reads: which of its two servers answers so, and to what.
HUB_PLACES = {
    "redirects": ("hub", lambda request: "/resolve/" in request.name),
    "stored bytes": ("storage", lambda request: True),
}
CASES = list(itertools.product(KINDS, FORMATS, PLACES))
# Of what runs each time: 1 runs all 1,015. No number of formats or places divides it. `test_any_hostile_answer` draws
# from all of them, and more.
_STRIDE = 29


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint of each format."""
    directories = {}
    for format, write in FORMATS.items():
        directories[format] = tmp_path_factory.mktemp("written")
        write(directories[format])
    return directories


def fault_of(kind, is_picked, right=0):
    """A fault that answers so what is picked, but for the first `right` of it."""
    numbers = itertools.count()
    return lambda request: kind if is_picked is not None and is_picked(request) and next(numbers) >= right else None


def value_or_error(path, when_open=lambda: None, limits=LIMITS):
    """The value that is read from a path, or the typed error."""
    try:
        with ot.open_checkpoint(path, limits=limits) as checkpoint:
            when_open()
            return checkpoint.leaves["good"].get()
    except CheckpointError as error:
        return error


def outcome(store, kind, place, right=0, limits=LIMITS):
    """The value that is read from a server that answers so, or the typed error."""
    before, later = PLACES[place]

    def change():
        store.fault = fault_of(kind, later or before, right)

    store.fault = fault_of(kind, before, right)
    return value_or_error(f"{store.url}/model", change, limits)


def check(servers, path, expected, find):
    """Checks that what is found is right or a typed error, in bounded memory, and that nothing goes on afterwards."""
    found = []
    peak = peak_of(lambda: found.append(find()))
    assert peak < MOST_BYTES, peak
    assert all(server.wait_until_closed(30) for server in servers), "the answer goes on after the error"
    if isinstance(found[0], CheckpointError):
        assert found[0].path is not None and found[0].path.startswith(path)
        assert "odd-t0ken" not in str(found[0])
    else:
        np.testing.assert_array_equal(found[0], expected)


def check_web(directory, kind, format, place, right=0):
    with serving(directory) as store:
        expected = GOOD if format == "T5X" else W
        check([store], store.url, expected, lambda: outcome(store, kind, place, right))


def check_hub(hub, kind, place, is_open, right=0):
    hub.fault = hub.storage.fault = lambda request: None
    server, is_picked = HUB_PLACES[place]
    hostile = hub if server == "hub" else hub.storage

    def change():
        hub.storage.signature += "x"  # so that the hub is asked again for where the bytes are
        hostile.fault = fault_of(kind, is_picked, right)

    if not is_open:
        hostile.fault = fault_of(kind, is_picked, right)
    path = "hf://google/tiny"
    check([hub, hub.storage], path, W, lambda: value_or_error(path, change if is_open else lambda: None))


@pytest.mark.parametrize(("kind", "format", "place"), CASES[::_STRIDE])
def test_hostile_answers(written, kind, format, place):
    check_web(written[format], kind, format, place)


@pytest.fixture
def hub(redirecting_hub, monkeypatch):
    for module in (hub_module, hub_ranges):
        monkeypatch.setattr(module, "Limits", lambda: LIMITS)
    redirecting_hub.has_sizes = True
    redirecting_hub.files["model.safetensors"] = safetensors.numpy.save({"good": W})
    return redirecting_hub


@pytest.mark.slow
def test_hostile_answers_on_the_hub(hub):
    for number, kind in enumerate(sorted(KINDS)[::3]):
        for place in list(HUB_PLACES)[number % 2 :: 2]:
            check_hub(hub, kind, place, is_open=number % 2 == 0)


@hypothesis.settings(
    max_examples=hypothesis.settings.default.max_examples // 10,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(
    kind=st.sampled_from(sorted(KINDS)),
    place=st.sampled_from(
        [*itertools.product(FORMATS, PLACES), *[("hub", place) for place in HUB_PLACES for _ in range(3)]]
    ),
    right=st.integers(0, 6),
    is_open=st.booleans(),
)
def test_any_hostile_answer(written, hub, kind, place, right, is_open):
    """Any answer at any place, after some that were right."""
    format, place = place
    if format == "hub":
        check_hub(hub, kind, place, is_open, right)
    else:
        check_web(written[format], kind, format, place, right)


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
    """Of answers that come at once, however long a busy machine takes for them."""
    with serving(written[format]) as store:
        found = outcome(store, kind, "data", limits=ot.Limits())
        assert type(found) is CheckpointIOError
        assert TEXTS[kind] in found.message and found.leaf == "good"
