"""Responses as web servers frame them, received at once or byte by byte."""

import http.client

import pytest
import urllib3

from orbax_t5x.errors import CheckpointIOError, LimitExceededError
from orbax_t5x.extras.web.web_response import content_range, range_header, read_answer
from orbax_t5x.files.ranges import NO_BYTES, BoundedRange
from orbax_t5x.files.remote.responses import NO_VERSION, RequestError, RequestKind, Version
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


DATA = b"abcdefghij"
RANGES = [
    BoundedRange.between(2, 5),
    BoundedRange.last(4),
    BoundedRange.whole(10),
    BoundedRange.whole(20),
    BoundedRange.rest(7, 3),
]


def answer(head, body=b"", wanted=RANGES[0]):
    """Reads an answer into bytes, and into memory that is given: to the same end."""
    data = f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    memory = memoryview(bytearray(wanted.size))
    placed = _outcome(data, wanted._replace(into=memory))
    found = _outcome(data, wanted)
    if isinstance(found, Exception):
        assert (type(placed), str(placed)) == (type(found), str(found))
        raise found
    if placed is not None and placed.is_in_place:
        placed = placed._replace(data=memory.tobytes(), is_in_place=False)
    assert placed == found
    return found if found is None else found[:3]


def _outcome(data, wanted):
    try:
        return read_answer(response_of(data, wanted, 2), wanted)
    except Exception as error:
        return error


def test_headers_name_the_last_byte():
    assert [range_header(wanted) for wanted in RANGES] == [
        "bytes=2-4",
        "bytes=-4",
        "bytes=0-10",
        "bytes=0-20",
        "bytes=7-10",
    ]


def test_right_answers():
    for wanted in RANGES:
        start, stop, _ = slice(wanted.start, wanted.stop).indices(10)
        found = answer(f'206 OK\r\nETag: "x"\r\nContent-Range: bytes {start}-{stop - 1}/10', DATA[start:stop], wanted)
        assert found == (DATA[start:stop], Version(b'"x"'), 10)
    assert answer("206 OK\r\nContent-Range: bytes 2-4/*\r\nETag: W/x\r\nLast-Modified: y", b"cde") == (
        b"cde",
        Version(b"", b"x", b"y"),
        None,
    )
    assert answer("200 OK", b"abc", BoundedRange.between(0, 3)) == (b"abc", NO_VERSION, 3)
    assert answer("200 OK", b"abc", BoundedRange.whole(3)) == (b"abc", NO_VERSION, 3)
    assert answer("200 OK", b"", NO_BYTES) == (b"", NO_VERSION, None)
    assert answer("416 No", b"", BoundedRange.whole(3)) == (b"", NO_VERSION, None)
    assert answer("404 No", b"page") is None


WRONG = {
    "bytes 1-3/10": CheckpointIOError,
    "bytes 2-5/10": CheckpointIOError,
    "bytes 2-3/10": CheckpointIOError,
    "bytes 2-4/4": CheckpointIOError,
    "bytes 2-4/0": CheckpointIOError,
    "bytes 4-2/10": CheckpointIOError,
    "2-4": CheckpointIOError,
    "bytes 2-3/4": RequestError,
}


def test_other_ranges():
    for text, error in WRONG.items():
        with pytest.raises(error, match=r"Content-Range|only 2 bytes|file ends at byte 4"):
            answer(f"206 OK\r\nContent-Range: {text}", b"cde")


def test_other_bodies_than_announced():
    for body in (b"cd", b"cdef"):
        with pytest.raises(CheckpointIOError, match="bytes than the 3"):
            answer("206 OK\r\nContent-Range: bytes 2-4/10", body)
    with pytest.raises(CheckpointIOError, match="compresses"):
        answer("206 OK\r\nContent-Range: bytes 2-4/10\r\nContent-Encoding: gzip", b"cde")
    with pytest.raises(CheckpointIOError, match="in several parts"):
        answer("206 OK\r\nContent-Type: multipart/byteranges; boundary=x", b"cde")
    with pytest.raises(LimitExceededError):
        answer("200 OK", b"abcd", BoundedRange.whole(3))


def test_refusals_have_a_kind():
    kinds = {
        "401 No": RequestKind.DENIED,
        "403 No": RequestKind.DENIED,
        "416 No": RequestKind.BEYOND_END,
        "302 X": RequestKind.REDIRECT,
        "418 X": RequestKind.OTHER,
        "200 OK": RequestKind.IGNORED_RANGE,
        "206 OK": RequestKind.IGNORED_RANGE,
    }
    kinds |= {f"{status} later": RequestKind.PASSING for status in (408, 429, 500, 502, 503, 504)}
    for head, kind in kinds.items():
        with pytest.raises(RequestError) as caught:
            answer(head, b"cde")
        assert caught.value.kind is kind
        assert head[0] == "2" or caught.value.reason == f"HTTP code {head[:3]}"


def test_the_size_of_the_file_is_known_from_a_range():
    data = b"HTTP/1.1 206 OK\r\nContent-Range: bytes 2-4/10\r\n\r\n"
    response = response_of(data, RANGES[0])
    assert content_range(response, RANGES[0]) == (2, 5, 10)
