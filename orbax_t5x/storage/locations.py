"""Paths as callers give them, local or URLs: stats and lists of a path before it becomes a store.

Every function takes both kinds. URLs are read through the connections of the session.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Iterable

from orbax_t5x.errors import CheckpointError, CheckpointNotFoundError
from orbax_t5x.storage.local_store import LocalStore
from orbax_t5x.storage.paths import io_error, url_scheme
from orbax_t5x.storage.remote.connection import RemoteLocation, connect
from orbax_t5x.storage.remote.remote_store import RemoteStore
from orbax_t5x.storage.remote.request_errors import is_denied, remote_error
from orbax_t5x.storage.store import Store
from orbax_t5x.storage.transcript import observed

# Files that make a directory a checkpoint. A web server does not list its directories, and listing a bucket
# lists every chunk of every array, so these are statted first, all in one batch.
KNOWN_NAMES = (
    "_METADATA",
    "_CHECKPOINT_METADATA",
    "manifest.ocdbt",
    "checkpoint",
    "model.safetensors",
    "model.safetensors.index.json",
    "flax_model.msgpack",
    "flax_model.msgpack.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def open_store(path: str) -> Store:
    """Opens the store of a directory, or of a URL."""
    return RemoteStore(path) if url_scheme(path) is not None else LocalStore(path)


def open_directory_of(path: str) -> tuple[Store, str]:
    """Opens the directory of a file that the caller named, and returns its name; the caller's symlink is followed."""
    directory, name = os.path.split(resolved(path) if is_link(path) else path)
    return open_store(directory), name


@functools.lru_cache(maxsize=1 << 10)  # each leaf asks for its file
def is_url(path: str) -> bool:
    """Reports whether a path is a URL."""
    return url_scheme(path) is not None


def absolute(path: str) -> str:
    """Returns a path without `.` and `..`; a URL without slashes at its end."""
    if url_scheme(path) is None:
        return os.path.abspath(path)
    place = connect(path)
    return place.connection.url(place.key)


def resolved(path: str) -> str:
    """Returns a path without symlinks; a URL as it is."""
    return absolute(path) if url_scheme(path) is not None else os.path.realpath(path)


def is_link(path: str) -> bool:
    """Reports whether a path is a symlink; a URL is none."""
    return url_scheme(path) is None and observed(["is link", path], lambda: os.path.islink(path))


def exists(path: str) -> bool:
    """Reports whether a path exists, a dangling symlink too; of a URL, whether it is a file."""
    if url_scheme(path) is not None:
        return is_remote_file(path)
    return observed(["exists", path], lambda: _exists_here(path))


def _exists_here(path: str) -> bool:
    try:
        os.lstat(path)
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise io_error(error, "reading its status", path=path) from error


def names(directory: str) -> list[str]:
    """Lists the names in a directory, sorted; of a remote one see `remote_names`."""
    if url_scheme(directory) is not None:
        return sorted(remote_names(directory))
    return observed(["names", directory], lambda: _names_here(directory))


def _names_here(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError as error:
        raise io_error(error, "listing it", path=directory) from error


def is_file(path: str) -> bool:
    """Reports whether a path that the caller gave is a file, or a link to one; nothing is opened."""
    if url_scheme(path) is not None:
        return is_remote_file(path)
    return observed(["is file", path], lambda: os.path.isfile(path))


def end_of_file(directory: str, name: str, size: int) -> bytes:
    """Reads the last `size` bytes of a file, or all of a shorter one."""
    if url_scheme(directory) is not None:
        store = RemoteStore(directory)
        data = store.connection.end_of(store.key(name), size)
        if data is None:
            raise CheckpointNotFoundError("no such file", path=store.join(name))
        return data
    return observed(["end", directory, name, size], lambda: _end_of_file_here(directory, name, size))


def _end_of_file_here(directory: str, name: str, size: int) -> bytes:
    root = LocalStore(directory)
    opened, found = root.open(name)
    try:
        return os.pread(opened.number, size, max(0, found.st_size - size))
    except OSError as error:
        raise io_error(error, "reading it", path=root.join(name)) from error
    finally:
        opened.close()


def is_directory(path: str) -> bool:
    """Reports whether a path is a directory, or a link to one; of a URL, whether files are below it."""
    if url_scheme(path) is not None:
        return remote_kind(path) == "directory"
    return observed(["is directory", path], lambda: os.path.isdir(path))


def is_remote_file(url: str) -> bool:
    """Reports whether a URL is a file."""
    place = connect(url)
    return bool(place.key) and place.connection.has_file(place.key)


def remote_kind(url: str) -> str:
    """Returns the kind of a URL: "file", "directory" or "missing".

    A directory is what has files below it. A bucket is listed where it has none of the files that make a checkpoint; on
    a web server that is unknown then.
    """
    place = connect(url)
    if known_names(place):
        return "directory"
    if not place.is_directory and is_remote_file(url):
        return "file"
    if place.connection.can_list and place.connection.names_below(place.key):
        return "directory"
    return "missing"


def known_names(place: RemoteLocation) -> list[str]:
    """Returns those of `KNOWN_NAMES` that are below a location; one batch of requests also stats the names that
    detection needs.
    """
    connection, key, _ = place
    inside = [f"{key}/{name}" if key else name for name in KNOWN_NAMES]
    beside = [key, f"{key}.index"] if key else []
    stats = connection.stat_small([*inside, *beside])
    return [name for name, found in zip(KNOWN_NAMES, stats, strict=False) if found is not None]


def remote_names(url: str) -> frozenset[str]:
    """Lists the names in a remote directory: those of `KNOWN_NAMES`, or all where there is none of these."""
    place = connect(url)
    if known := known_names(place):
        return frozenset(known)
    return frozenset(name.partition("/")[0] for name in place.connection.names_below(place.key))


def remote_subdirectories(url: str) -> list[str]:
    """Lists the directories in a remote directory."""
    place = connect(url)
    names = place.connection.names_below(place.key)
    return sorted({name.partition("/")[0] for name in names if "/" in name})


def stat_ahead(urls: Iterable[str]) -> None:
    """Stats several files, all of one server or bucket, in one batch, for later calls."""
    places = [connect(url) for url in urls]
    if places:
        places[0].connection.stat([place.key for place in places])


def has_parent(url: str) -> bool:
    """Reports whether a directory is below the root of its server or bucket."""
    return bool(connect(url).key)


def can_list(url: str) -> bool:
    """Reports whether the store of a URL lists its files."""
    return connect(url).connection.can_list


def has_known_names(url: str) -> bool:
    """Reports whether a remote directory has one of `KNOWN_NAMES`."""
    return bool(known_names(connect(url)))


def refused(url: str) -> CheckpointError | None:
    """Returns the error with which the store refused to report on a URL, or None.

    A redirect of the URL itself means nothing: web servers redirect from a directory's name to the same with a slash.
    """
    place = connect(url)
    for key, refusal in place.connection.refused.items():
        if is_denied(refusal) or key != place.key:
            return remote_error(refusal, "reading its status", path=url)
    return None
