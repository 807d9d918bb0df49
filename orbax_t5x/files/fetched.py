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
from orbax_t5x.errors import CheckpointGoneError
from orbax_t5x.text.wording import size_text

if TYPE_CHECKING:
    from orbax_t5x.files.remote import RemoteStore

_logger = logging.getLogger(__name__)


def fetched_directory(store: RemoteStore, directory: str, names: Sequence[str]) -> str:
    """Fetches files of a directory, and returns the local directory that holds them.

    A file that is missing in the store is left out.

    Raises:
      CheckpointGoneError: A file changed, or vanished, while it was fetched.
      CheckpointIOError: The server or the disk failed.
    """
    keys = {name: f"{directory}/{name}" if directory else name for name in names}
    answers = run_jobs(lambda name=name: (name, store.open_again(keys[name], 1)) for name in keys)
    files = {name: file for name, file in sorted(answers, key=lambda answer: answer[0]) if file is not None}
    identity = repr([store.url(directory), [(name, file.size, file.mark) for name, file in files.items()]])
    place = os.path.join(_private_directory(), hashlib.sha256(identity.encode()).hexdigest()[:32])
    os.makedirs(place, exist_ok=True)
    with open(f"{place}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = {
            name: file.size for name, file in files.items() if not _has_size(os.path.join(place, name), file.size)
        }
        if missing:
            _logger.warning(
                "%s: the server redirects single files, so TensorStore cannot read them: %s are fetched whole into %s",
                *(store.url(directory), size_text(sum(missing.values())), place),
            )
            run_jobs(
                lambda name=name, size=size: _fetch(store, keys[name], size, os.path.join(place, name))
                for name, size in missing.items()
            )
    return place


def _private_directory() -> str:
    """Returns a temporary directory that belongs to this user."""
    path = os.path.join(tempfile.gettempdir(), f"orbax-t5x-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    return path if os.lstat(path).st_uid == os.getuid() else tempfile.mkdtemp(prefix="orbax-t5x-")


def _has_size(path: str, size: int) -> bool:
    return os.path.isfile(path) and os.path.getsize(path) == size


def _fetch(store: RemoteStore, key: str, size: int, path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    part = f"{path}.part"
    if (fetched := store.copy(key, part)) != size:
        message = f"changed while it was fetched: it had {size} bytes, and {fetched} came"
        raise CheckpointGoneError(message, path=store.url(key))
    os.replace(part, path)
