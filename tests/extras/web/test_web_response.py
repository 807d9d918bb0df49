"""Responses as web servers frame them, received at once or byte by byte."""

import http.client

import pytest
import urllib3

from orbax_t5x.errors import CheckpointIOError
from orbax_t5x.files.ranges import NO_BYTES, BoundedRange
from orbax_t5x.files.remote.responses import RequestError
from tests.support.sent_bytes import SentBytes, received, response_of

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
# What is sent, and the body.
SOUND = [
    (OK + b"Content-Length: 3\r\n\r\nabc", b"abc"),
    (OK + b"CONTENT-LENGTH:3\r\nConnection: close\r\n\r\nabc", b"abc"),
    (b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
    (b"HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n", b""),
    (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    (OK + b"\r\nabc", b"abc"),
    (CHUNKED + b"2\r\nab\r\n01;x=y\r\nc\r\n0\r\nx: y\r\n\r\n", b"abc"),
    (b"HTTP/1.1 100 Continue\r\n\r\n" * 3 + OK + b"X: y\r\n z\r\nContent-Length: 1\r\n\r\na", b"a"),
]
NO_HTTP = [
    b"HTTP/2 200\r\n\r\n",
    b"<html>\r\n\r\n",
    OK + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
    CHUNKED + b"-1\r\n" + b"x" * 100,
    CHUNKED + b"1\r\nab\r\n0\r\n\r\n",
    OK + b"x" * (1 << 19),
    OK + b"x: y\r\n" * 300 + b"\r\n",
]
FAILURES = (urllib3.exceptions.HTTPError, http.client.HTTPException)

WANTED = BoundedRange.between(0, 3)


def test_sound_responses():
    for data, body in SOUND:
        for size in (1, 7, 1 << 20):
            assert response_of(data, WANTED, size).body(3) == body


def test_a_connection_with_more_than_its_response_is_not_used_again():
    for data, body in SOUND:
        for more in (b"", b"HTTP/1.1 200 OK\r\n"):
            sent = SentBytes(data + more)
            if data != SOUND[5][0]:  # which ends with the connection
                assert received(sent, WANTED).body(3) == body
                assert sent.is_shut == bool(more)


def test_bodies_of_a_known_length_fill_memory():
    unknown = SOUND[5:7]
    for data, body in SOUND:
        for size in (3, 1 << 20):
            memory = memoryview(bytearray(len(body)))
            is_filled = response_of(data, WANTED, size).fill(memory)
            assert is_filled == ((data, body) not in unknown)
            assert not is_filled or memory == body
            assert not response_of(data, WANTED, size).fill(memoryview(bytearray(len(body) + 1)))
    with pytest.raises((RequestError, *FAILURES)):
        response_of(OK + b"Content-Length: 3\r\n\r\nab", WANTED).fill(memoryview(bytearray(3)))


def test_more_than_may_be_is_not_read():
    for data, body in SOUND:
        if body:
            assert response_of(data, WANTED).body(len(body) - 1) is None


def test_a_response_to_a_request_for_no_bytes_has_none():
    response = response_of(OK + b'ETag: "a"\r\nContent-Length: 9\r\n\r\n', NO_BYTES)
    assert dict(response.headers) == {"ETag": '"a"', "Content-Length": "9"}
    assert response.headers["etag"] == '"a"' and response.body(0) == b""


def test_what_is_no_http():
    for data in NO_HTTP:
        with pytest.raises((RequestError, *FAILURES)):
            response_of(data, WANTED).body(3)


def test_responses_that_are_cut():
    for data, body in SOUND:
        for stop in range(len(data) - 1 if body else len(data)):
            if data == SOUND[5][0] and stop >= data.index(b"abc"):
                continue  # nothing says how long it is
            with pytest.raises((RequestError, *FAILURES)):
                response_of(data[:stop], WANTED).body(len(body))


def test_all_of_a_response_is_bounded():
    endless = [b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000, CHUNKED + b"0\r\n" + b"x: y\r\n" * 200_000]
    endless.append(CHUNKED + (b"1;" + b"x" * 4000 + b"\r\na\r\n") * 200)
    for data in endless:
        with pytest.raises((CheckpointIOError, urllib3.exceptions.ProtocolError), match="more than an answer"):
            response_of(data, WANTED).body(1 << 20)


def test_a_silent_server_is_given_up():
    with pytest.raises(TimeoutError):
        response_of(OK, NO_BYTES, seconds_left=0.0)
