"""Interface of servers and buckets that a `Connection` reads, and the buckets, which TensorStore reads."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, cast

import tensorstore as ts

from orbax_t5x.errors import CheckpointIOError
from orbax_t5x.storage.values import BoundedRange

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
    """Bytes of a file.

    Attributes:
      data: the bytes.
      generation: of the file; empty where the server sends none.
      file_bytes: size of the file; None where the response does not name it.
      is_in_place: whether the bytes are in `BoundedRange.into`, and not in `data`.
    """

    data: bytes
    generation: bytes
    file_bytes: int | None = None
    is_in_place: bool = False


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

    def cancel(self) -> object:
        """Gives the request up."""
        ...


class Transport(Protocol):
    """The requests to one server or bucket.

    Attributes:
      is_bounded: whether a response can hold no more than was asked for, and names the size of its file.
    """

    is_bounded: bool

    def read(self, key: str, wanted: BoundedRange, *, is_awaited: bool = False) -> PendingResponse:
        """Requests bytes of a file.

        Args:
          key: of the file.
          wanted: the bytes.
          is_awaited: whether the caller waits for the response at once; its thread may then send the request.
        """
        ...

    def close_idle(self) -> None:
        """Closes the connections that no request uses; reading opens new ones."""
        ...


class ListedTransport(Transport, Protocol):
    """The requests to a bucket, which has a list of its files."""

    def names(self, prefix: str, timeout: float) -> list[str]:
        """Lists the files whose names begin with a prefix.

        Raises:
          TimeoutError: there is no list after `timeout` seconds.
          ValueError: the request failed; the text begins with a status of absl.
        """
        ...


class Bucket:
    """A bucket, read by TensorStore.

    TensorStore keeps all of a response before it looks at it, so that the bound holds only for what an honest store
    sends.
    """

    is_bounded: bool = False

    def __init__(self, kvstore: ts.KvStore):
        """Holds a key-value store of TensorStore."""
        self._kvstore = kvstore

    def read(self, key: str, wanted: BoundedRange, *, is_awaited: bool = False) -> PendingResponse:
        """Implements `Transport.read`."""
        return _BucketRead(self._kvstore.read(key, byte_range=slice(wanted.start, wanted.stop)), wanted.most)

    def names(self, prefix: str, timeout: float) -> list[str]:
        """Implements `ListedTransport.names`."""
        keys = ts.KvStore.KeyRange(prefix, prefix[:-1] + "0") if prefix else None  # all below a directory
        listing: Any = self._kvstore.list(keys)
        try:
            # A list comes in pages, and TensorStore does not report single ones.
            return [name.decode("utf-8", "replace") for name in listing.result(timeout=timeout)]
        except TimeoutError:
            listing.cancel()
            raise

    def close_idle(self) -> None:
        """Does nothing: TensorStore closes its connections by itself."""


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
