"""Buckets as TensorStore reads them: bytes by ranges, bounded, with the generation of the file."""

import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
import tensorstore as ts

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointIOError, CheckpointNotFoundError
from orbax_t5x.extras.buckets import buckets
from orbax_t5x.files.ranges import NO_BYTES, BoundedRange
from orbax_t5x.files.remote.responses import ResponseClock
from tests.support.bundle_writer import bundle_of
from tests.support.google_store import GoogleStore
from tests.support.http_store import Request, serving

FILES = {"a/1": b"0123456789", "a/2/3": b"", "ab": b"x"}


@pytest.fixture
def bucket(monkeypatch):
    kvstore = ts.KvStore.open("memory://").result()
    for name, data in FILES.items():
        kvstore.write(name, data).result()
    monkeypatch.setattr(buckets, "open_kvstore", lambda base: kvstore)
    return buckets.Bucket("s3://a", ResponseClock(5))


def test_ranges_are_those_of_the_file(bucket):
    for wanted in (BoundedRange.whole(10), BoundedRange.between(2, 5), BoundedRange.rest(7, 3), BoundedRange.last(4)):
        found = bucket.request("a/1", wanted).result()
        assert found.data == FILES["a/1"][wanted.start : wanted.stop] and found.file_bytes is None
    assert bucket.request("a/1", NO_BYTES).result().data == b""
    assert bucket.request("a/2/3", BoundedRange.whole(1)).result().data == b""
    assert bucket.request("a", BoundedRange.whole(1)).result() is None


def test_more_than_was_asked_for_is_refused(bucket):
    with pytest.raises(CheckpointIOError, match="more than the 9 bytes asked for"):
        bucket.request("a/1", BoundedRange.whole(9)).result()


def test_a_file_that_is_written_again_has_another_generation(bucket):
    before = bucket.request("ab", NO_BYTES).result().version.tag
    assert before and bucket.request("ab", BoundedRange.whole(1)).result().version.tag == before
    bucket._kvstore.write("ab", b"y").result()
    assert bucket.request("ab", NO_BYTES).result().version.tag != before


def test_a_list_has_what_is_below_a_directory(bucket):
    assert sorted(bucket.names("a/", 60)) == ["a/1", "a/2/3"]
    assert sorted(bucket.names("", 60)) == sorted(FILES)


def test_a_request_is_done_and_may_be_given_up(bucket):
    pending = bucket.request("a/1", BoundedRange.whole(10))
    pending.result()
    assert pending.done()
    pending.cancel()
    bucket.close_idle()


pytestmark = pytest.mark.slow

W = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A Mesh TensorFlow bundle, safetensors, and an Orbax root with two steps and an unfinished one."""
    directory = tmp_path_factory.mktemp("bucket")
    for name in ("bundle", "hugging"):
        (directory / name).mkdir()
    bundle_of({"w": W}).write(directory / "bundle")
    safetensors.numpy.save_file({"w": W}, directory / "hugging" / "model.safetensors")
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with ocp.CheckpointManager(directory / "root", options=options) as manager:
        for step in (3, 12):
            manager.save(step, args=ocp.args.StandardSave({"w": W + step}))
    for step in (3, 12):
        for place in (directory / "root" / str(step), directory / "root" / str(step) / "default"):
            (place / "commit_success.txt").write_text("committed")
    (directory / "root" / "40" / "default").mkdir(parents=True)
    metadata = directory / "root" / "12" / "default" / "_METADATA"
    (directory / "root" / "40" / "default" / "_METADATA").write_bytes(metadata.read_bytes())
    return directory


def files_of(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def check_all(base):
    """What a user does with a bucket."""
    target = {"w": jax.ShapeDtypeStruct(W.shape, jnp.float32)}
    for name in ("bundle", "hugging", "hugging/model.safetensors"):
        np.testing.assert_array_equal(ot.restore(f"{base}/{name}", target)["w"], W)
    (leaf,) = ot.diff(f"{base}/bundle", f"{base}/root").leaves
    assert (leaf.status, leaf.differing, leaf.absolute.value) == ("values", 24, 12.0)
    assert ot.latest_step(f"{base}/root") == 12, "40 has no mark of its writer"
    assert ot.latest_step(f"{base}/root/", validated=True) == 12
    for place in ("root", "root/12", "root/12/default"):
        np.testing.assert_array_equal(ot.restore(f"{base}/{place}", target)["w"], W + 12)
    with ot.open_checkpoint(f"{base}/root") as checkpoint:
        assert (checkpoint.step, checkpoint.path) == (12, f"{base}/root/12/default")
    with pytest.raises(CheckpointNotFoundError):
        ot.open_checkpoint(f"{base}/nothing")
    assert ot.latest_step(f"{base}/nothing") is None


@pytest.fixture(scope="module")
def moto(tree):
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
    client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys)
    for bucket in ("private", "public"):
        client.create_bucket(Bucket=bucket)
        for name, data in files_of(tree).items():
            acl = {"ACL": "public-read"} if bucket == "public" else {}
            client.put_object(Bucket=bucket, Key=f"models/{name}", Body=data, **acl)
    yield url
    server.stop()


@pytest.fixture
def amazon(moto, monkeypatch):
    """The environment of somebody with credentials."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    return monkeypatch


@pytest.fixture
def nobody(amazon):
    """The environment of somebody without."""
    amazon.delenv("AWS_ACCESS_KEY_ID")
    amazon.delenv("AWS_SECRET_ACCESS_KEY")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        amazon.setenv(name, "/dev/null")
    amazon.setenv("AWS_EC2_METADATA_DISABLED", "true")


def test_s3_with_credentials(amazon):
    check_all("s3://private/models")


def test_s3_without_credentials(nobody):
    check_all("s3://public/models")


def test_s3_that_is_refused(nobody):
    with pytest.raises(CheckpointIOError, match="credentials are missing or do not suffice"):
        ot.open_checkpoint("s3://private/models/hugging")


@pytest.fixture
def google(tree, monkeypatch):
    server = GoogleStore()
    server.files = {f"models/{name}": data for name, data in files_of(tree).items()}
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", server.url)
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token")
    yield server
    server.close()


def test_gcs(google):
    check_all("gs://bucket/models")


def test_a_changed_generation(google):
    with ot.open_checkpoint("gs://bucket/models/hugging") as checkpoint:
        google.files["models/hugging/model.safetensors"] = bytes(len(google.files["models/hugging/model.safetensors"]))
        with pytest.raises(ot.errors.CheckpointGoneError):
            checkpoint.leaves["w"].get()


def test_the_stand_ins_answer_ranges():
    """They are this test's own: a range of theirs is compared with the bytes."""
    with serving() as store:
        store.files["a"] = bytes(range(100))
        with urllib.request.urlopen(
            urllib.request.Request(f"{store.url}/a", headers={"Range": "bytes=10-19"})
        ) as answer:
            assert (answer.status, answer.read()) == (206, bytes(range(10, 20)))
        assert store.log == [Request("GET", "a", "bytes=10-19")]
