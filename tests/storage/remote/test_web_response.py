"""Responses as web servers frame them, received at once or byte by byte."""

import pytest

from orbax_t5x.errors import CheckpointIOError
from orbax_t5x.storage.remote.web_response import PassingError, WebResponse
from orbax_t5x.storage.values import NO_BYTES, BoundedRange
from tests.support.sent_bytes import SentBytes

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
# What is sent, the body, and whether the connection may be used again.
SOUND = [
    (OK + b"Content-Length: 3\r\n\r\nabc", b"abc", True),
    (OK + b"CONTENT-LENGTH:3\r\nConnection: close\r\n\r\nabc", b"abc", False),
    (OK + b"Content-Length: 3\r\n\r\nabcd", b"abc", False),
    (b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"abc", False),
    (b"HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n", b"", True),
    (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
    (OK + b"\r\nabc", b"abc", False),
    (CHUNKED + b"2\r\nab\r\n01;x=y\r\nc\r\n0\r\nx: y\r\n\r\n", b"abc", True),
    (b"HTTP/1.1 100 Continue\r\n\r\n" * 3 + OK + b"X: y\r\n z\r\nContent-Length: 1\r\n\r\na", b"a", True),
]
NO_HTTP = [
    b"HTTP/2 200\r\n\r\n",
    b"<html>\r\n\r\n",
    OK + b"Content-Length: -1\r\n\r\n",
    OK + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    OK + b"no header\r\n\r\n",
    OK + b"Content-Length : 3\r\n\r\nabc",
    OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
    CHUNKED + b"-1\r\n",
    CHUNKED + b"1\r\nab\r\n0\r\n\r\n",
    CHUNKED + b"0\r\n" + b"x: y\r\n" * 300,
    b"HTTP/1.1 100 Continue\r\n\r\n" * 20,
    OK + b"x" * (1 << 19),
]


WANTED = BoundedRange.between(0, 3)


def response_of(data, size=1 << 20, wanted=WANTED):
    return WebResponse(SentBytes(data, size), lambda: 1.0, wanted)


def test_sound_responses():
    for data, body, is_kept in SOUND:
        for size in (1, 7, 1 << 20):
            response = response_of(data, size)
            assert not response.leaves_connection or not body
            assert response.body(3) == body
            assert response.leaves_connection == (is_kept or (data.endswith(b"abcd") and size == 1))


def test_bodies_of_a_known_length_fill_memory():
    unknown = SOUND[6:8]
    for data, body, is_kept in SOUND:
        for size in (3, 1 << 20):
            response, memory = response_of(data, size), memoryview(bytearray(len(body)))
            is_filled = response.fill(memory)
            assert is_filled == ((data, body, is_kept) not in unknown)
            assert not is_filled or memory == body
            # What follows may not have been received yet: a connection that is used again is searched for it.
            assert not is_filled or response.leaves_connection == is_kept or (data.endswith(b"abcd") and size == 3)
            assert not response_of(data, size).fill(memoryview(bytearray(len(body) + 1)))
    response = response_of(OK + b"Content-Length: 3\r\n\r\nab")
    with pytest.raises(PassingError, match="ended after 2 of 3 bytes"):
        response.fill(memoryview(bytearray(3)))


def test_more_than_may_be_is_not_read():
    for data, body, _ in SOUND:
        if body:
            response = response_of(data)
            assert response.body(len(body) - 1) is None and not response.leaves_connection


def test_a_response_to_a_request_for_no_bytes_has_none():
    response = response_of(OK + b'ETag: "a"\r\nContent-Length: 9\r\n\r\n', wanted=NO_BYTES)
    assert response.headers == {"etag": '"a"', "content-length": "9"} and response.leaves_connection


def test_what_is_no_http():
    for data in NO_HTTP:
        with pytest.raises(ValueError, match=r"^UNKNOWN: no HTTP"):
            response_of(data).body(3)


def test_responses_that_are_cut():
    for data, body, _ in SOUND[:2] + SOUND[7:]:
        for stop in range(len(data.rstrip(b"d")) - 1):
            with pytest.raises((OSError, PassingError)):
                assert response_of(data[:stop]).body(len(body)) == body


def test_all_of_a_response_is_bounded():
    with pytest.raises(CheckpointIOError, match="more than an answer to the request can have"):
        response_of(CHUNKED + (b"1;" + b"x" * 4000 + b"\r\na\r\n") * 200).body(1 << 20)


def test_a_silent_server_is_given_up():
    with pytest.raises(TimeoutError):
        WebResponse(SentBytes(OK), lambda: 0.0, NO_BYTES)
