"""Interface of readers to files: a read-only store of files below one root.

There are two. `LocalStore` is a directory of this machine: names are walked with file descriptors, reads are `preadv`.
`RemoteStore` is a prefix of a bucket or of a web server: files are objects, reads are requests for byte ranges. Readers
know neither: they get files from a store, for small files whole, and for the key-value store that TensorStore is to
read chunked arrays from. A name is always relative, with '/', and never leaves the root.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from orbax_t5x.storage.response_clock import ResponseClock
from orbax_t5x.storage.values import Values


class ReadAhead(Protocol):
    """Reads in the order in which they were announced, so that a remote store may begin them early."""

    def read_into(self, offset: int, buffers: Sequence[np.ndarray], *, leaf: str | None = None) -> None:
        """Implements `StoredFile.read_into`."""
        ...


class StoredFile(Protocol):
    """One file of a store; reads may come from any thread."""

    @property
    def name(self) -> str:
        """The name, relative to the root."""
        ...

    @property
    def path(self) -> str:
        """The path for messages; a URL where the store is remote."""
        ...

    @property
    def size(self) -> int:
        """The size in bytes. For remote files this costs several requests, because TensorStore exposes no stat."""
        ...

    @property
    def known_size(self) -> int | None:
        """The size where it is known without a request."""
        ...

    def require_size(self, size: int) -> bool:
        """Reports whether the file has exactly this size."""
        ...

    def load(self, limit: int) -> None:
        """Announces that the whole file, of at most `limit` bytes, will be read: a remote store fetches it at once."""
        ...

    def read(self, offset: int, size: int, *, leaf: str | None = None) -> bytearray:
        """Reads `size` bytes from `offset`; the caller has compared `size` with limits.

        Raises:
          CorruptCheckpointError: the range is not inside the file.
          CheckpointIOError, CheckpointGoneError: the store failed, or the file is another one now.
          ValueError: the checkpoint was closed.
        """
        ...

    def read_into(self, offset: int, buffers: Sequence[np.ndarray], *, leaf: str | None = None) -> None:
        """Fills buffers (contiguous, of any dtype) with bytes as they are, from `offset`; errors as `read`."""
        ...

    def ahead(self, ranges: Iterable[tuple[int, int]], into: Iterable[Sequence[np.ndarray]] = ()) -> ReadAhead:
        """Announces reads of (offset, size); the result reads exactly these, in this order.

        Args:
          ranges: to read.
          into: the buffers that `read_into` will be given for each, which a remote store may fill before; none where
            they are not known yet, or hold other bytes until then.
        """
        ...

    def check_unchanged(self, *, leaf: str | None = None) -> None:
        """Proves that what was read so far is what the file held when the checkpoint was opened.

        Raises:
          CheckpointGoneError: it is not.
          ValueError: the checkpoint was closed.
        """
        ...

    def require_open(self) -> None:
        """Raises ValueError once the checkpoint was closed."""
        ...


class OpenFiles(Protocol):
    """The files of one checkpoint that are being read."""

    def file(self, name: str, *, leaf: str | None = None) -> StoredFile:
        """Stats a file without reading it."""
        ...

    def require_open(self) -> None:
        """Raises ValueError after `close`."""
        ...

    def close(self) -> None:
        """Makes later reads a ValueError."""
        ...


class Snapshot(Protocol):
    """Files that TensorStore reads by itself, remembered as they were when the checkpoint was opened.

    Attributes:
      clock: of the remote store that holds them; None where they are local.
      is_for_all: whether this process compares them for all processes of its job, also where it reads nothing of them.
    """

    clock: ResponseClock | None
    is_for_all: bool

    def are_stored(self, names: Sequence[str]) -> list[bool]:
        """Reports for each name whether it is a file in the directory of the array; blocks."""
        ...

    def was_checked(self, execution: object) -> bool:
        """Reports whether `check_unchanged` has been called in this execution."""
        ...

    def check_unchanged(self, execution: object, *, leaf: str | None = None) -> None:
        """Stats the files once in each execution; blocks."""
        ...


class ArrayDirectory(NamedTuple):
    """The directory of one array that TensorStore reads by itself, with the bytes of its metadata file.

    `identity` is equal for two names of the same directory; `kvstore` is that of `Store.kvstore`; `files` are as they
    were before the metadata were read.
    """

    path: str
    identity: Hashable
    kvstore: dict[str, Any] | Values
    metadata: bytes
    files: Snapshot


class Store(Protocol):
    """The files below one root.

    Attributes:
      path: the root: a directory, resolved, or a URL without a slash at its end.
      is_remote: whether it is a URL.
    """

    path: str
    is_remote: bool

    def join(self, name: str) -> str:
        """Returns the path of a name, for messages."""
        ...

    def locate(self, name: str, *, leaf: str | None = None) -> str:
        """Returns the path of a file or directory inside the root; locally it exists and is resolved."""
        ...

    def open_files(self) -> OpenFiles:
        """Makes a new set of open files."""
        ...

    def read_whole(self, name: str, *, limit: int, leaf: str | None = None) -> bytes:
        """Reads all bytes of a file, which must not hold more than `limit`; see `strict_json.read_small`."""
        ...

    def stat_ahead(self, names: Sequence[str]) -> None:
        """Announces files that will be statted, so that a remote store handles them in one batch."""
        ...

    def read_ahead(self, names: Sequence[str], *, limit: int) -> None:
        """Announces files that will be read whole, as `stat_ahead`."""
        ...

    def require_file(self, name: str) -> None:
        """Raises unless a file of this name exists inside the root."""
        ...

    def has_file(self, name: str) -> bool:
        """Reports whether a file of this name exists."""
        ...

    def has_files(self, names: Sequence[str]) -> list[bool]:
        """Reports for each name whether the file exists."""
        ...

    def kvstore(self, name: str) -> dict[str, Any] | Values:
        """Returns TensorStore's spec of a directory, without the slash at the path's end; "" for the root.

        Of a web server, which TensorStore does not read, the values by key.
        """
        ...

    def array_files(self, directory: str, metadata: str, *, leaf: str | None = None) -> Snapshot:
        """Returns the files of an array; of a remote one, only `metadata` is looked at."""
        ...

    def array_directory(self, directory: str, metadata: str, *, limit: int, leaf: str | None = None) -> ArrayDirectory:
        """Opens the directory of an array once and returns all that opening it needs; see `array_files`."""
        ...
