"""Damaged and hostile T5X checkpoints: typed errors with file and leaf; nothing outside is read, nothing written."""

import gzip
import hashlib
import json
import os

import flax.serialization
import numpy as np
import pytest
import tensorstore as ts

import orbax_t5x as ot
from orbax_t5x.errors import (
    CheckpointError,
    CorruptCheckpointError,
    LeafMismatchError,
    LimitExceededError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)
from tests.support.t5x_steps import GOOD, array, link, save, spec


@pytest.fixture
def step(tmp_path):
    directory = tmp_path / "checkpoint_1"
    array(directory / "bad")
    array(directory / "good")
    (tmp_path / "secret").write_bytes(gzip.compress(GOOD.tobytes()))
    array(tmp_path / "outside")
    return directory


def digest(directory):
    """Names and bytes of everything below a directory."""
    found = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        found.update(repr((str(path), path.is_symlink() or path.is_dir())).encode())
        if path.is_file() and not path.is_symlink():
            found.update(path.read_bytes())
    return found.hexdigest()


def broken(step, kind, match=None):
    """The error of the leaf `bad`, beside which `good` is read; nothing was written."""
    before = digest(step.parent)
    with ot.open_checkpoint(step) as checkpoint:
        assert list(checkpoint.leaves) == ["bad", "good"]
        np.testing.assert_array_equal(checkpoint.leaves["good"].get(), GOOD)
        with pytest.raises(CheckpointError, match=match) as caught:
            checkpoint.leaves["bad"].get()
    assert type(caught.value) is kind, repr(caught.value)
    assert caught.value.leaf == "bad" and str(step) in (caught.value.path or "")
    assert digest(step.parent) == before
    return caught.value


def good(step):
    with ot.open_checkpoint(step) as checkpoint:
        np.testing.assert_array_equal(checkpoint.leaves["bad"].get(), GOOD)


PATHS = [
    "/",
    "../outside",
    "a/../../outside",
    "..",
    "bad/../../outside",
    "%2e%2e/outside",
    "%2E./x",
    "..\\x",
    "a\\b",
    "a\0b",
    "",
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("beside", [False, True])
def test_paths_that_lead_out(step, path, beside):
    bad = spec(path) if not beside else spec(kvstore={"driver": "gfile"}, path=path)
    save(step, bad)
    broken(step, UnsafeCheckpointError, "file name")


def test_an_absolute_path(step):
    save(step, spec(str(step.parent / "outside")))
    broken(step, UnsafeCheckpointError, "absolute")


@pytest.mark.parametrize(
    ("place", "target"), [("bad", "../outside"), ("bad/.zarray", "../../outside/.zarray"), ("bad/0.0", "../../secret")]
)
def test_links_out_of_the_checkpoint(step, place, target):
    save(step, spec())
    link(step / place, target)
    broken(step, UnsafeCheckpointError, "leads out")


@pytest.mark.parametrize("place", ["bad", "bad/.zarray", "bad/0.0"])
def test_dangling_links(step, place):
    save(step, spec())
    link(step / place, "nowhere")
    broken(step, CorruptCheckpointError)


@pytest.mark.parametrize("target", ["../../secret", "../../../secret"])
def test_a_link_below_a_directory_of_chunks(step, target):
    array(step / "deep", dimension_separator="/")
    save(step, spec("deep/"))
    link(step / "deep" / "0" / "0", target + "" if target.count("..") == 3 else "../" + target)
    broken(step, UnsafeCheckpointError, "leads out")


@pytest.mark.parametrize("place", ["bad/.zarray", "bad/0.0", "bad/0/0"])
def test_pipes(step, place):
    save(step, spec())
    path = step / place
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    broken(step, CorruptCheckpointError, "not a regular file|FIFO")


def test_a_pipe_or_a_directory_in_place_of_the_array(step):
    save(step, spec())
    for file in (step / "bad").iterdir():
        file.unlink()
    broken(step, CorruptCheckpointError, "missing")
    (step / "bad" / ".zarray").mkdir()
    broken(step, CorruptCheckpointError, "directory")
    (step / "bad" / ".zarray").rmdir()
    (step / "bad").rmdir()
    broken(step, CorruptCheckpointError, "missing")
    os.mkfifo(step / "bad")
    broken(step, CorruptCheckpointError)


DRIVERS = [
    "http",
    "https",
    "s3",
    "gcs_grpc",
    "ocdbt",
    "zip",
    "memory",
    "kvstack",
    "neuroglancer_uint64_sharded",
    "x",
    3,
    None,
]


@pytest.mark.parametrize("driver", DRIVERS)
def test_kvstores_that_are_not_beside_the_checkpoint(step, driver):
    save(step, spec(kvstore={"driver": driver, "path": "bad/"}))
    broken(step, UnsafeCheckpointError, "kvstore")


@pytest.mark.parametrize("url", ["http://169.254.169.254/latest", "file:///etc", "s3://bucket/x", ""])
def test_urls(step, url):
    save(step, spec(kvstore=url))
    broken(step, UnsafeCheckpointError, "URL")


@pytest.mark.parametrize("field", ["endpoint", "aws_credentials", "base_url", "headers"])
@pytest.mark.parametrize("inside", [False, True])
def test_fields_that_reach_out(step, field, inside):
    kvstore = {"driver": "file", "path": "bad/"}
    save(step, spec(kvstore={**kvstore, field: "http://127.0.0.1"}) if inside else spec(**{field: "x"}))
    broken(step, UnsafeCheckpointError, field)


@pytest.mark.parametrize(
    "kvstore", [{"driver": "gcs", "bucket": "any", "path": "bad"}, {"driver": "gfile", "path": "bad/"}]
)
def test_buckets_are_no_places(step, kvstore):
    save(step, spec(kvstore=kvstore))
    good(step)


@pytest.mark.parametrize("driver", ["cast", "stack", "downsample", "array", "json", "image", "auto", "n5", "zarr3", ""])
def test_other_drivers(step, driver):
    save(step, spec(driver=driver))
    broken(step, UnsupportedCheckpointError, "driver")
    save(step, {"driver": driver, "base": spec(), "dtype": "float32"})
    broken(step, UnsupportedCheckpointError, "driver")


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"metadata": ...}, CorruptCheckpointError),
        ({"metadata": 3}, CorruptCheckpointError),
        ({"metadata": []}, CorruptCheckpointError),
        ({"kvstore": ...}, CorruptCheckpointError),
        ({"kvstore": 1}, CorruptCheckpointError),
        ({"kvstore": {"driver": "file"}}, CorruptCheckpointError),
        ({"path": "good"}, CorruptCheckpointError),
        ({"kvstore": {"driver": "file", "path": 3}}, CorruptCheckpointError),
        ({"metadata": {"shape": [-2, 3]}}, CorruptCheckpointError),
        ({"metadata": {"shape": "x"}}, CorruptCheckpointError),
        ({"metadata": {"pickle": 1}}, UnsupportedCheckpointError),
        ({"unknown": 1}, UnsupportedCheckpointError),
        ({"kvstore": {"driver": "file", "path": "bad/", "base": {}}}, UnsupportedCheckpointError),
        ({"dtype": 3}, CorruptCheckpointError),
        ({"dtype": np.zeros(3)}, CorruptCheckpointError),
    ],
)
def test_damaged_specs(step, changes, kind):
    save(step, spec(**changes))
    broken(step, kind, "spec")


def test_settings_change_nothing(step):
    save(
        step,
        spec(
            **{"create": True, "delete_existing": True, "assume_metadata": True, "open": False},
            store_data_equal_to_fill_value=True,
            recheck_cached_data=True,
            context={"file_io_concurrency": {"limit": 100_000}, "cache_pool": {"total_bytes_limit": 1 << 50}},
        ),
    )
    before = digest(step)
    good(step)
    assert digest(step) == before


def test_transforms(step):
    identity = {"input_exclusive_max": [[2], [3]], "input_inclusive_min": [0, 0]}
    for said in (identity, {"input_shape": [2, 3], "output": [{"input_dimension": 0}, {"input_dimension": 1}]}):
        save(step, spec(transform=said))
        good(step)
    for said in (
        identity | {"input_inclusive_min": [1, 0]},
        identity | {"input_exclusive_max": [[1], [3]]},
        identity | {"output": [{"input_dimension": 1}, {"input_dimension": 0}]},
        identity | {"output": [{"input_dimension": 0, "stride": 2}, {"input_dimension": 1}]},
        identity | {"output": [{"input_dimension": 0, "offset": 1}, {"input_dimension": 1}]},
        identity | {"more": 1},
        [],
        "x",
    ):
        save(step, spec(transform=said))
        broken(step, UnsupportedCheckpointError, "transform")


@pytest.mark.parametrize(
    "changes", [{"metadata": {"shape": [3, 2]}}, {"dtype": "int32"}, {"metadata": {"dtype": "<f8"}}]
)
def test_specs_that_disagree_with_the_array(step, changes):
    save(step, spec(**changes))
    error = broken(step, LeafMismatchError, "the msgpack file has")
    assert error.path.endswith(".zarray")


def test_a_spec_without_a_dtype(step):
    save(step, spec(dtype=...))
    good(step)


def edit(step, **changes):
    path = step / "bad" / ".zarray"
    said = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in said.items() if value is not ...}))


METADATA = {
    "object": ({"dtype": "|O"}, UnsupportedCheckpointError),
    "structured": ({"dtype": [["a", "<f4"]]}, UnsupportedCheckpointError),
    "big endian": ({"dtype": ">f4"}, UnsupportedCheckpointError),
    "filters": ({"filters": [{"id": "pickle"}]}, UnsupportedCheckpointError),
    "pickle": ({"compressor": {"id": "pickle"}}, UnsupportedCheckpointError),
    "no level": ({"compressor": {"id": "gzip", "level": "x"}}, UnsupportedCheckpointError),
    "separator": ({"dimension_separator": "../"}, CorruptCheckpointError),
    "order": ({"order": "X"}, CorruptCheckpointError),
    "chunks of none": ({"chunks": [0, 3]}, CorruptCheckpointError),
    "negative shape": ({"shape": [-1, 3]}, CorruptCheckpointError),
    "uncountable": ({"shape": [0, 1 << 62], "chunks": [1, 1]}, CorruptCheckpointError),
    "uncountable chunk": ({"chunks": [1 << 40, 1 << 40]}, CorruptCheckpointError),
    "ranks differ": ({"chunks": [2]}, CorruptCheckpointError),
    "rank 33": ({"shape": [1] * 33, "chunks": [1] * 33}, LimitExceededError),
    "version": ({"zarr_format": 3}, UnsupportedCheckpointError),
    "a field is missing": ({"order": ...}, CorruptCheckpointError),
    "a field is unknown": ({"codecs": []}, UnsupportedCheckpointError),
    "fill value": ({"fill_value": "x"}, UnsupportedCheckpointError),
}


@pytest.mark.parametrize("case", METADATA)
def test_metadata(step, case):
    changes, kind = METADATA[case]
    save(step, spec(metadata={}, dtype=...))
    edit(step, **changes)
    broken(step, kind)


def test_metadata_that_is_none(step):
    save(step, spec())
    for data in (b"", b"[]", b"{", b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b'{"shape": [2], "shape": [3]}'):
        (step / "bad" / ".zarray").write_bytes(data)
        broken(step, CorruptCheckpointError)


def test_a_shape_of_terabytes_opens_and_reads_a_box(step):
    save(step, spec(metadata={}, dtype=...))
    edit(step, shape=[1 << 20, 1 << 20], chunks=[2, 3], fill_value=0.5)
    with ot.open_checkpoint(step) as checkpoint:
        assert checkpoint.leaves["bad"].nbytes == 4 << 40
        np.testing.assert_array_equal(checkpoint.leaves["bad"][:2, :3].get(), GOOD)
        np.testing.assert_array_equal(checkpoint.leaves["bad"][1 << 19, :2].get(), [0.5, 0.5])


def test_a_chunk_larger_than_the_machine(step):
    save(step, spec(metadata={}, dtype=...))
    edit(step, shape=[1 << 50], chunks=[1 << 50])
    with ot.open_checkpoint(step) as checkpoint, pytest.raises(LimitExceededError, match="chunk") as caught:
        checkpoint.leaves["bad"][:2].get()
    assert caught.value.leaf == "bad"


@pytest.mark.parametrize("damage", ["short", "long", "flipped", "cut", "bomb", "empty", "gone"])
def test_chunks(step, damage):
    save(step, spec())
    path = step / "bad" / "0.0"
    data = path.read_bytes()
    flipped = bytearray(data)
    flipped[-6] ^= 1  # of the crc
    new = {
        "short": gzip.compress(GOOD.tobytes()[:-1]),
        "long": gzip.compress(GOOD.tobytes() + b"\0"),
        "flipped": bytes(flipped),
        "cut": data[: len(data) // 2],
        "bomb": gzip.compress(bytes(1 << 28), 1),
        "empty": b"",
    }
    path.unlink()
    if damage in new:
        path.write_bytes(new[damage])
    broken(step, CorruptCheckpointError)


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_uint16_is_bfloat16_in_old_versions_alone(step, version):
    bits = np.arange(6, dtype=np.uint16).reshape(2, 3)
    said = {"shape": [2, 3], "chunks": [2, 3], "dtype": "<u2", "compressor": None}
    place = {"driver": "file", "path": f"{step}/words/"}
    ts.open({"driver": "zarr", "kvstore": place, "metadata": said}, create=True).result().write(bits).result()
    leaves = {"bad": spec("words/", dtype="uint16"), "good": spec("good/")}
    tree = {"version": version, "optimizer": leaves} if version else {"target": leaves}
    (step / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(tree))
    if version == 3:
        broken(step, UnsupportedCheckpointError, "uint16")
        return
    with ot.open_checkpoint(step) as checkpoint:
        lazy = checkpoint.leaves["bad" if version else "target/bad"]
        assert lazy.dtype.name == "bfloat16"
        assert lazy.get().tobytes() == bits.tobytes()


def test_two_leaves_in_one_directory(step):
    for place in ("bad/", "./bad", "bad//"):
        save(step, spec(), another=spec(place))
        with pytest.raises(CorruptCheckpointError, match="one was written over the other"):
            ot.open_checkpoint(step)
    (step / "also").symlink_to("bad")
    save(step, spec(), another=spec("also"))
    with pytest.raises(CorruptCheckpointError, match="one was written over the other"):
        ot.open_checkpoint(step)


@pytest.mark.parametrize(
    ("top", "kind"),
    [
        ({"version": 4, "optimizer": {}}, UnsupportedCheckpointError),
        ({"version": -1, "optimizer": {}}, CorruptCheckpointError),
        ({"version": 2.0, "optimizer": {}}, CorruptCheckpointError),
        ({"version": 3}, CorruptCheckpointError),
    ],
)
def test_versions(step, top, kind):
    (step / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(top))
    with pytest.raises(CheckpointError) as caught:
        ot.open_checkpoint(step, format="t5x")
    assert type(caught.value) is kind and caught.value.path == str(step / "checkpoint")


def test_damaged_checkpoint_files(step):
    save(step, spec())
    data = (step / "checkpoint").read_bytes()
    for changed in (data[:-1], data[: len(data) // 2], data[:30], data + b"\0"):
        (step / "checkpoint").write_bytes(changed)
        with pytest.raises(CorruptCheckpointError) as caught:
            ot.open_checkpoint(step)
        assert caught.value.path == str(step / "checkpoint")
    (step / "checkpoint").unlink()
    (step / "checkpoint").symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError):
        ot.open_checkpoint(step)
    with pytest.raises(UnsafeCheckpointError):
        ot.open_checkpoint(step, format="t5x")
