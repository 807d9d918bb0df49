"""Responses beside the requests that they answer: the bytes that were asked for, or an error."""

import pytest

from orbax_t5x.errors import CheckpointIOError, LimitExceededError
from orbax_t5x.extras.web.web_answer import content_range, range_header, read_answer
from orbax_t5x.files.ranges import NO_BYTES, BoundedRange
from orbax_t5x.files.remote.responses import NO_VERSION, RequestError, RequestKind, Version
from tests.support.sent_bytes import response_of

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
