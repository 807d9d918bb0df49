"""Texts of TensorStore's and JAX's errors: status, reason without payloads, the system's number."""

import errno

import pytest

from orbax_t5x.files.native_errors import parse_error


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("UNAVAILABLE: try again", ("UNAVAILABLE", "try again", None)),
        ("no status", ("", "no status", None)),
        ("", ("", "", None)),
        ("NOT_FOUND: open [os_error_code='28'] more", ("NOT_FOUND", "open", errno.ENOSPC)),
        ("NOT_FOUND: x [http_response_body='was ignored by server\n']", ("NOT_FOUND", "x", None)),
        ("DEADLINE_EXCEEDED: a: b", ("DEADLINE_EXCEEDED", "a: b", None)),
    ],
)
def test_the_parts_of_a_text(text, parts):
    assert parse_error(ValueError(text)) == parts


def test_what_a_server_sent_decides_nothing():
    assert parse_error(ValueError("INVALID_ARGUMENT: Invalid key: ../x")).is_unsafe_key
    assert not parse_error(ValueError("UNKNOWN: x [http_response_body='Invalid key: ']")).is_unsafe_key
