"""Conversions to `s3://`, on moto, to `gs://`, on a stand-in, and to the hub, on another."""

import errno
import os

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from huggingface_hub import constants

import orbax_t5x as ot
from orbax_t5x.cli.main import main
from orbax_t5x.errors import CheckpointError, CheckpointIOError, CheckpointNotFoundError, UnsupportedCheckpointError
from orbax_t5x.operations.convert import safetensors_layout
from orbax_t5x.operations.convert.safetensors_layout import plan_files
from tests.support.amazon_store import amazon_store
from tests.support.bundle_writer import bundle_of
from tests.support.google_store import GoogleStore
from tests.support.hub_server import WritableHub

# The hub's package sends files by an argument of its HTTP client that will go.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")]

ARRAYS = {f"leaf_{index}": np.random.default_rng(index).standard_normal((64, 128), np.float32) for index in range(6)}
OTHERS = {"other": np.arange(5, dtype=np.float32)}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return bundle_of(ARRAYS).write(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return bundle_of(OTHERS).write(tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def moto():
    with amazon_store() as store:
        yield store


@pytest.fixture
def bucket(moto, monkeypatch, tmp_path):
    """The bucket, empty, and an empty directory for what is on its way."""
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "staging").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "staging"))
    moto.remove(*moto.names())
    return moto


@pytest.fixture
def google(monkeypatch, tmp_path):
    server = GoogleStore()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "staging").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "staging"))
    yield server
    server.close()


def assert_holds(url, arrays):
    found = ot.restore(url, None)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def replace_all(base, source, other, limits):
    """Each format with some memory limits; small ones make several files."""
    for format in ("orbax", "safetensors"):
        url = f"{base}/{format}"
        for limit in limits:
            ot.convert(other, url, format=format, overwrite=True)
            assert_holds(url, OTHERS)
            report = ot.convert(source, url, format=format, overwrite=True, memory_limit_bytes=limit)
            assert (report.destination, report.leaves) == (url, len(ARRAYS))
            assert_holds(url, ARRAYS)
    assert ot.verify(f"{base}/orbax").status == "ok"


def test_s3(bucket, source, other, tmp_path):
    bucket.write("models/orbax_of_others/kept", b"x")
    bucket.write("models/orbax.old", b"x")
    replace_all("s3://bucket/models", source, other, [None])
    left = [name for name in bucket.names() if not name.startswith(("models/orbax/", "models/safetensors/"))]
    assert left == ["models/orbax.old", "models/orbax_of_others/kept"]
    assert not os.listdir(tmp_path / "staging")
    # Others read what is there.
    item = bucket.download("models/orbax", tmp_path / "item")
    restored = ocp.PyTreeCheckpointer().restore(item)
    np.testing.assert_array_equal(restored["leaf_3"], ARRAYS["leaf_3"])
    assert bucket.names("models/safetensors/") == ["models/safetensors/model.safetensors"]
    np.testing.assert_array_equal(
        safetensors.numpy.load(bucket.read("models/safetensors/model.safetensors"))["leaf_3"], ARRAYS["leaf_3"]
    )


def test_gcs(google, source, other, tmp_path):
    replace_all("gs://bucket/models", source, other, [1 << 16, None])
    assert all(name.startswith(("models/orbax/", "models/safetensors/")) for name in google.files)
    assert not os.listdir(tmp_path / "staging")


def test_only_a_checkpoint_is_replaced_and_only_when_asked(bucket, source, tmp_path):
    ot.convert(source, "s3://bucket/a/c")
    bucket.write("a/file", b"x")
    before = {name: bucket.read(name) for name in bucket.names()}
    for name, keywords, match in (
        ("a/c", {}, "exists already"),
        ("a/c", {"format": "safetensors", "overwrite": True}, "beside safetensors files"),
        ("a", {"overwrite": True}, "is not an Orbax checkpoint"),
        ("a/file", {"overwrite": True}, "is not a directory"),
    ):
        with pytest.raises(CheckpointIOError, match=match) as caught:
            ot.convert(source, f"s3://bucket/{name}", **keywords)
        assert caught.value.errno == errno.EEXIST
    bucket.write("a/c/notes.txt", b"x")
    with pytest.raises(CheckpointIOError, match=r"notes\.txt"):
        ot.convert(source, "s3://bucket/a/c", overwrite=True)
    with pytest.raises(CheckpointIOError, match="is inside the source"):
        ot.convert("s3://bucket/a/c", "s3://bucket/a/c/d/e")
    with pytest.raises(UnsupportedCheckpointError, match="a whole bucket"):
        ot.convert(source, "s3://bucket")
    bucket.remove("a/c/notes.txt")
    assert {name: bucket.read(name) for name in bucket.names()} == before
    assert not os.listdir(tmp_path / "staging")


def test_a_checkpoint_is_converted_in_its_own_place(bucket, source):
    ot.convert(source, "s3://bucket/c")
    renamed = [ot.transforms.Rename([("leaf_(.*)", r"part_\1")])]
    ot.convert("s3://bucket/c", "s3://bucket/c", renamed, overwrite=True)
    assert_holds("s3://bucket/c", {name.replace("leaf", "part"): array for name, array in ARRAYS.items()})


def test_an_error_before_the_upload_leaves_nothing(bucket, source, tmp_path):
    def fail(*progress):
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        ot.convert(source, "s3://bucket/c", progress=fail)
    assert not bucket.names() and not os.listdir(tmp_path / "staging")


@pytest.mark.parametrize("format", ["orbax", "one file", "several files"])
@pytest.mark.parametrize("has_old", [False, True])
def test_an_upload_that_failed_starts_again(google, source, other, tmp_path, format, has_old, monkeypatch):
    """After each number of uploads that a server takes; at every one nothing opens but the old or the new one."""
    url = "gs://bucket/c"
    options = {"overwrite": True, "format": "orbax" if format == "orbax" else "safetensors"}
    if format == "several files":
        target = "orbax_t5x.operations.convert.safetensors_layout.plan_files"
        monkeypatch.setattr(target, lambda tensors, _: plan_files(tensors, 10))
    if has_old:
        ot.convert(other, url, **options)
    done, allowed, seen = False, 0, set()
    while not done:
        changes = []

        def fault(request, changes=changes, allowed=allowed):
            if request.method in ("PUT", "POST", "DELETE"):
                changes.append(request)
                return "403" if len(changes) > allowed else None
            return None

        google.fault = fault
        try:
            ot.convert(source, url, **options)
            done = True
        except CheckpointIOError as error:
            assert "credentials" in str(error)
        google.fault = lambda request: None
        try:
            found = frozenset(ot.restore(url, None))
        except CheckpointError:
            found = None
        assert found in (None, frozenset(OTHERS), frozenset(ARRAYS))
        seen.add(found)
        allowed += 1
    assert_holds(url, ARRAYS)
    assert (frozenset(OTHERS) in seen) == has_old
    assert not os.listdir(tmp_path / "staging")


def test_what_a_killed_upload_left_is_replaced_without_asking(bucket, source):
    ot.convert(source, "s3://bucket/c")
    bucket.remove(*(f"c/{name}" for name in ("commit_success.txt", "manifest.ocdbt", "_METADATA")))
    bucket.remove("c/_CHECKPOINT_METADATA")
    ot.convert(source, "s3://bucket/c")
    assert_holds("s3://bucket/c", ARRAYS)


# -- the hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
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


SMALL = {f"leaf_{index}": np.full((16, 8), index, np.float32) for index in range(4)}


@pytest.fixture
def small(tmp_path):
    (tmp_path / "source").mkdir()
    return bundle_of(SMALL).write(tmp_path / "source")


def test_one_commit_adds_the_files_and_leaves_all_others(hub, small, tmp_path):
    (tmp_path / "model").mkdir()
    for name in ("config.json", "spiece.model"):
        (tmp_path / "model" / name).write_text('{"model_type": "t5"}')
    command = ["convert", str(small), "hf://google/tiny", "--no-translate", "--format", "safetensors"]
    command += ["--from", str(tmp_path / "model")]
    assert main(command) == 0
    names = {"model.safetensors", "config.json", "spiece.model"}
    assert hub.commits == [("Add a model as safetensors files", names, set())]
    assert hub.files.keys() == {"README.md", "pytorch_model.bin"} | names and hub.files["README.md"] == b"mine"
    assert safetensors.numpy.load(hub.files["model.safetensors"]).keys() == SMALL.keys()
    assert_holds("hf://google/tiny", SMALL)
    assert main(command) == 1, "it exists"
    assert len(hub.commits) == 1


def test_old_files_are_replaced_by_the_same_commit(hub, small, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(safetensors_layout, "MAX_FILE_BYTES", 1000)
        ot.convert(small, "hf://google/tiny@main/small", format="safetensors")
    old = {name for name in hub.files if name.startswith("small/")}
    assert len(old) > 2
    hub.files["small/tokenizer.json"] = b"{}"
    with pytest.raises(CheckpointIOError, match="exists already"):
        ot.convert(small, "hf://google/tiny/small", format="safetensors")
    renamed = ot.transforms.Rename([("leaf_(.*)", r"part_\1")])
    ot.convert(small, "hf://google/tiny/small", renamed, format="safetensors", overwrite=True)
    assert hub.commits[1:] == [("Add small/safetensors files", {"small/model.safetensors"}, old)]
    assert {name for name in hub.files if name.startswith("small/")} == {
        "small/tokenizer.json",
        "small/model.safetensors",
    }
    assert_holds("hf://google/tiny/small", {name.replace("leaf", "part"): array for name, array in SMALL.items()})


def test_files_that_the_hub_leaves_out_are_an_error(hub, small):
    hub.ignored = {"model.safetensors"}
    with pytest.raises(CheckpointIOError, match=r"did not take 'model\.safetensors'; is there a \.gitignore"):
        ot.convert(small, "hf://google/tiny", format="safetensors")
    hub.ignored = set()
    ot.convert(small, "hf://google/tiny", format="safetensors")


def test_what_cannot_be_written_is_refused_first(hub, small):
    with pytest.raises(UnsupportedCheckpointError, match="format='orbax' is not written"):
        ot.convert(small, "hf://google/tiny")
    for path in ("hf://google/none", "hf://google/tiny@none"):
        with pytest.raises(CheckpointNotFoundError, match="not on the hub"):
            ot.convert(small, path, format="safetensors")
    assert not hub.commits
