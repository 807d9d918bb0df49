"""Specs with which arrays are opened."""

import errno

import numpy as np
import pytest
import tensorstore as ts
from orbax.checkpoint import type_handlers

from orbax_t5x import errors
from orbax_t5x.readers.tensorstore_specs import array_spec, typed_error
from orbax_t5x.testing.leaf_reads import assert_same
from tests.support.format_suites import save_orbax

LAYOUTS = [(ocdbt, zarr3) for ocdbt in (True, False) for zarr3 in (False, True)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("ocdbt", "zarr3"), LAYOUTS)
def test_our_spec_is_orbaxs(tmp_path, ocdbt, zarr3):
    """Driver, place and name of each array, as Orbax's own (deprecated) function gives them."""
    path = save_orbax(tmp_path / "item", {"a": {"w": np.ones((2, 3))}}, ocdbt=ocdbt, zarr3=zarr3)
    info = type_handlers.ParamInfo(
        name="a.w",
        path=path / "a.w",
        parent_dir=path,
        is_ocdbt_checkpoint=ocdbt,
        use_zarr3=zarr3,
        raise_array_data_missing_error=True,
    )
    theirs = type_handlers.get_json_tspec_read(info, use_ocdbt=ocdbt)
    ours = array_spec({"driver": "file", "path": str(path)}, "a.w", ocdbt=ocdbt, zarr3=zarr3)
    context = ts.Context({"cache_pool#ocdbt": {"total_bytes_limit": 1 << 20}})
    for spec in (theirs, ours):
        array = ts.open(spec, open=True, read=True, context=context).result()
        assert_same(np.asarray(array), np.ones((2, 3)))
        spec["kvstore"]["path"] = spec["kvstore"]["path"].rstrip("/")
        # How Orbax writes, which says nothing about reading.
        spec["kvstore"].pop("manifest", None)
        spec["kvstore"].get("base", {}).pop("file_io_locking", None)
    assert ours == theirs


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("UNAVAILABLE: try again", errors.CheckpointIOError),
        ("PERMISSION_DENIED: no", errors.CheckpointIOError),
        ("DATA_LOSS: checksum", errors.CorruptCheckpointError),
        ("FAILED_PRECONDITION: expected int", errors.CorruptCheckpointError),
        ("INVALID_ARGUMENT: Invalid key: ../x", errors.UnsafeCheckpointError),
        ("UNIMPLEMENTED: codec", errors.UnsupportedCheckpointError),
        (f"INTERNAL: open [os_error_code='{errno.EIO}']", errors.CheckpointIOError),
        (f"NOT_FOUND: open [os_error_code='{errno.ENOENT}']", errors.CorruptCheckpointError),
    ],
)
def test_a_local_failure_has_the_type_of_its_status(tmp_path, text, kind):
    error = typed_error(ValueError(text), path=str(tmp_path), leaf="w", doing="reading", is_remote=False)
    assert type(error) is kind
    assert (error.path, error.leaf) == (str(tmp_path), "w")
    assert "reading: " in str(error) and "os_error_code" not in str(error)


def test_a_directory_that_is_gone_comes_first(tmp_path):
    error = typed_error(
        ValueError("DATA_LOSS: x"), path=str(tmp_path / "gone"), leaf=None, doing="reading", is_remote=False
    )
    assert type(error) is errors.CheckpointGoneError


def test_a_store_that_fails_is_no_damage():
    def kind(text):
        return type(typed_error(ValueError(text), path="gs://bucket/x", leaf="w", doing="reading", is_remote=True))

    assert kind("UNAVAILABLE: x") is errors.CheckpointIOError
    assert kind("DATA_LOSS: x") is errors.CorruptCheckpointError
