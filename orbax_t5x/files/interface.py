"""Interface of readers to bytes: a root's files and each file.

`LocalFiles` is a directory of this machine: reads are `preadv`. `RemoteFiles` is a prefix of a bucket, of a web server
or of a repository on the hub: files are objects, reads are requests for byte ranges. Readers know neither; `files_at`
makes them. A name is always relative, with '/', and never leaves the root; only the root itself, which the caller
named, may be a symlink to anywhere.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from orbax_t5x.files.limits import Limits


class ReadAhead(Protocol):
    """Announced reads in order; a remote store fetches several together."""

    def read_into(self, offset: int, buffers: Sequence[np.ndarray], *, leaf: str | None = None) -> None:
        """Fills buffers with a file's bytes from `offset` on.

        They are contiguous, of any dtype, and the bytes as they are; errors as `StoredFile.read`.
        """
        ...


class FilePlace(Protocol):
    """Place of bytes: a file, some of its ranges, or a root.

    Attributes:
      is_remote: whether reading waits for another machine.
    """

    is_remote: bool

    @property
    def path(self) -> str:
        """The path for messages; a URL if it is remote."""
        ...


class StoredBytes(FilePlace, ReadAhead, Protocol):
    """Bytes of a file, or of some ranges of it."""

    def ahead(self, ranges: Iterable[tuple[int, int]]) -> ReadAhead:
        """Announces reads of (offset, size).

        The result reads exactly these, in this order.
        """
        ...

    def check_unchanged(self, *, leaf: str | None = None) -> None:
        """Proves that the file is unchanged since the opening.

        This holds for the bytes read so far.

        Raises:
          CheckpointGoneError: it is not.
          ValueError: the checkpoint was closed.
        """
        ...


class StoredFile(StoredBytes, Protocol):
    """File below a root; reads may come from any thread."""

    @property
    def name(self) -> str:
        """The name, relative to the root."""
        ...

    @property
    def limits(self) -> Limits:
        """Limits of the files that it belongs to."""
        ...

    @property
    def size(self) -> int:
        """The size in bytes when the checkpoint was opened."""
        ...

    def read(self, offset: int, size: int, *, leaf: str | None = None) -> bytearray:
        """Reads `size` bytes from `offset`; the caller has compared `size` with limits.

        Raises:
          CorruptCheckpointError: the range is not inside the file.
          CheckpointIOError, CheckpointGoneError: the store failed, or the file is another one now.
          ValueError: the checkpoint was closed.
        """
        ...

    def require_open(self) -> None:
        """Raises ValueError once the checkpoint was closed."""
        ...


class ArrayDirectory(NamedTuple):
    """Directory of an array that TensorStore reads by itself.

    The bytes of its metadata file come with it.

    `identity` is equal for two names of the same directory; `files` are as they were before the metadata were read.
    """

    path: str
    identity: Hashable
    metadata: bytes
    files: Snapshot


class Look(NamedTuple):
    """Result of a look at a path.

    Attributes:
      kind: "file", "directory", "missing", "special" (a FIFO, a socket, a device), or "outside" (a link that leads out
        of the root).
      head, tail: the first and last bytes of a file.
      size: of a file.
      names: of the entries of a directory.
    """

    kind: str
    head: bytes = b""
    tail: bytes = b""
    size: int = 0
    names: frozenset[str] = frozenset()


class Subdirectories(NamedTuple):
    """Directories in a directory, and links that lead out."""

    inside: list[str]
    outside: list[str]


class Named(Protocol):
    """Bytes by name: files, or the values of a database."""

    @property
    def path(self) -> str:
        """The path for messages; a URL if it is remote."""
        ...

    def read_whole(self, name: str, *, limit: int, leaf: str | None = None, bound: str = "Limits.index_bytes") -> bytes:
        """Reads all bytes of a file or value, at most `limit`.

        `bound` is the name of that limit in errors.

        Raises:
          CheckpointNotFoundError: There is no such name.
          LimitExceededError: There are more bytes.
          CheckpointError: The store failed.
        """
        ...


class Files(FilePlace, Named, Protocol):
    """Files below a root, and the root itself.

    `path` is the root: a directory, resolved, or a URL without a slash at its end. Methods with a body are for stores
    with nothing to do.

    Attributes:
      named: the root as the caller named it, absolute: symlinks are not resolved.
      limits: on what files may claim.
      can_list: whether the store lists its files; web servers do not.
      limits: of the opening.
    """

    named: str
    limits: Limits
    can_list: bool
    limits: Limits

    # -- the root itself; the caller's symlinks are followed

    def is_link(self) -> bool:
        """Reports whether the root is a symlink; a URL is not."""
        return False

    def is_directory(self) -> bool:
        """Tests if the root is a directory, or has files below."""
        ...

    def names(self) -> list[str]:
        """Lists the root's names, sorted; remotely perhaps only checkpoints' marks."""
        ...

    def subdirectories(self) -> Subdirectories:
        """Lists the root's directories, links that stay inside included."""
        ...

    # -- names below

    def join(self, name: str) -> str:
        """Returns the path of a name, for messages."""
        ...

    def locate(self, name: str, *, leaf: str | None = None) -> str:
        """Returns the path of a file or directory inside the root.

        Locally it exists and is resolved.
        """
        ...

    def exists(self, name: str = "") -> bool:
        """Tests if a name exists, a dangling symlink included.

        Remotely, it tests for a file.
        """
        ...

    def has_file(self, name: str) -> bool:
        """Reports whether a name is a regular file; nothing is opened.

        A link that leads out of the root counts without being followed: opening it reports the problem.
        """
        ...

    def has_files(self, names: Sequence[str]) -> list[bool]:
        """Reports for each name whether the file exists inside the root."""
        ...

    def look(self, name: str = "", *, head: int, tail: int) -> Look:
        """Looks at the root, or a name below it.

        Of the name only a file is read. It never blocks.

        Args:
          name: below the root; "" for the root.
          head, tail: the most bytes to read of a file's beginning and end.

        Raises:
          CheckpointIOError: the store refused.
        """
        ...

    def read_end(self, name: str, size: int) -> bytes:
        """Reads the last `size` bytes of a file, or a shorter file."""
        ...

    def file(self, name: str, *, leaf: str | None = None) -> StoredFile:
        """Stats a file without reading it."""
        ...

    def require_open(self) -> None:
        """Raises ValueError after `close`."""
        ...

    def close(self) -> None:
        """Makes later reads of the files a ValueError."""
        ...

    # -- what TensorStore reads by itself

    def kvstore(self, name: str, metadata: str, files: Callable[[], Sequence[str]]) -> dict[str, Any]:
        """Returns TensorStore's spec of a directory.

        It may block: of a store that TensorStore cannot read, files are fetched whole first.

        Args:
          name: Directory, without a slash at its end; "" is the root.
          metadata: Name of a file in the directory.
          files: Returns the names of the files that will be read, relative to the directory.
        """
        ...

    def entries(self, name: str) -> dict[str, bool]:
        """Lists a directory: by name, whether it is a directory."""
        ...

    def require_plain(self, name: str, *, leaf: str | None = None) -> None:
        """Proves that a directory holds only plain files, any depth."""

    def stamp(self, names: Sequence[str], metadata: str, *, leaf: str | None = None) -> Any:
        """Returns data that change when files and directories do.

        Of a remote store only the file `metadata`, which describes them, is looked at.
        """
        ...

    def require_stamp(self, names: Sequence[str], metadata: str, stamp: Any, *, leaf: str | None = None) -> Any:
        """Compares files with their stamp at the opening.

        Returns the stamp for the next comparison.

        Raises:
          CheckpointGoneError: they changed.
        """
        ...

    def array_directory(self, directory: str, metadata: str, *, limit: int, leaf: str | None = None) -> ArrayDirectory:
        """Opens the directory of an array once.

        Returns all that opening the array needs.
        """
        ...


class Snapshot:
    """Files at the opening, and their comparison with it.

    Attributes:
      path: of the file that describes them.
    """

    def __init__(self, files: Files, names: Sequence[str], metadata: str, *, leaf: str | None = None):
        """Looks at files; see `Files.stamp`."""
        self._files = files
        self._names = tuple(names)
        self._metadata = metadata
        self._stamp = files.stamp(self._names, metadata, leaf=leaf)
        self._lock = threading.Lock()
        self._checked_in: weakref.ref[object] | None = None
        self.path: str = files.join(metadata)

    def was_checked(self, execution: object) -> bool:
        """Reports whether `check_once` has been called in this execution."""
        checked = self._checked_in
        return checked is not None and checked() is execution

    def check_once(self, execution: object, *, leaf: str | None = None) -> None:
        """Compares the files once in each execution; blocks."""
        with self._lock:
            if not self.was_checked(execution):
                self.check_unchanged(leaf=leaf)
                self._checked_in = weakref.ref(execution)

    def check_unchanged(self, *, leaf: str | None = None) -> None:
        """Compares the files; blocks.

        Raises:
          CheckpointGoneError: They changed.
        """
        self._stamp = self._files.require_stamp(self._names, self._metadata, self._stamp, leaf=leaf)
