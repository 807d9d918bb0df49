"""Probes a path as far as deciding its format needs: names and a few bytes, read once, without blocking.

A `PathProbe` is plain data; the recognisers of the formats are functions of it, and reach the file system only through
this module. The path itself is trusted. Names below it are probed through the root's resolver: a link
that leads out is never followed, a FIFO or a device never opened.
"""

from __future__ import annotations

import dataclasses
import os
import re
import stat
from typing import Any, NamedTuple

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointIOError,
    CheckpointNotFoundError,
    UnsafeCheckpointError,
)
from orbax_t5x.readers.detect.remote_probe import head_and_tail, kind_and_names
from orbax_t5x.storage.descriptor import Descriptor
from orbax_t5x.storage.locations import absolute, exists, is_url, remote_subdirectories
from orbax_t5x.storage.paths import Root, io_error
from orbax_t5x.storage.transcript import observed

# Enough for every magic number, and for the first keys of a msgpack map.
_HEAD_BYTES = 256
# The last bytes of an SSTable are its magic number, those of an old T5X file its version.
_TAIL_BYTES = 16
_SSTABLE_MAGIC = bytes.fromhex("57fb808b247547db")
# A map of the key `version`, a small number, and the key `optimizer`; that number at the end; a map of a state's parts.
_T5X_HEAD = re.compile(rb"[\x82-\x8f]\xa7version[\x00-\x7f]\xa9optimizer", re.DOTALL)
_T5X_TAIL = re.compile(rb"\xa7version[\x00-\x7f]\Z", re.DOTALL)
_TRAIN_STATE_HEAD = re.compile(rb"[\x81-\x83](?:\xa6target|\xa5state|\xadflax_mutables)", re.DOTALL)
_OPEN_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | getattr(os, "O_NOCTTY", 0)


@dataclasses.dataclass(frozen=True)
class PathProbe:
    """Result of a probe of a path.

    Attributes:
      path: absolute, symlinks as the caller gave them.
      kind: "file", "directory", "missing", "special" (a FIFO, a socket, a device), or "outside" (a link that leads out
        of the directory it was looked for in).
      head, tail: the first and last bytes of a file.
      size: of a file; None where a remote store does not report it.
      names: what a directory holds.
    """

    path: str
    kind: str
    head: bytes = b""
    tail: bytes = b""
    size: int | None = 0
    names: frozenset[str] = frozenset()

    def inside(self, name: str) -> PathProbe:
        """Probes a name in this directory; of anything but a file, only the kind."""
        path = os.path.join(self.path, name)
        if is_url(path):
            return _probe_remote_file(path)
        return observed(["probe", self.path, name], lambda: self._inside_here(name), _as_data, _from_data)

    def _inside_here(self, name: str) -> PathProbe:
        path = os.path.join(self.path, name)
        try:
            opened, found = Root(self.path).open(name)
        except CheckpointIOError:
            raise
        except CheckpointNotFoundError:
            return PathProbe(path, "missing")
        except UnsafeCheckpointError:
            return PathProbe(path, "outside")
        except CheckpointError:
            return PathProbe(path, "special")
        return _probe_file(path, opened, found)

    def with_suffix(self, suffix: str) -> list[str]:
        """Returns the names in this directory that end with a suffix, sorted."""
        return sorted(name for name in self.names if name.endswith(suffix))


def is_file(directory: str, name: str) -> bool:
    """Reports whether a name in a directory is a regular file; nothing is opened.

    A link that leads out of the directory counts without being followed: opening it reports the problem.
    """
    path = os.path.join(directory, name)
    if is_url(path):
        return exists(path)
    return observed(["is plain file", directory, name], lambda: _is_file_here(directory, name))


def _is_file_here(directory: str, name: str) -> bool:
    path = os.path.join(directory, name)
    try:
        mode = os.lstat(path).st_mode
        if not stat.S_ISLNK(mode):
            return stat.S_ISREG(mode)
        Root(directory).stat(name)
        return True
    except CheckpointIOError:
        raise
    except UnsafeCheckpointError:
        return True
    except (FileNotFoundError, NotADirectoryError, CheckpointError, ValueError):  # ValueError: a NUL in the path
        return False
    except OSError as error:
        raise io_error(error, "reading its status", path=path) from error


class Subdirectories(NamedTuple):
    """The names of what may be directories in a directory, and of links that lead out, to whatever it is."""

    inside: list[str]
    outside: list[str]


def subdirectories(directory: str) -> Subdirectories:
    """Lists a directory; links in it are followed as far as they stay inside."""
    if is_url(directory):
        return Subdirectories(remote_subdirectories(directory), [])
    request = ["subdirectories", directory]
    return observed(request, lambda: _subdirectories_here(directory), list, Subdirectories._make)


def _subdirectories_here(directory: str) -> Subdirectories:
    found = Subdirectories([], [])
    links: list[str] = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_symlink():
                    links.append(entry.name)
                elif entry.is_dir(follow_symlinks=False):
                    found.inside.append(entry.name)
    except FileNotFoundError:
        raise CheckpointGoneError("the directory vanished while it was listed", path=directory) from None
    except OSError as error:
        raise io_error(error, "listing it", path=directory) from error
    root = Root(directory)
    for name in links:
        try:
            if os.path.isdir(root.locate(name)):
                found.inside.append(name)
        except UnsafeCheckpointError:
            found.outside.append(name)
        except CheckpointError:  # a link to nothing, or in a circle
            continue
    return found


def probe_path(path: str) -> PathProbe:
    """Probes a path; what the operating system or the store refuses to report is a CheckpointIOError."""
    if is_url(path):
        return _probe_url(path)
    return observed(["probe", path], lambda: _probe_here(path), _as_data, _from_data)


def _as_data(probe: PathProbe) -> list[Any]:
    head, tail = (part.decode("latin-1") for part in (probe.head, probe.tail))
    return [probe.path, probe.kind, head, tail, probe.size, sorted(probe.names)]


def _from_data(data: list[Any]) -> PathProbe:
    path, kind, head, tail, size, names = data
    return PathProbe(path, kind, head.encode("latin-1"), tail.encode("latin-1"), size, frozenset(names))


def _probe_here(path: str) -> PathProbe:
    try:
        path = os.path.abspath(path)
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the path
        return PathProbe(path, "missing")
    except OSError as error:
        raise io_error(error, "reading its status", path=path) from error
    try:
        if stat.S_ISDIR(mode):
            return PathProbe(path, "directory", names=frozenset(os.listdir(path)))
        if not stat.S_ISREG(mode):
            return PathProbe(path, "special")
        opened = Descriptor(path, _OPEN_FLAGS)
        return _probe_file(path, opened, os.fstat(opened.number))
    except OSError as error:
        if isinstance(error, CheckpointIOError):
            raise
        raise io_error(error, "reading its status", path=path) from error


def _probe_url(url: str) -> PathProbe:
    kind, names = kind_and_names(url)
    return _probe_remote_file(absolute(url)) if kind == "file" else PathProbe(absolute(url), kind, names=names)


def _probe_remote_file(url: str) -> PathProbe:
    if not exists(url):
        return PathProbe(url, "missing")
    head, tail = head_and_tail(url, _HEAD_BYTES, _TAIL_BYTES)
    return PathProbe(url, "file", head=head, tail=tail, size=None if len(head) == _HEAD_BYTES else len(head))


def _probe_file(path: str, opened: Descriptor, found: os.stat_result) -> PathProbe:
    """Reads the first and last bytes of an open file, and closes it."""
    try:
        if not stat.S_ISREG(found.st_mode):
            return PathProbe(path, "special")
        head = os.pread(opened.number, _HEAD_BYTES, 0)
        tail = os.pread(opened.number, _TAIL_BYTES, max(0, found.st_size - _TAIL_BYTES))
        return PathProbe(path, "file", head=head, tail=tail, size=found.st_size)
    except OSError as error:
        raise io_error(error, "reading its first bytes", path=path) from error
    finally:
        opened.close()


def first_zip_member(probe: PathProbe) -> bytes | None:
    """Returns the name of a ZIP archive's first member, as far as it was read; None for other files."""
    if probe.kind != "file" or not probe.head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return None
    size = int.from_bytes(probe.head[26:28], "little") if probe.head.startswith(b"PK\x03") else 0
    return probe.head[30 : 30 + size]


def is_sstable(probe: PathProbe) -> bool:
    """Reports whether a file ends as an SSTable does: the index of a bundle, or a TensorFlow 1 (V1) checkpoint."""
    return probe.kind == "file" and probe.tail.endswith(_SSTABLE_MAGIC)


def is_bundle_state(probe: PathProbe) -> bool:
    """Reports whether a file is the text in which TensorFlow names the newest bundle of a directory."""
    return probe.kind == "file" and b"model_checkpoint_path:" in probe.head


def is_msgpack_map(probe: PathProbe) -> bool:
    """Reports whether a file begins as a msgpack map with text keys does."""
    if probe.kind != "file" or len(probe.head) < 2:
        return False
    first = probe.head[0]
    size = 1 if 0x81 <= first <= 0x8F else {0xDE: 3, 0xDF: 5}.get(first, 0)
    key = probe.head[size] if 0 < size < len(probe.head) else 0
    return 0xA0 <= key <= 0xBF or key in (0xD9, 0xDA)


def is_t5x_msgpack(probe: PathProbe) -> bool:
    """Reports whether a file is a msgpack map of `version` and `optimizer`, in the order of newer or older T5X."""
    return is_msgpack_map(probe) and (
        _T5X_HEAD.match(probe.head) is not None
        or (probe.head.startswith(b"\x82\xa9optimizer") and _T5X_TAIL.search(probe.tail) is not None)
    )


def is_t5x_state(probe: PathProbe) -> bool:
    """Reports whether a file called `checkpoint` is T5X's: with its version, or a map of a train state's parts."""
    return is_t5x_msgpack(probe) or (is_msgpack_map(probe) and _TRAIN_STATE_HEAD.match(probe.head) is not None)
