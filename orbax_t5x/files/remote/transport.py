"""Interface of servers and buckets that a `Connection` reads."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from orbax_t5x.files.ranges import BoundedRange
from orbax_t5x.files.remote.versions import Version


class Response(NamedTuple):
    """Bytes of a file.

    Attributes:
      data: the bytes.
      version: of the file.
      file_bytes: size of the file; None where the response does not name it.
      is_in_place: whether the bytes are in `BoundedRange.into`, and not in `data`.
    """

    data: bytes
    version: Version
    file_bytes: int | None = None
    is_in_place: bool = False


class PendingResponse(Protocol):
    """A request that was sent."""

    def result(self, timeout: float | None = None) -> Response | None:
        """Waits for the response.

        None: there is no such file.

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
    """The requests to a server or bucket.

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
        """Closes the connections that no request uses.

        Reading opens new connections.
        """
        ...


class ListedTransport(Transport, Protocol):
    """Requests to a bucket that lists its files."""

    def names(self, prefix: str, timeout: float) -> list[str]:
        """Lists the files with a prefix of their names.

        Raises:
          TimeoutError: there is no list after `timeout` seconds.
          ValueError: the request failed; the text begins with a status of absl.
        """
        ...
