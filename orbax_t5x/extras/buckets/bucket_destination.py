"""Destinations in buckets: `gs://` and `s3://`, written by TensorStore.

Buckets cannot rename, so a checkpoint appears there object by object, in an order in which none opens that is not whole
(`upload_order`). An object beside the destination, `.NAME.orbax-t5x-convert`, names the conversion that writes to it,
what it puts there and what it replaces: it keeps other conversions away, and after a kill it tells the next
conversion on this machine which objects are left of the killed one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
from collections import deque
from collections.abc import Collection, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorstore as ts

from orbax_t5x.errors import CheckpointError, CheckpointIOError, UnsupportedCheckpointError
from orbax_t5x.extras.buckets.buckets import BUCKETS, open_kvstore, request_error
from orbax_t5x.files.places import files_at, opening
from orbax_t5x.files.remote.responses import BeyondEndError, remote_error
from orbax_t5x.files.strict_json import parse_object
from orbax_t5x.operations.convert.destination import (
    Destination,
    check_apart_by_name,
    check_replaceable,
    reason_not_replaceable,
    require_overwrite,
    staging_directory,
)
from orbax_t5x.operations.convert.output_format import WriteOptions
from orbax_t5x.operations.convert.safetensors_layout import INDEX_NAME, SINGLE_NAME
from orbax_t5x.operations.convert.work_directory import WORK_SUFFIX, WorkDirectory
from orbax_t5x.readers import Checkpoint
from orbax_t5x.readers.orbax.metadata import METADATA_FILE
from orbax_t5x.readers.orbax.steps import COMMIT_FILE, MANIFEST_FILE, STEP_METADATA_FILE
from orbax_t5x.restoring.options import MEMORY_LIMIT_BYTES
from orbax_t5x.text.wording import plain

# Uploads under way at a time.
_UPLOADS_AT_ONCE = 32
# Far above the names of the files of any checkpoint. The object may be another writer's.
_MOST_MARKER_BYTES = 16 << 20
# A file is in memory three times while TensorStore sends it.
_COPIES = 3


class _Marker(NamedTuple):
    """Object beside a destination during a conversion to it.

    Attributes:
      owner: of the work directory of the conversion.
      host: where that is.
      names: of the objects that are the conversion's own.
      replaced: names of those that were there before, and that it may replace.
    """

    owner: str
    host: str
    names: Sequence[str] = ()
    replaced: Sequence[str] = ()


class BucketDestination(Destination):
    """A prefix of a bucket."""

    def __init__(self, url: str):
        parsed = BUCKETS.parse(BUCKETS.find(url))
        if not parsed.key:
            raise UnsupportedCheckpointError("a whole bucket is not written; name a directory in it", path=url)
        self.name: str = f"{parsed.base}/{parsed.key}"
        self.target: Path = staging_directory(self.name)
        self._limit = MEMORY_LIMIT_BYTES
        self._bucket = open_kvstore(parsed.base)
        self._key = parsed.key
        parent, slash, last = parsed.key.rpartition("/")
        self._marker_key = f"{parent}{slash}.{last}{WORK_SUFFIX}"

    def options(self, writing: WriteOptions) -> WriteOptions:
        """Bounds the size of safetensors files."""
        self._limit = MEMORY_LIMIT_BYTES if writing.memory_limit_bytes is None else writing.memory_limit_bytes
        return writing.with_files_of(max(1, self._limit // _COPIES))

    def check(self, writing: WriteOptions) -> None:
        marker, _ = self._read_marker()
        ours = set(marker.names).union(marker.replaced) if marker else ()
        # An object of the directory itself, without a name, is how a console shows that it is empty.
        names = {name.partition("/")[0] for name in self._list() if name and name not in ours}
        is_file = self._do("reading its status", self._bucket.read(self._key, byte_range=slice(0, 0))).state == "value"
        if names or is_file:
            with opening():
                reason = reason_not_replaceable(lambda: files_at(self.name), None if is_file else names, writing)
            check_replaceable(self.name, reason)
            require_overwrite(self.name, writing)

    def check_apart(self, source: Checkpoint) -> None:
        check_apart_by_name(self.name, source)

    @contextlib.contextmanager
    def claim(self, work: WorkDirectory) -> Generator[None, None, None]:
        mine = _Marker(work.owner(), socket.gethostname())
        found, generation = self._read_marker()
        if found is None:
            written = self._write_marker(mine, generation)
            if not written:
                found, _ = self._read_marker()
        if found is not None and found.owner != mine.owner:
            raise CheckpointIOError(
                f"another conversion, on {plain(found.host)}, writes to it, or was killed; if none runs, remove the "
                f"object {self._marker_key!r} from the bucket, and what it names",
                path=self.name,
                errno=errno.EBUSY,
            )
        # What a killed upload left in the bucket is known by its mark alone.
        work.keeps_owner = found is not None and bool(found.names or found.replaced)
        try:
            yield
        finally:
            if not work.keeps_owner:
                with contextlib.suppress(CheckpointIOError):
                    self._delete([self._marker_key])

    def publish(self, work: WorkDirectory, written: Path, writing: WriteOptions) -> None:
        if writing.format == "orbax":
            (written / COMMIT_FILE).write_text(f"Checkpoint commit was successful to {self.name}")
        files = {str(path.relative_to(written)): path for path in written.rglob("*") if path.is_file()}
        marker, _ = self._read_marker()
        if marker is None or marker.owner != work.owner():
            raise CheckpointIOError(f"the object {self._marker_key!r} was removed from the bucket", path=self.name)
        there = set(self._list())
        own = there.intersection(marker.names)
        replaced = there - own | there.intersection(marker.replaced)
        names = sorted(own.union(files) - replaced)
        # From here on the objects in the bucket belong to this work directory.
        work.keeps_owner = True
        self._write_marker(marker._replace(names=names, replaced=sorted(replaced)))
        for remove, send in upload_order(files, there):
            self._delete(self._object(name) for name in remove)
            self._send(send, files)
        work.keeps_owner = False

    # -- objects

    def _object(self, name: str) -> str:
        return f"{self._key}/{name}"

    def _list(self) -> list[str]:
        prefix = f"{self._key}/"
        found = self._do("listing it", self._bucket.list(ts.KvStore.KeyRange(prefix, f"{self._key}0")))
        return sorted(name.decode("utf-8", "surrogateescape").removeprefix(prefix) for name in found)

    def _send(self, names: Iterable[str], files: dict[str, Path]) -> None:
        """Writes objects, many at a time within the memory limit."""
        pending: deque[tuple[int, Any]] = deque()
        in_flight = 0
        try:
            for name in names:
                size = _COPIES * files[name].stat().st_size
                while pending and (in_flight + size > self._limit or len(pending) >= _UPLOADS_AT_ONCE):
                    sent, oldest = pending.popleft()
                    self._do("writing it", oldest)
                    in_flight -= sent
                in_flight += size
                pending.append((size, self._bucket.write(self._object(name), files[name].read_bytes())))
            for _, future in pending:
                self._do("writing it", future)
        finally:
            for _, future in pending:
                future.cancel()

    def _delete(self, keys: Iterable[str]) -> None:
        for future in [self._bucket.write(key, None) for key in keys]:
            self._do("removing what is replaced", future)

    # -- the marker

    def _read_marker(self) -> tuple[_Marker | None, bytes]:
        """Reads the marker, or None, with its generation."""
        doing = "reading the mark of a conversion"
        read = self._bucket.read(self._marker_key, byte_range=slice(_MOST_MARKER_BYTES, _MOST_MARKER_BYTES + 1))
        try:
            is_small = self._do(doing, read).state == "missing"
        except BeyondEndError:
            is_small = True
        if is_small:
            read = self._bucket.read(self._marker_key)
        read = self._do(doing, read)
        if read.state != "value":
            return None, read.stamp.generation
        try:
            fields = parse_object(read.value, self.name)
            texts = [fields["owner"], fields["host"], *fields["names"], *fields["replaced"]]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError("not text")
            marker = _Marker(fields["owner"], fields["host"], list(fields["names"]), list(fields["replaced"]))
        except (CheckpointError, KeyError, TypeError) as error:
            message = f"the object {self._marker_key!r} beside it is not of a conversion; it is left as it is"
            raise CheckpointIOError(message, path=self.name, errno=errno.EBUSY) from error
        return marker, read.stamp.generation

    def _write_marker(self, marker: _Marker, generation: bytes | None = None) -> bool:
        """Writes the marker, if its generation is still the newest."""
        data = json.dumps(marker._asdict(), indent=1).encode()
        stamp = self._do(
            "writing the mark of a conversion", self._bucket.write(self._marker_key, data, if_equal=generation)
        )
        return bool(stamp.generation)

    def _do(self, doing: str, future: Any) -> Any:
        try:
            return future.result()
        except ValueError as error:
            raise remote_error(request_error(error), doing, path=self.name) from error


# The files by which a directory is a checkpoint, in the order of writing. An item of Orbax with a manifest alone would
# be opened without its metadata; with metadata alone it is an error.
_NAMING = (STEP_METADATA_FILE, METADATA_FILE, MANIFEST_FILE, COMMIT_FILE, SINGLE_NAME, INDEX_NAME)


class Stage(NamedTuple):
    """Names to remove in order, then names to write together."""

    remove: Sequence[str]
    write: Sequence[str]


def is_naming(name: str) -> bool:
    """Reports whether a file makes its directory a checkpoint."""
    return name in _NAMING


def upload_order(new: Collection[str], there: Collection[str]) -> list[Stage]:
    """Orders the replacement of some files by others."""
    naming = [name for name in _NAMING if name in new]
    data = [name for name in new if not is_naming(name)]
    fresh = [name for name in data if name not in there]
    in_place = [name for name in data if name in there]
    old_naming = [name for name in reversed(_NAMING) if name in there]
    rest = [name for name in there if name not in new and not is_naming(name)]
    if not in_place and len(naming) == 1 and set(old_naming) <= set(naming):
        # One object is replaced at once.
        return [Stage([], fresh), Stage([], naming), Stage(rest, [])]
    hide = [Stage([name], []) for name in old_naming]
    return [Stage([], fresh), *hide, Stage([*rest, *in_place], in_place), *(Stage([], [name]) for name in naming)]
