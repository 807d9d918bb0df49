"""Recorded or replayed requests of an opening.

They are replayed from the answers to another process.
"""

from __future__ import annotations

import concurrent.futures
from typing import Any

from orbax_t5x.errors import CheckpointError
from orbax_t5x.files.ranges import BoundedRange
from orbax_t5x.files.remote.transport import ListedTransport, PendingResponse, Response, Transport, Version
from orbax_t5x.files.transcript import Transcript


class RecordedTransport:
    """Server with recorded or replayed answers.

    They are replayed from a transcript; implements `Transport`.
    """

    def __init__(self, server: Transport, base: str, transcript: Transcript):
        """Wraps a server with the URL `base`."""
        self.is_bounded = server.is_bounded
        self._server = server
        self._base = base
        self._transcript = transcript

    def read(self, key: str, wanted: BoundedRange, *, is_awaited: bool = False) -> PendingResponse:
        """Implements `Transport.read`."""
        request = ("read", self._base, key, wanted.start, wanted.stop)
        found = self._transcript.find(request)
        if found is not None and len(found.data) <= wanted.most:
            return _answered(found.value, found.data)
        if self._transcript.is_received or self._transcript.is_closed:
            return self._server.read(key, wanted, is_awaited=is_awaited)
        pending = self._server.read(key, wanted._replace(into=None), is_awaited=is_awaited)
        return _Recorded(pending, request, self._transcript)

    def close_idle(self) -> None:
        """Implements `Transport.close_idle`."""
        self._server.close_idle()


class RecordedBucket(RecordedTransport):
    """Bucket like `RecordedTransport`; implements `ListedTransport`."""

    def __init__(self, bucket: ListedTransport, base: str, transcript: Transcript):
        """Wraps a bucket with the URL `base`."""
        super().__init__(bucket, base, transcript)
        self._bucket = bucket

    def names(self, prefix: str, timeout: float) -> list[str]:
        """Implements `ListedTransport.names`."""
        return self._transcript.answer(["names", self._base, prefix], lambda: self._bucket.names(prefix, timeout))


class _Recorded:
    """Request that records its response; implements `PendingResponse`."""

    def __init__(self, pending: PendingResponse, request: tuple[Any, ...], transcript: Transcript):
        self._pending = pending
        self._request = request
        self._transcript = transcript

    def result(self, timeout: float | None = None) -> Response | None:
        try:
            answer = self._pending.result(timeout)
        except (TimeoutError, CheckpointError):
            raise
        except ValueError as error:
            self._transcript.add(self._request, ["failed", str(error)])
            raise
        if answer is None:
            self._transcript.add(self._request, ["none"])
        else:
            marks = [mark.hex() for mark in answer.version]
            self._transcript.add(self._request, ["found", marks, answer.file_bytes], answer.data)
        return answer

    def done(self) -> bool:
        return self._pending.done()

    def cancel(self) -> object:
        return self._pending.cancel()


def _answered(value: list[Any], data: bytes) -> concurrent.futures.Future[Response | None]:
    """Returns the response to a request that need not be sent."""
    future: concurrent.futures.Future[Response | None] = concurrent.futures.Future()
    kind = value[0]
    if kind == "failed":
        future.set_exception(ValueError(value[1]))
    else:
        version = Version(*map(bytes.fromhex, value[1])) if kind == "found" else None
        future.set_result(None if version is None else Response(data, version, value[2]))
    return future
