"""Types of failed requests, by the status that TensorStore puts before its text."""

import pytest

from orbax_t5x import errors
from orbax_t5x.files.remote import request_errors


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("PERMISSION_DENIED: 403", errors.CheckpointIOError, "credentials"),
        ("OUT_OF_RANGE: 9 of 5", request_errors.BeyondEndError, "ends before"),
        ("NOT_FOUND: 404", errors.CheckpointNotFoundError, "404"),
        ("UNKNOWN: Range was ignored by server", errors.UnsupportedCheckpointError, "206"),
        ("UNKNOWN: HTTP code 302", errors.CheckpointIOError, "redirects are not followed"),
        ("UNAVAILABLE: HTTP code 503", errors.CheckpointIOError, "503"),
        ("no status", errors.CheckpointIOError, "no status"),
    ],
)
def test_a_request_fails_with_the_type_of_its_status(text, kind, said):
    error = request_errors.remote_error(ValueError(text), "reading", path="https://x/y", leaf="w")
    assert type(error) is kind and said in str(error)
    assert (error.path, error.leaf) == ("https://x/y", "w")


def test_the_body_of_an_answer_decides_nothing():
    body = "NOT_FOUND: x [http_response_body='was ignored by server']"
    assert not request_errors.is_ignored_range(ValueError(body))
    assert "ignored" not in str(request_errors.remote_error(ValueError(body), "reading", path="https://x/y"))


def test_what_means_that_there_is_no_file():
    assert request_errors.is_no_file(ValueError("UNAUTHENTICATED: x"))
    assert request_errors.is_no_file(ValueError("UNKNOWN: HTTP code 301"))
    assert not request_errors.is_no_file(ValueError("UNAVAILABLE: HTTP code 503"))
