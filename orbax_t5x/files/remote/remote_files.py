"""A prefix of a bucket or a web server as `Files`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LimitExceededError,
    for_caller,
)
from orbax_t5x.files.interface import ArrayDirectory, Files, Look, Snapshot, Subdirectories
from orbax_t5x.files.paths import split_name
from orbax_t5x.files.places import FILE_SUFFIXES, current_opening
from orbax_t5x.files.ranges import ANYONE, BoundedRange, ReadContext
from orbax_t5x.files.remote.remote_file import RemoteFile
from orbax_t5x.files.remote.responses import RequestKind, Version, remote_error
from orbax_t5x.files.remote.server import connect

# Files that make a directory a checkpoint. A web server does not list its directories, and listing a bucket
# lists every chunk of every array, so these are statted first, all in one batch.
KNOWN_NAMES = (
    *("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt", "checkpoint"),
    *("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"),
    *("flax_model.msgpack", "flax_model.msgpack.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.bin"),
)


class RemoteFiles(Files):
    """Files below a URL; see `Files`.

    They are made within an `opening`, and outlive it.

    Attributes:
      server: the server or bucket.
    """

    is_remote = True

    def __init__(self, url: str):
        """Sends no request."""
        self.server, parsed = connect(url)
        self.limits = current_opening().limits
        self.can_list = self.server.can_list
        self._key = parsed.key
        self._is_named_directory = parsed.is_directory
        self.named: str = self.server.url(parsed.key)
        self._is_closed = False
        transcript = self.server.transcript
        self.compares_for_all = transcript is not None and not transcript.is_received

    @property
    def is_near(self) -> bool:
        return self.server.clock.is_near

    @property
    def path(self) -> str:
        return self.named

    def key(self, name: str, *, leaf: str | None = None) -> str:
        """Returns the key of a name."""
        parts = split_name(name, path=self.path, leaf=leaf) if name else []
        return "/".join([self._key, *parts] if self._key else parts)

    # -- the root itself

    def is_directory(self) -> bool:
        return self._kind() == "directory"

    def _kind(self) -> str:
        """Returns "file", "directory" or "missing".

        A file decides before a directory is imagined, and its suffix does if it is not there. A directory is what has
        files below it. A bucket is listed if it has no file that makes a checkpoint; on a web server that is unknown
        then.
        """
        kinds = self.server.kinds
        if self._key not in kinds:
            kinds[self._key] = self._find_kind()
        return kinds[self._key]

    def _find_kind(self) -> str:
        is_file = bool(self._key) and not self._is_named_directory and self.server.measure(self._key)
        if is_file and not self._is_page():
            return "file"
        if not is_file and self._key.endswith(FILE_SUFFIXES) and not self._is_named_directory:
            return "missing"
        if self._known_names():
            return "directory"
        if is_file:
            return "file"
        return "directory" if self.can_list and self.server.names_below(self._key) else "missing"

    def _is_page(self) -> bool:
        """Tests if a web server may answer for a directory."""
        if self.can_list or self._key.endswith(FILE_SUFFIXES):
            return False
        try:
            return bytes(self._file(self._key, "").read(0, 16)).lstrip().startswith(b"<")
        except CorruptCheckpointError:  # it is shorter
            return False

    def _known_names(self) -> list[str]:
        """Returns the names of `KNOWN_NAMES` that exist."""
        beside = [self._key, f"{self._key}.index"] if self._key else []
        stats = self.server.stat_small([*map(self.key, KNOWN_NAMES), *beside])
        return [name for name, found in zip(KNOWN_NAMES, stats, strict=False) if found is not None]

    def names(self) -> list[str]:
        if not self.server.has_list and (known := self._known_names()):
            return sorted(known)
        return sorted({name.partition("/")[0] for name in self.server.names_below(self._key)})

    def subdirectories(self) -> Subdirectories:
        names = self.server.names_below(self._key)
        return Subdirectories(sorted({name.partition("/")[0] for name in names if "/" in name}), [])

    # -- names below

    def join(self, name: str) -> str:
        return f"{self.path}/{name}" if name else self.path

    def locate(self, name: str, *, leaf: str | None = None) -> str:
        return self.server.url(self.key(name, leaf=leaf))

    def exists(self, name: str = "") -> bool:
        key = self.key(name)
        return bool(key) and self.server.has_file(key)

    def has_file(self, name: str) -> bool:
        return self.exists(name)

    def has_files(self, names: Sequence[str]) -> list[bool]:
        return [stat is not None for stat in self.server.stat([self.key(name) for name in names])]

    def look(self, name: str = "", *, head: int, tail: int) -> Look:
        kind = "file" if name else self._kind()
        if kind == "missing" and (refusal := self._refusal()) is not None:
            raise refusal
        if kind == "directory":
            return Look(kind, names=frozenset(self.names()))
        if kind == "missing" or not self.exists(name):
            return Look("missing")
        file = self._file(self.key(name), name)
        try:
            first = bytes(file.read(0, head))
        except CorruptCheckpointError:  # it is shorter
            first = bytes(file.read(0, file.size))
        if not tail:
            return Look("file", first, b"", None if len(first) == head else len(first))
        size = file.known_size
        last = file.tail(tail) if size is None else bytes(file.read(max(0, size - tail), min(size, tail)))
        return Look("file", first, last, None if len(first) == head else len(first))

    def _refusal(self) -> CheckpointError | None:
        """Returns the store's refusal to report on the root, or None.

        A redirect of the URL itself means nothing: web servers redirect from a directory's name to the same with a
        slash.
        """
        for key, refusal in self.server.refused.items():
            if refusal.kind is RequestKind.DENIED or key != self._key:
                return remote_error(refusal, "reading its status", path=self.path)
        return None

    def read_whole(self, name: str, *, limit: int, leaf: str | None = None, bound: str = "Limits.index_bytes") -> bytes:
        answer = self.server.whole([self.key(name, leaf=leaf)], limit)[0]
        if answer is None:
            raise CheckpointNotFoundError("no such file", path=self.join(name), leaf=leaf)
        if len(answer.data) > limit:  # it was read ahead within another limit
            raise LimitExceededError(f"more bytes than the limit of {limit} permits", path=self.join(name), leaf=leaf)
        return answer.data

    def read_end(self, name: str, size: int) -> bytes:
        data = self.server.end_of(self.key(name), size)
        if data is None:
            raise CheckpointNotFoundError("no such file", path=self.join(name))
        return data

    def read_range(self, name: str, wanted: BoundedRange, context: ReadContext = ANYONE) -> bytes | None:
        return self.server.read(self.key(name, leaf=context.leaf), wanted, context)

    def file(self, name: str, *, leaf: str | None = None) -> RemoteFile:
        return self._file(self.key(name, leaf=leaf), name, leaf)

    def _file(self, key: str, name: str, leaf: str | None = None) -> RemoteFile:
        found = self.server.stat([key])[0]
        if found is None:
            path = self.server.url(key)
            if (refusal := self.server.refused.get(key)) is not None:
                raise remote_error(refusal, "reading its status", path=path, leaf=leaf) from refusal
            raise CheckpointNotFoundError("no such file", path=path, leaf=leaf)
        return RemoteFile(self.server, key, name, found, self.require_open, self.limits)

    def require_open(self) -> None:
        if self._is_closed:
            raise for_caller(ValueError(f"{self.path}: the checkpoint is closed; its leaves can no longer be read"))

    def close(self) -> None:
        self._is_closed = True

    # -- announcements

    def stat_ahead(self, names: Sequence[str], *, beside: Sequence[str] = ()) -> None:
        parent, slash, _ = self._key.rpartition("/")
        parents = [f"{parent}{slash}{name}" for name in beside] if self._key else []
        self.server.stat([*parents, *map(self.key, names)])

    def read_ahead(self, names: Sequence[str], *, limit: int) -> None:
        self.server.whole([self.key(name) for name in names], limit, may_be_larger=False)

    # -- what TensorStore reads by itself

    def kvstore(self, name: str) -> None:
        """Returns None: our own requests are bounded, and processes can share them."""

    def entries(self, name: str) -> dict[str, bool]:
        """Returns nothing: a list names every chunk below."""
        return {}

    def stamp(self, names: Sequence[str], metadata: str, *, leaf: str | None = None) -> Version:
        version = self.server.stat([self.key(metadata, leaf=leaf)])[0]
        if version is None:
            raise CheckpointNotFoundError("no such file", path=self.join(metadata), leaf=leaf)
        return version

    def require_stamp(self, names: Sequence[str], metadata: str, stamp: Any, *, leaf: str | None = None) -> Any:
        """Compares the version of the file `metadata`.

        A writer that changes chunks and leaves it as it was is not noticed.
        """
        if self.server.transcript is not None and not self.compares_for_all:
            return stamp  # the process that opened the checkpoint compares it, once for all
        found = self.server.stat_again([self.key(metadata, leaf=leaf)])[0]
        if found is None or not stamp.is_followed_by(found):
            what = "vanished" if found is None else "changed"
            raise CheckpointGoneError(f"{what} after the checkpoint was opened", path=self.join(metadata), leaf=leaf)
        return stamp

    def array_directory(self, directory: str, metadata: str, *, limit: int, leaf: str | None = None) -> ArrayDirectory:
        path = self.locate(directory, leaf=leaf) if directory else self.path
        name = f"{directory}/{metadata}" if directory else metadata
        files = Snapshot(self, [directory], name, leaf=leaf)
        data = self.read_whole(name, limit=limit, leaf=leaf)
        return ArrayDirectory(path, path, None, data, files)
