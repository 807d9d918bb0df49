"""Conversions to `s3://`, on moto, and to `gs://`, on a stand-in of Google's JSON API."""

import errno
import json
import os
import random
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, CheckpointIOError, CheckpointNotFoundError, UnsupportedCheckpointError
from orbax_t5x.extras.buckets import bucket_destination
from orbax_t5x.extras.buckets.bucket_destination import BucketDestination, Stage, upload_order
from orbax_t5x.operations.convert.safetensors_layout import plan_files
from orbax_t5x.operations.convert.work_directory import WorkDirectory
from tests.support.amazon_store import amazon_store
from tests.support.bundle_writer import bundle_of
from tests.support.google_store import GoogleStore

pytestmark = pytest.mark.slow

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
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", server.url)
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token")
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


def test_a_destination_in_use_is_refused(bucket, source, tmp_path):
    """By a conversion of this machine, by its work directory; by one of another machine, by the object beside."""
    refused = []

    def convert_again(*progress):
        with pytest.raises(CheckpointIOError) as caught:
            ot.convert(source, "s3://bucket/c", overwrite=True)
        refused.append(caught.value)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TMPDIR", str(tmp_path))
            with pytest.raises(CheckpointIOError) as caught:
                ot.convert(source, "s3://bucket/c", overwrite=True)
        refused.append(caught.value)

    ot.convert(source, "s3://bucket/c", progress=convert_again, memory_limit_bytes=1 << 20)
    assert {error.errno for error in refused} == {errno.EBUSY} and len(refused) >= 2
    assert any("remove the object '.c.orbax-t5x-convert'" in str(error) for error in refused)
    assert_holds("s3://bucket/c", ARRAYS)
    assert all(name.startswith("c/") for name in bucket.names())


def test_a_mark_that_is_no_conversions_is_left(bucket, source):
    deep = b'{"owner": ' + b"[" * 200_000
    for data in (b"", b"[]", b'{"owner": 1, "host": "h", "names": [], "replaced": []}', deep):
        bucket.write(".c.orbax-t5x-convert", data)
        with pytest.raises(CheckpointIOError, match="it is left as it is"):
            ot.convert(source, "s3://bucket/c")
        assert bucket.read(".c.orbax-t5x-convert") == data and len(bucket.names()) == 1


def test_a_mark_of_any_size_is_not_read_whole(bucket, source, monkeypatch):
    sizes, parse = [], bucket_destination.parse_object
    monkeypatch.setattr(
        bucket_destination, "parse_object", lambda data, path: sizes.append(len(data)) or parse(data, path)
    )
    mark = {"owner": "o", "host": "x" * (17 << 20), "names": [], "replaced": []}
    bucket.write(".c.orbax-t5x-convert", json.dumps(mark).encode())
    with pytest.raises(CheckpointIOError, match="it is left as it is"):
        ot.convert(source, "s3://bucket/c")
    assert sizes == [1]


def test_a_host_in_a_mark_moves_no_cursor(bucket, source):
    mark = {"owner": "o", "host": "evil\x1b]0;x\x07\nFix: rm", "names": [], "replaced": []}
    bucket.write(".c.orbax-t5x-convert", json.dumps(mark).encode())
    with pytest.raises(CheckpointIOError, match=r"on evil\\x1b\]0;x\\x07\\nFix: rm, writes"):
        ot.convert(source, "s3://bucket/c")


def test_an_error_before_the_upload_leaves_nothing(bucket, source, tmp_path):
    def fail(*progress):
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        ot.convert(source, "s3://bucket/c", progress=fail)
    assert not bucket.names() and not os.listdir(tmp_path / "staging")


def test_an_upload_that_failed_starts_again(google, source, other, tmp_path):
    """After each number of uploads that a server takes; at every one nothing opens but the old or the new one."""
    url = "gs://bucket/c"
    for first in (None, other):
        google.files.clear()
        if first is not None:
            ot.convert(first, url)
        done, allowed = False, 0
        while not done:
            uploads = []

            def fault(request, uploads=uploads, allowed=allowed):
                if request.method in ("POST", "DELETE") and "convert" not in request.name:
                    uploads.append(request)
                    return "403" if len(uploads) > allowed else None
                return None

            google.fault = fault
            try:
                ot.convert(source, url, overwrite=True, memory_limit_bytes=1 << 16)
                done = True
            except CheckpointIOError as error:
                assert "credentials" in str(error)
            google.fault = lambda request: None
            try:
                found = set(ot.restore(url, None))
            except CheckpointNotFoundError:
                found = None
            except CheckpointError:
                found = None
            assert found in (None, set(OTHERS), set(ARRAYS))
            allowed += 8
        assert allowed > 10
        assert_holds(url, ARRAYS)
        assert all(name.startswith("c/") for name in google.files) and not os.listdir(tmp_path / "staging")


def test_the_mark_names_what_is_replaced(bucket, source, other, monkeypatch):
    """A conversion that was killed while old files were removed takes them for its own."""
    ot.convert(other, "s3://bucket/c")
    old = bucket.names("c/")

    class Killed(BaseException):
        pass

    def stop(self, names, files):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(BucketDestination, "_send", stop)
        patch.setattr(WorkDirectory, "__exit__", lambda work, *exception: work._lock.close())
        with pytest.raises(Killed):
            ot.convert(source, "s3://bucket/c", overwrite=True)
    mark = json.loads(bucket.read(".c.orbax-t5x-convert"))
    assert [f"c/{name}" for name in mark["replaced"]] == old

    def fail(*progress):
        raise RuntimeError("stopped")

    # An error of the next one leaves the mark, without which nobody knows whose the objects are.
    with pytest.raises(RuntimeError, match="stopped"):
        ot.convert(other, "s3://bucket/c", overwrite=True, progress=fail)
    assert json.loads(bucket.read(".c.orbax-t5x-convert")) == mark
    ot.convert(source, "s3://bucket/c")
    assert_holds("s3://bucket/c", ARRAYS)
    assert not {name for name in bucket.names() if "orbax-t5x" in name}


OLD = {f"leaf_{index}": np.full((8, 16), index, np.float32) for index in range(6)}
NEW = {name: array + 100 for name, array in OLD.items()} | {"more": np.ones(3, np.float32)}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Directories by (which, shape)."""
    root = tmp_path_factory.mktemp("checkpoints")
    made = {}
    for which, arrays in {"old": OLD, "new": NEW}.items():
        (root / which).mkdir()
        source = bundle_of(arrays).write(root / which)
        made[which, "orbax"] = root / which / "orbax"
        ot.convert(source, made[which, "orbax"])
        made[which, "one file"] = root / which / "one"
        ot.convert(source, made[which, "one file"], format="safetensors")
        for parts, size in {"some files": 1100, "many files": 10}.items():
            made[which, parts] = root / which / parts
            with pytest.MonkeyPatch.context() as patch:
                target = "orbax_t5x.operations.convert.safetensors_layout.plan_files"
                patch.setattr(target, lambda tensors, _, size=size: plan_files(tensors, size))
                ot.convert(source, made[which, parts], format="safetensors")
    return made


def files_of(directory):
    return {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}


def found_in(directory):
    """ "old", "new", or None where nothing opens; anything else is a failure."""
    try:
        with ot.open_checkpoint(directory) as checkpoint:
            found = {name: view.get() for name, view in checkpoint.leaves.items()}
    except CheckpointError:
        return None
    which, expected = ("old", OLD) if "more" not in found else ("new", NEW)
    assert found.keys() == expected.keys(), sorted(found)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    return which


PAIRS = [(None, "orbax"), (None, "one file"), (None, "some files"), ("orbax", "orbax")]
PAIRS += [(old, new) for old in ("one file", "some files", "many files") for new in ("one file", "some files")]


@pytest.mark.slow
def test_nothing_half_written_opens_after_any_step_of_any_replacement(checkpoints, tmp_path):
    order = random.Random(0)
    for number, (old, new) in enumerate(PAIRS):
        place = tmp_path / f"{number}"
        if old is None:
            place.mkdir()
        else:
            shutil.copytree(checkpoints["old", old], place)
        files = files_of(checkpoints["new", new])
        seen = []
        for stage in upload_order(files, files_of(place)):
            for name in order.sample(stage.remove, len(stage.remove)):
                (place / name).unlink()
                seen.append(found_in(place))
            for name in order.sample(stage.write, len(stage.write)):
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(files[name], place / name)
                seen.append(found_in(place))
        assert seen[-1] == "new" and files_of(place).keys() == files.keys(), (old, new)
        states = [state for index, state in enumerate(seen) if index == 0 or state != seen[index - 1]]
        assert states in (["old", None, "new"], ["old", "new"], [None, "new"], ["new"]), (old, new, states)


def test_one_object_is_replaced_at_once():
    assert upload_order(["model.safetensors"], ["model.safetensors"]) == [
        Stage([], []),
        Stage([], ["model.safetensors"]),
        Stage([], []),
    ]
