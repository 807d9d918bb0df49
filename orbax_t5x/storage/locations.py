"""Files of a path as callers give it, local or a URL: nothing else asks which of the two it is."""

from __future__ import annotations

import os

from orbax_t5x import on_demand
from orbax_t5x.storage.local_store import LocalFiles
from orbax_t5x.storage.opening import current_recorder
from orbax_t5x.storage.paths import url_scheme
from orbax_t5x.storage.store import Files

_remote_files = on_demand.function("orbax_t5x.storage.remote.remote_store", "RemoteFiles")


def files_at(path: str) -> Files:
    """Makes the files of a directory or file, local or behind a URL; looks at nothing local yet.

    Raises:
      UnsupportedCheckpointError: no store is behind the URL.
    """
    if url_scheme(path) is not None:
        return _remote_files(path)
    recorder = current_recorder()
    return LocalFiles(path) if recorder is None else recorder.local(path)


def open_directory_of(path: str) -> tuple[Files, str]:
    """Makes the files of the directory of a file that the caller named, whose symlink is followed; returns its name."""
    file = files_at(path)
    directory, name = os.path.split(file.path if file.is_link() else file.named)
    return files_at(directory), name
