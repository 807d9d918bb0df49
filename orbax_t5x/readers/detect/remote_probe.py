"""Probes a URL: stats the files that make a checkpoint, and lists where there is none of them."""

from __future__ import annotations

import os

from orbax_t5x.errors import CorruptCheckpointError
from orbax_t5x.storage import locations
from orbax_t5x.storage.remote.remote_store import RemoteStore


def kind_and_names(url: str) -> tuple[str, frozenset[str]]:
    """Returns the kind of a URL ("file", "directory" or "missing"), and the names in a directory."""
    kind = locations.remote_kind(url)
    if kind == "missing" and (refusal := locations.refused(url)) is not None:
        raise refusal
    return kind, locations.remote_names(url) if kind == "directory" else frozenset()


def head_and_tail(url: str, head_bytes: int, tail_bytes: int) -> tuple[bytes, bytes]:
    """Returns the first and the last bytes of a file."""
    directory, name = os.path.split(url)
    file = RemoteStore(directory).open_files().file(name)
    try:
        head = bytes(file.read(0, head_bytes))
    except CorruptCheckpointError:  # it is shorter
        head = bytes(file.read(0, file.size))
    size = file.known_size
    if size is None:
        return head, file.tail(tail_bytes)
    return head, bytes(file.read(max(0, size - tail_bytes), min(size, tail_bytes)))
