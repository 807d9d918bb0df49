"""Files with answers shared between a job's processes.

They are recorded for the other processes, or were given on the process that recorded them. Of a received answer inodes
and modification times may be of another disk: such files are compared by their sizes, until this process has seen them
itself.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from orbax_t5x.errors import CheckpointGoneError, CheckpointNotFoundError
from orbax_t5x.files.interface import ArrayDirectory, Look, Snapshot, Subdirectories
from orbax_t5x.files.local import LocalFiles
from orbax_t5x.files.local_file import File, FileIdentity, OpenFiles
from orbax_t5x.files.paths import Descriptor
from orbax_t5x.files.places import current_opening
from orbax_t5x.files.ranges import ANYONE, BoundedRange, ReadContext
from orbax_t5x.files.transcript import Transcript, Viewpoint, same
from orbax_t5x.files.tree_checks import described_files


def _look_as_data(look: Look) -> list[Any]:
    return [look.kind, look.head.decode("latin-1"), look.tail.decode("latin-1"), look.size, sorted(look.names)]


def _look_from_data(data: list[Any]) -> Look:
    kind, head, tail, size, names = data
    return Look(kind, head.encode("latin-1"), tail.encode("latin-1"), size, frozenset(names))


def _stat_as_data(found: os.stat_result) -> list[int]:
    return [found.st_mode, found.st_ino, found.st_size, found.st_mtime_ns]


def _stat_from_data(data: list[int]) -> os.stat_result:
    mode, inode, size, modified_ns = data
    return os.stat_result((mode, inode, 0, 1, 0, 0, size, 0, modified_ns // 10**9, 0), {"st_mtime_ns": modified_ns})


def _answered(ask: Callable[..., Any], pack: Callable[[Any], Any] = same, unpack: Callable[[Any], Any] = same) -> Any:
    """Makes a method whose answers are recorded, or were received."""

    @functools.wraps(ask)
    def method(files: RecordedFiles, *arguments: Any, **keywords: Any) -> Any:
        request = [ask.__name__, files.named, *arguments, *(keywords[name] for name in sorted(keywords))]
        return files.transcript.answer(request, partial(ask, files, *arguments, **keywords), pack, unpack)

    return method


class _TreeStamp(NamedTuple):
    """Files under some names.

    Attributes:
      digest: of all that is known of them.
      files, nbytes: how many there are, and how many bytes.
      sizes: digest of their names and sizes.
      viewpoint: of the stamp of another process, which may have another disk.
    """

    digest: str
    files: int
    nbytes: int
    sizes: str
    viewpoint: Viewpoint | None = None


class RecordedFiles(LocalFiles):
    """Local files of an opening that processes share.

    Attributes:
      transcript: of the opening.
    """

    def __init__(self, path: str | os.PathLike[str], transcript: Transcript):
        super().__init__(path, limits=current_opening().limits)
        self.transcript = transcript

    is_link = _answered(LocalFiles.is_link)
    is_directory = _answered(LocalFiles.is_directory)
    names = _answered(LocalFiles.names)
    subdirectories = _answered(LocalFiles.subdirectories, list, Subdirectories._make)
    exists = _answered(LocalFiles.exists)
    has_file = _answered(LocalFiles.has_file)
    look = _answered(LocalFiles.look, _look_as_data, _look_from_data)
    stat = _answered(LocalFiles.stat, _stat_as_data, _stat_from_data)
    locate = _answered(LocalFiles.locate)
    read_whole = _answered(LocalFiles.read_whole)
    read_end = _answered(LocalFiles.read_end)
    require_plain = _answered(LocalFiles.require_plain)
    entries = _answered(LocalFiles.entries)

    def file(self, name: str, *, leaf: str | None = None) -> RecordedFile:
        return RecordedFile(self, self._opened, name, self.stat(name, leaf=leaf), self.transcript)

    def read_range(self, name: str, wanted: BoundedRange, context: ReadContext = ANYONE) -> bytes | None:
        ask = partial(super().read_range, name, wanted, context)
        return self.transcript.answer(["range", self.named, name, *wanted[:3]], ask)

    def stamp(self, names: Sequence[str], metadata: str, *, leaf: str | None = None) -> _TreeStamp:
        request, look = ["tree", self.path, leaf, *names], partial(self._look, names, leaf)
        found = self.transcript.answer(request, look, list, _TreeStamp._make)
        return found._replace(viewpoint=self.transcript.viewpoint)

    def require_stamp(self, names: Sequence[str], metadata: str, stamp: Any, *, leaf: str | None = None) -> _TreeStamp:
        here = self._look(names, leaf)
        if stamp.viewpoint is not None and here[1:4] != stamp[1:4]:
            described = (f"{seen.files} files of {seen.nbytes} bytes" for seen in (here, stamp))
            message, fix = stamp.viewpoint.difference("what is stored there", *described)
            raise CheckpointGoneError(message, path=self.join(names[0]), leaf=leaf, fix=fix)
        if stamp.viewpoint is None and here != stamp:
            raise CheckpointGoneError("changed after the checkpoint was opened", path=self.join(names[0]), leaf=leaf)
        return here

    def _look(self, names: Sequence[str], leaf: str | None) -> _TreeStamp:
        digest, sizes = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
        files = nbytes = 0
        for found in described_files(self, names, leaf):
            directory, described = found
            digest.update(repr(found).encode("utf-8", "surrogateescape"))
            sizes.update(repr((directory, [one[:2] for one in described])).encode("utf-8", "surrogateescape"))
            files += len(described)
            nbytes += sum([one[1] for one in described])
        return _TreeStamp(digest.hexdigest(), files, nbytes, sizes.hexdigest())

    def array_directory(self, directory: str, metadata: str, *, limit: int, leaf: str | None = None) -> ArrayDirectory:
        def received(data: list[Any]) -> ArrayDirectory:
            path, identity, kvstore, text = data
            files = Snapshot(self, [directory], metadata, leaf=leaf)
            return ArrayDirectory(path, tuple(identity), kvstore, text.encode("latin-1"), files)

        return self.transcript.answer(
            ["array", self.named, directory, metadata, limit, leaf],
            partial(super().array_directory, directory, metadata, limit=limit, leaf=leaf),
            lambda found: [found.path, found.identity, found.kvstore, found.metadata.decode("latin-1")],
            received,
        )


class RecordedFile(File):
    """Regular file of an opening that processes share."""

    __slots__ = ("_transcript", "_viewpoint")

    def __init__(self, root: LocalFiles, opened: OpenFiles, name: str, found: os.stat_result, transcript: Transcript):
        super().__init__(root, opened, name, found, root.limits)
        self._transcript = transcript
        # Of a file that another process has measured, until this process has opened it.
        self._viewpoint: Viewpoint | None = transcript.viewpoint

    def read(self, offset: int, size: int, *, leaf: str | None = None) -> bytearray:
        ask = partial(super().read, offset, size, leaf=leaf)
        return self._transcript.answer(["bytes", self.path, offset, size], ask, unpack=bytearray)

    def check_unchanged(self, *, leaf: str | None = None) -> None:
        self._transcript.answer(["unchanged", self.path, leaf], partial(super().check_unchanged, leaf=leaf))

    def open(self, leaf: str | None) -> Descriptor:
        viewpoint, there = self._viewpoint, self._identity
        if viewpoint is None:
            return super().open(leaf)
        try:
            opened, found = self._root.open(self.name, leaf=leaf)
        except CheckpointNotFoundError as error:
            raise self._difference(viewpoint, "missing", leaf) from error
        own = FileIdentity.of(found)
        if own.size != there.size:
            raise self._difference(viewpoint, own.size, leaf)
        if own.inode == there.inode and own.modified_ns != there.modified_ns:
            raise CheckpointGoneError("changed after the checkpoint was opened", path=self.path, leaf=leaf)
        self._identity, self._viewpoint = own, None
        return opened

    def _difference(self, viewpoint: Viewpoint, here: object, leaf: str | None) -> CheckpointGoneError:
        message, fix = viewpoint.difference("its size in bytes", here, self._identity.size)
        return CheckpointGoneError(message, path=self.path, leaf=leaf, fix=fix)
