"""Interface of servers and buckets that a `Connection` reads, and the buckets, which TensorStore reads."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, cast

import tensorstore as ts

from orbax_t5x.errors import CheckpointIOError

MAX_RETRIES = 8
FIRST_DELAY_SECS = 0.1
LONGEST_DELAY_SECS = 8.0
# Requests under way at a time. TensorStore's own limit of 32 makes a checkpoint of hundreds of small arrays wait for
# ten round trips where two would do; servers take hundreds.
REQUESTS_AT_ONCE = 128
# TensorStore's own waits between retries begin at one second and grow to half a minute, for half an hour: short
# outages would cost a full initial delay, and long ones would be waited for far too long.
_RETRIES = {"max_retries": MAX_RETRIES, "initial_delay": f"{FIRST_DELAY_SECS}s", "max_delay": f"{LONGEST_DELAY_SECS}s"}
_REQUESTS = {"limit": REQUESTS_AT_ONCE}
REQUEST_SETTINGS = {
    "s3_request_concurrency": _REQUESTS,
    "gcs_request_concurrency": _REQUESTS,
    "s3_request_retries": _RETRIES,
    "gcs_request_retries": _RETRIES,
}
"""For the context of everything that TensorStore reads from buckets."""

# Values that mean no generation: of a store without one, and of an emulator of Google's that sends it for stats and
# not for reads.
_NO_GENERATIONS = (b"\x10", b"\x00" + bytes(8), b"")


class Response(NamedTuple):
    """Bytes of a file, and the generation that they are of; that is empty where the server sends none."""

    data: bytes
    generation: bytes


class PendingResponse(Protocol):
    """A request that was sent."""

    def result(self, timeout: float | None = None) -> Response | None:
        """Waits for the response; None where there is no such file.

        Raises:
          TimeoutError: there is none yet.
          ValueError: the request failed; the text begins with a status of absl.
          CheckpointError: the response cannot be used.
        """
        ...

    def done(self) -> bool:
        """Reports whether the response came."""
        ...

    def cancel(self) -> None:
        """Gives the request up."""
        ...


class Transport(Protocol):
    """The requests to one server or bucket."""

    def read(self, key: str, start: int, stop: int | None, most: int) -> PendingResponse:
        """Requests bytes of a file.

        Args:
          key: of the file.
          start: of the first byte; below zero it counts from the end.
          stop: behind the last byte; equal to `start` for none, None for all to the end.
          most: bytes that the response may have.
        """
        ...


class Bucket:
    """A bucket, read by TensorStore.

    TensorStore keeps all of a response before it looks at it, so that `most` holds only for what an honest store sends.
    """

    def __init__(self, kvstore: Any):
        """Holds a key-value store of TensorStore, or what reads and lists like one."""
        self.kvstore: Any = kvstore

    def read(self, key: str, start: int, stop: int | None, most: int) -> PendingResponse:
        """Implements `Transport.read`."""
        return _BucketRead(self.kvstore.read(key, byte_range=slice(start, stop)), most)


class _BucketRead:
    def __init__(self, future: Any, most: int):
        self._future = future
        self._most = most

    def result(self, timeout: float | None = None) -> Response | None:
        found = cast("ts.KvStore.ReadResult", self._future.result(timeout=timeout))
        if found.state != "value":
            return None
        if len(found.value) > self._most:
            raise CheckpointIOError(f"the answer has more than the {self._most} bytes asked for")
        generation = found.stamp.generation
        return Response(found.value, b"" if generation in _NO_GENERATIONS else generation)

    def done(self) -> bool:
        return self._future.done()

    def cancel(self) -> None:
        self._future.cancel()
