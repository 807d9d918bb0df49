"""What a failed write leaves a save as."""

import errno

import pytest

from orbax_t5x.errors import CheckpointIOError, UnsupportedCheckpointError
from orbax_t5x.handlers.write_errors import raise_as_checkpoint_error


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.ENOSPC, "no space"), errno.ENOSPC),
        (TimeoutError(errno.ETIMEDOUT, "the server is silent"), errno.ETIMEDOUT),
        (ValueError("UNAVAILABLE: the store is gone"), None),
    ],
)
def test_failures_of_a_store_are_typed(error, number):
    with pytest.raises(CheckpointIOError) as caught:
        raise_as_checkpoint_error(error, "/place", leaf="w")
    assert (caught.value.path, caught.value.leaf, caught.value.errno) == ("/place", "w", number)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [TimeoutError("the save took too long"), UnsupportedCheckpointError("x"), KeyboardInterrupt(), TypeError()]
)
def test_others_stay_what_they_are(error):
    """The limit on the time of a save is TimeoutError, as in stock Orbax."""
    with pytest.raises(type(error)) as caught:
        raise_as_checkpoint_error(error, "/place", leaf="w")
    assert caught.value is error
