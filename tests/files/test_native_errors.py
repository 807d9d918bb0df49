"""Texts of TensorStore's, JAX's and obstore's errors: status, reason without payloads, the system's number."""

import errno
import socket

import obstore
import pytest
from obstore.store import HTTPStore

from orbax_t5x.files.native_errors import parse_error, store_reason


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


def test_a_refused_connection_is_named():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    store = HTTPStore.from_url(url, client_options={"allow_http": True}, retry_config={"max_retries": 0})
    with pytest.raises(Exception, match="error sending request") as caught:
        obstore.get(store, "x")
    reason = store_reason(caught.value)
    assert reason.endswith("error sending request: Connection refused") and "\n" not in reason
    assert store_reason(ValueError("one line")) == "one line"
