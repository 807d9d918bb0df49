"""Buckets: moto's S3, private, public and by a profile, and a stand-in of Google's that speaks XML and JSON."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointGoneError, CheckpointIOError, CheckpointNotFoundError
from tests.support.bundle_writer import bundle_of
from tests.support.format_suites import write_t5x
from tests.support.google_store import GoogleStore

pytestmark = pytest.mark.slow

W = np.random.default_rng(0).normal(size=(256, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A Mesh TensorFlow bundle, safetensors, a T5X step, and an Orbax root with two steps and an unfinished one."""
    directory = tmp_path_factory.mktemp("bucket")
    for name in ("bundle", "hugging"):
        (directory / name).mkdir()
    bundle_of({"w": W}).write(directory / "bundle")
    safetensors.numpy.save_file({"w": W}, directory / "hugging" / "model.safetensors")
    write_t5x(directory / "t5x" / "checkpoint_7", {"w": W})
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
    for name in ("t5x", "t5x/checkpoint_7", "t5x/checkpoint_7/checkpoint"):
        with ot.open_checkpoint(f"{base}/{name}") as checkpoint:
            assert (checkpoint.format, checkpoint.step) == ("t5x", 7)
            np.testing.assert_array_equal(checkpoint.leaves["w"].get(), W)
    (leaf,) = ot.diff(f"{base}/bundle", f"{base}/root", atol=11).leaves
    assert (leaf.status, leaf.differing) == ("values", W.size)
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
        if bucket == "public":
            client.put_bucket_acl(Bucket=bucket, ACL="public-read")
        for name, data in files_of(tree).items():
            acl = {"ACL": "public-read"} if bucket == "public" else {}
            client.put_object(Bucket=bucket, Key=f"models/{name}", Body=data, **acl)
    yield url
    server.stop()


@pytest.fixture
def nobody(moto, monkeypatch):
    """The environment of somebody without credentials."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return monkeypatch


def test_s3_with_keys_of_the_environment(nobody):
    nobody.setenv("AWS_ACCESS_KEY_ID", "key")
    nobody.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    check_all("s3://private/models")


def test_s3_by_a_profile(nobody, tmp_path):
    (tmp_path / "credentials").write_text("[work]\naws_access_key_id = key\naws_secret_access_key = secret\n")
    (tmp_path / "config").write_text("[profile work]\nregion = eu-central-1\n")
    nobody.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    nobody.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    nobody.setenv("AWS_PROFILE", "work")
    check_all("s3://private/models")


def test_s3_without_credentials(nobody):
    check_all("s3://public/models")


def test_s3_that_is_refused(nobody):
    with pytest.raises(CheckpointIOError, match="credentials are missing or do not suffice"):
        ot.open_checkpoint("s3://private/models/hugging")


def test_a_profile_that_is_not_configured(nobody):
    nobody.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(CheckpointIOError, match="nobody"):
        ot.open_checkpoint("s3://private/models/hugging")


@pytest.fixture
def google(tree, monkeypatch):
    server = GoogleStore()
    server.files = {f"models/{name}": data for name, data in files_of(tree).items()}
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.close()


def test_gcs(google):
    check_all("gs://bucket/models")


def test_a_directory_is_opened_with_one_listing(google):
    with ot.open_checkpoint("gs://bucket/models/hugging"):
        operations = [kind for kind, *_ in google.operations]
    assert operations.count("LIST") == 1 and len(operations) <= 3


def test_a_changed_file(google):
    with ot.open_checkpoint("gs://bucket/models/hugging") as checkpoint:
        google.files["models/hugging/model.safetensors"] = bytes(len(google.files["models/hugging/model.safetensors"]))
        with pytest.raises(CheckpointGoneError):
            checkpoint.leaves["w"].get()
