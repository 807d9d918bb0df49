"""Files that are fetched whole, because TensorStore cannot read them where they are.

Web servers that redirect single files are followed by obstore, and not by TensorStore's http store. Such files go into
a temporary directory of the user, once a machine: processes wait for each other by a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING

from orbax_t5x.concurrency import run_jobs
from orbax_t5x.text.wording import size_text

if TYPE_CHECKING:
    from orbax_t5x.files.remote import RemoteStore

_logger = logging.getLogger(__name__)


def fetched_directory(store: RemoteStore, directory: str, names: Sequence[str]) -> str:
    """Fetches files of a directory, and returns the local directory that holds them.

    A file that is missing in the store is left out.
    """
    opened = {name: store.open(f"{directory}/{name}" if directory else name) for name in names}
    stored = {name: found for name, found in opened.items() if found is not None}
    identity = repr([store.url(directory), sorted((name, *found[:2]) for name, found in stored.items())])
    root = os.path.join(tempfile.gettempdir(), f"orbax-t5x-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(root, 0o700)
    if os.stat(root).st_uid != os.getuid():
        root = tempfile.mkdtemp(prefix="orbax-t5x-")
    place = os.path.join(root, hashlib.sha256(identity.encode()).hexdigest()[:32])
    os.makedirs(place, exist_ok=True)
    with open(f"{place}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [name for name, found in stored.items() if not _has_size(os.path.join(place, name), found.size)]
        if missing:
            _logger.warning(
                "%s: the server redirects single files, so TensorStore cannot read them: %s are fetched whole into %s",
                *(store.url(directory), size_text(sum(stored[name].size for name in missing)), place),
            )
            run_jobs(lambda name=name: _fetch(store, directory, name, place) for name in missing)
    return place


def _has_size(path: str, size: int) -> bool:
    return os.path.isfile(path) and os.path.getsize(path) == size


def _fetch(store: RemoteStore, directory: str, name: str, place: str) -> None:
    path = os.path.join(place, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(f"{path}.part", "wb") as file:
        for piece in store.stream(f"{directory}/{name}" if directory else name) or ():
            file.write(piece)
    os.replace(f"{path}.part", path)
