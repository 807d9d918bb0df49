"""TensorStore specs in a checkpoint file: only a directory beside it is taken, nothing that reaches out."""

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import (
    CorruptCheckpointError,
    LeafMismatchError,
    LimitExceededError,
    UnsafeCheckpointError,
    UnsupportedCheckpointError,
)
from tests.support.t5x_steps import GOOD, broken, digest, edit, good, save, spec

PATHS = ["/", "../outside", "a/../../outside", "..", "bad/../../outside", "..\\x", "a\\b", "a\0b", ""]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("beside", [False, True])
def test_paths_that_lead_out(step, path, beside):
    bad = spec(path) if not beside else spec(kvstore={"driver": "gfile"}, path=path)
    save(step, bad)
    broken(step, UnsafeCheckpointError, "file name")


def test_an_absolute_path(step):
    save(step, spec(str(step.parent / "outside")))
    broken(step, UnsafeCheckpointError, "absolute")


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


@pytest.mark.parametrize("changes", [{"endpoint": "x"}, {"unknown": 1}, {"metadata": {"shape": [2, 3], "more": 1}}])
def test_other_fields_are_ignored(step, changes):
    save(step, spec(**changes))
    good(step)
    save(step, spec(kvstore={"driver": "file", "path": "bad/", "endpoint": "http://127.0.0.1", "base": {}}))
    good(step)


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
