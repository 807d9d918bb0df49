"""A prefix of a bucket or a web server as a `Store`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

from orbax_t5x.errors import CheckpointGoneError, CheckpointNotFoundError, LimitExceededError
from orbax_t5x.storage.paths import split_name
from orbax_t5x.storage.remote.connection import Connection, FileStat, connect
from orbax_t5x.storage.remote.remote_file import OpenState, RemoteFile
from orbax_t5x.storage.remote.request_errors import remote_error
from orbax_t5x.storage.remote.urls import kvstore_spec
from orbax_t5x.storage.remote.values import DirectoryValues
from orbax_t5x.storage.store import ArrayDirectory, OpenFiles, Snapshot, Store
from orbax_t5x.storage.values import Values


class RemoteStore(Store):
    """The files below a URL; see `Store`. Made within a `remote_session`, and outlives it."""

    is_remote = True

    def __init__(self, url: str):
        place = connect(url)
        self._connection = place.connection
        self._key = place.key
        self.path: str = self._connection.url(place.key)

    @property
    def connection(self) -> Connection:
        """The server or bucket."""
        return self._connection

    def key(self, name: str, *, leaf: str | None = None) -> str:
        """Returns the key of a name.

        Raises:
          UnsafeCheckpointError: it leads out of the root.
        """
        parts = split_name(name, path=self.path, leaf=leaf) if name else []
        return "/".join([self._key, *parts] if self._key else parts)

    def join(self, name: str) -> str:
        return f"{self.path}/{name}" if name else self.path

    def locate(self, name: str, *, leaf: str | None = None) -> str:
        return self._connection.url(self.key(name, leaf=leaf))

    def open_files(self) -> RemoteFiles:
        return RemoteFiles(self)

    def read_whole(self, name: str, *, limit: int, leaf: str | None = None) -> bytes:
        answer = self._connection.whole([self.key(name, leaf=leaf)], limit)[0]
        if answer is None:
            raise CheckpointNotFoundError("no such file", path=self.join(name), leaf=leaf)
        if len(answer.data) > limit:  # it was read ahead within another limit
            raise LimitExceededError(f"more bytes than the limit of {limit} permits", path=self.join(name), leaf=leaf)
        return answer.data

    def stat_ahead(self, names: Sequence[str]) -> None:
        self._connection.stat([self.key(name) for name in names])

    def read_ahead(self, names: Sequence[str], *, limit: int) -> None:
        self._connection.whole([self.key(name) for name in names], limit, may_be_larger=False)

    def require_file(self, name: str) -> None:
        if not self.has_file(name):
            raise CheckpointNotFoundError("no such file", path=self.join(name))

    def has_file(self, name: str) -> bool:
        return self.has_files([name])[0]

    def has_files(self, names: Sequence[str]) -> list[bool]:
        return [stat is not None for stat in self._connection.stat([self.key(name) for name in names])]

    def kvstore(self, name: str) -> dict[str, Any] | Values:
        # Where processes share an opening, our own requests can be shared, and TensorStore's cannot.
        if not self._connection.can_list or self._connection.transcript is not None:
            return DirectoryValues(self._connection, self.key(name))
        spec = kvstore_spec(self._connection.base)
        return {**spec, "path": spec["path"] + self.key(name)}

    def array_files(self, directory: str, metadata: str, *, leaf: str | None = None) -> RemoteSnapshot:
        return RemoteSnapshot(self, f"{directory}/{metadata}" if directory else metadata, leaf)

    def array_directory(self, directory: str, metadata: str, *, limit: int, leaf: str | None = None) -> ArrayDirectory:
        path = self.locate(directory, leaf=leaf)
        files = self.array_files(directory, metadata, leaf=leaf)
        data = self.read_whole(f"{directory}/{metadata}", limit=limit, leaf=leaf)
        return ArrayDirectory(path, path, self.kvstore(directory), data, files)


class RemoteFiles(OpenFiles):
    """Files of a remote store that are open; implements `OpenFiles`."""

    def __init__(self, store: RemoteStore):
        self._store = store
        self._state = OpenState(store.path)

    def file(self, name: str, *, leaf: str | None = None) -> RemoteFile:
        key = self._store.key(name, leaf=leaf)
        found = self._store.connection.stat([key])[0]
        if found is None:
            path = self._store.join(name)
            if (refusal := self._store.connection.refused.get(key)) is not None:
                raise remote_error(refusal, "reading its status", path=path, leaf=leaf) from refusal
            raise CheckpointNotFoundError("no such file", path=path, leaf=leaf)
        return RemoteFile(self._store.connection, key, name, found.generation, self._state)

    def require_open(self) -> None:
        self._state.require_open()

    def close(self) -> None:
        self._state.closed = True


class RemoteSnapshot(Snapshot):
    """Snapshot by the generation of one metadata file, which stands for the files that it describes.

    The chunks have generations, too, but TensorStore reads them by itself, and a look at each would double the
    requests. A writer that changes chunks and leaves the metadata as it was is not noticed.
    """

    def __init__(self, store: RemoteStore, name: str, leaf: str | None):
        """Stats the file.

        Raises:
          CheckpointNotFoundError: it is not there.
        """
        self.clock = store.connection.clock
        self._connection = store.connection
        transcript = self._connection.transcript
        self._is_received = transcript is not None and transcript.is_received
        self.is_for_all = transcript is not None and not transcript.is_received
        self._key = store.key(name, leaf=leaf)
        self._stat = self._connection.stat([self._key])[0]
        self._lock = threading.Lock()
        self._checked_in: weakref.ref[object] | None = None
        if self._stat is None:
            raise CheckpointNotFoundError("no such file", path=store.join(name), leaf=leaf)

    def are_stored(self, names: Sequence[str]) -> list[bool]:
        directory = "".join(self._key.rpartition("/")[:2])
        return [found is not None for found in self._connection.stat_again([directory + name for name in names])]

    def was_checked(self, execution: object) -> bool:
        checked = self._checked_in
        return checked is not None and checked() is execution

    def check_unchanged(self, execution: object, *, leaf: str | None = None) -> None:
        if self._is_received:
            return  # the process that opened the checkpoint compares it, once for all
        with self._lock:
            if self.was_checked(execution):
                return
            found = self._connection.stat_again([self._key])[0]
            if found is None or _differ(found, self._stat):
                what = "vanished" if found is None else "changed"
                raise CheckpointGoneError(
                    f"{what} after the checkpoint was opened", path=self._connection.url(self._key), leaf=leaf
                )
            self._checked_in = weakref.ref(execution)


def _differ(found: FileStat, other: FileStat | None) -> bool:
    return other is None or bool(found.generation and other.generation and found.generation != other.generation)
