"""Answers of a web server, checked before bodies are read.

Responses are compared with their requests.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from orbax_t5x.errors import CheckpointIOError, LimitExceededError
from orbax_t5x.extras.web.web_response import WebResponse
from orbax_t5x.files.ranges import BoundedRange
from orbax_t5x.files.remote.responses import RequestError, RequestKind, Response, Version

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)", re.ASCII)
_MISSING = (404, 410)
_PASSING = (408, 429, 500, 502, 503, 504)
_KINDS = {401: RequestKind.DENIED, 403: RequestKind.DENIED, 416: RequestKind.BEYOND_END}
# A page that explains a refusal is read to its end, so that the connection can be used again; a longer one is not.
PAGE_BYTES = 1 << 16


def range_header(wanted: BoundedRange) -> str:
    """Returns the header that asks for bytes."""
    return f"bytes={wanted.start}" if wanted.start < 0 else f"bytes={wanted.start}-{wanted.start + wanted.size - 1}"


def read_answer(response: WebResponse, wanted: BoundedRange) -> Response | None:
    """Checks a response against its request, then reads its body."""
    status = response.status
    if status not in (200, 206):
        response.body(PAGE_BYTES)
        if status == 416 and wanted.stop is None and wanted.start <= 0:
            return Response(b"", _version(response))
        return refusal(status)
    encoding = response.headers.get("content-encoding", "").lower()
    if encoding not in ("", "identity"):
        raise CheckpointIOError(f"the server compresses its answer (Content-Encoding: {encoding[:40]!r})")
    if wanted.is_empty:
        return Response(b"", _version(response))
    if status == 200:
        data = response.body(wanted.size)
        _check_whole(data, wanted)
        file_bytes = None if data is None else len(data)
    else:
        found = _checked_range(response, wanted)
        size, file_bytes = found.stop - found.start, found.total
        if wanted.stop is None and wanted.start >= 0:
            _check_size(found.known_end - wanted.start, wanted)
        if wanted.into is not None and size == wanted.size and response.fill(wanted.into):
            return Response(b"", _version(response), file_bytes, is_in_place=True)
        data = response.body(size)
        if data is None or len(data) != size:
            raise CheckpointIOError(
                f"the answer has {'more' if data is None else 'fewer'} bytes than the {size} of its Content-Range"
            )
    if wanted.stop is None and wanted.start >= 0:
        _check_size(wanted.size if data is None else len(data), wanted)
    assert data is not None
    return Response(data, _version(response), file_bytes)


def _check_size(size: int, wanted: BoundedRange) -> None:
    """Refuses more bytes than there may be."""
    if size > wanted.most:
        raise LimitExceededError(f"more bytes than the limit of {wanted.most} permits")


def refusal(status: int) -> None:
    """Returns None for a missing file; raises other refusals."""
    if status in _MISSING:
        return
    kind = _KINDS.get(status, RequestKind.OTHER)
    if status in _PASSING or 300 <= status < 400:
        kind = RequestKind.PASSING if status in _PASSING else RequestKind.REDIRECT
    raise RequestError(f"HTTP code {status}", kind)


class ContentRange(NamedTuple):
    """Announced range of bytes, and the file's size or None."""

    start: int
    stop: int
    total: int | None

    @property
    def known_end(self) -> int:
        """The end of the file, as far as the answer names it."""
        return self.stop if self.total is None else self.total


def content_range(response: WebResponse, wanted: BoundedRange) -> ContentRange:
    """Parses the range that a response announces."""
    text = response.headers.get("content-range")
    if text is None:
        if response.headers.get("content-type", "").lower().startswith("multipart/"):
            raise CheckpointIOError("the server answers one range in several parts")
        raise RequestError("Expected Content-Range in an answer with HTTP code 206", RequestKind.IGNORED_RANGE)
    match = _CONTENT_RANGE.fullmatch(text)
    found = match and ContentRange(int(match[1]), int(match[2]) + 1, None if match[3] == "*" else int(match[3]))
    if found is None or not found.start < found.stop <= found.known_end:
        raise _another_range(response, wanted)
    return found


def _checked_range(response: WebResponse, wanted: BoundedRange) -> ContentRange:
    """Returns the announced range, proven to be as requested."""
    found = content_range(response, wanted)
    size = found.stop - found.start
    fits = found.start == wanted.start if wanted.start >= 0 else found.stop == found.known_end
    if not fits or size > wanted.size:
        raise _another_range(response, wanted)
    if size < wanted.size:
        if wanted.start >= 0 and found.stop < found.known_end:
            raise CheckpointIOError(f"the answer has only {size} bytes of {range_header(wanted)}")
        if wanted.stop is not None:
            raise RequestError(f"the file ends at byte {found.stop}", RequestKind.BEYOND_END)
    return found


def _another_range(response: WebResponse, wanted: BoundedRange) -> CheckpointIOError:
    text = response.headers["content-range"][:80]
    return CheckpointIOError(f"the answer has the Content-Range {text!r}, and not the requested {range_header(wanted)}")


def _check_whole(data: bytes | None, wanted: BoundedRange) -> None:
    """Checks the body of an answer with the whole file."""
    if wanted.start > 0 or (data is None and (wanted.start < 0 or wanted.stop is not None)):
        raise RequestError(f"the requested {range_header(wanted)} was ignored by server", RequestKind.IGNORED_RANGE)
    if data is not None and wanted.stop is not None and len(data) < wanted.size:
        raise RequestError(f"the file ends at byte {len(data)}", RequestKind.BEYOND_END)


def _version(response: WebResponse) -> Version:
    tag, modified = response.headers.get("etag", ""), response.headers.get("last-modified", "")
    strong, weak = ("", tag[2:]) if tag.startswith("W/") else (tag, "")
    return Version(strong.encode("latin-1"), weak.encode("latin-1"), modified.encode("latin-1"))
