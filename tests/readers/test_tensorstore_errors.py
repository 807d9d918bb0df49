"""Types of errors that TensorStore raises, by their status, the system's error number and where the array is."""

import errno

import pytest

from orbax_t5x import errors
from orbax_t5x.readers.tensorstore_errors import typed_error


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
