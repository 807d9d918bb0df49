"""Types of failed requests, by their kind."""

import pytest

from orbax_t5x import errors
from orbax_t5x.files.remote.request_errors import BeyondEndError, RequestError, RequestKind, remote_error

TYPES = {
    RequestKind.DENIED: (errors.CheckpointIOError, "credentials"),
    RequestKind.MISSING: (errors.CheckpointNotFoundError, "reading: 9 of 5"),
    RequestKind.BEYOND_END: (BeyondEndError, "ends before"),
    RequestKind.IGNORED_RANGE: (errors.UnsupportedCheckpointError, "206"),
    RequestKind.REDIRECT: (errors.CheckpointIOError, "redirects are not followed"),
}


@pytest.mark.parametrize("kind", RequestKind)
def test_a_request_fails_with_the_type_of_its_kind(kind):
    expected, said = TYPES.get(kind, (errors.CheckpointIOError, "9 of 5"))
    error = remote_error(RequestError("9 of 5", kind), "reading", path="https://x/y", leaf="w")
    assert type(error) is expected and said in str(error)
    assert (error.path, error.leaf) == ("https://x/y", "w")


def test_what_means_that_there_is_no_file_and_what_may_pass():
    assert {kind.name for kind in RequestKind if RequestError("", kind).is_no_file} == {"DENIED", "REDIRECT"}
    assert {kind.name for kind in RequestKind if RequestError("", kind).may_pass} == {"BROKEN", "SILENT", "PASSING"}


def test_the_text_decides_nothing():
    error = RequestError("NOT_FOUND: HTTP code 302 was ignored by server")
    assert error.kind is RequestKind.OTHER and not error.is_no_file and not error.may_pass
    assert type(remote_error(error, "reading", path="https://x/y")) is errors.CheckpointIOError
