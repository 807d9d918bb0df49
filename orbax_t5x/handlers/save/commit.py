"""The end of a save: commit futures, merge check, syncing.

The futures are Orbax's; the check is that Orbax merged the files.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from etils import epath

from orbax_t5x.concurrency import first_failure, run_jobs
from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.files.durability import sync_path
from orbax_t5x.files.paths import url_scheme
from orbax_t5x.handlers.save.cleanup import remove_failed
from orbax_t5x.handlers.write_errors import raise_as_checkpoint_error
from orbax_t5x.readers.orbax.steps import MANIFEST_FILE, PROCESS_PREFIX

# Files in the directory of an array of zarr, version 2 or 3.
_ARRAY_FILES = frozenset({".zarray", "zarr.json"})
# Leaves the interpreter for this long to Orbax, which opens its arrays then, and to the caller, whom `save` returns to.
_HEAD_START_SECS = 0.2


class GuardedCommit:
    """Future of Orbax's commit futures, with cleanup.

    If a future fails, it removes the written files and raises a typed error.

    `meanwhile` is called by the thread that waits while they run, `finish` once all have succeeded.
    """

    def __init__(self, futures: Sequence[Any], directory: epath.Path, remove: bool):
        """Initializes a commit.

        `remove`: this process removes the written files.
        """
        self.meanwhile: Callable[[], None] | None = None
        self.finish: Callable[[], None] | None = None
        self._futures = tuple(futures)
        self._directory = directory
        self._remove = remove

    def result(self, timeout: float | None = None) -> None:
        """Waits for the commit; see `ocp.future.Future`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            if self.meanwhile is not None:
                with contextlib.suppress(TimeoutError):
                    self._wait(time.monotonic() + _HEAD_START_SECS)
                self.meanwhile()
            self._wait(deadline)
            if self.finish is not None:
                self.finish()
        except TimeoutError:
            raise
        except BaseException as error:
            self.cancel()
            # Files that a writer of Orbax makes after the removal would stay.
            for future in self._futures:
                with contextlib.suppress(BaseException):
                    future.result()
            if self._remove:
                remove_failed(self._directory)
            raise_as_checkpoint_error(first_failure(error), self._directory)

    def _wait(self, deadline: float | None) -> None:
        for future in self._futures:
            future.result(timeout=None if deadline is None else max(0.001, deadline - time.monotonic()))

    def cancel(self) -> None:
        """Cancels the writes that still run."""
        for future in self._futures:
            with contextlib.suppress(Exception):
                future.cancel()


def check_merged(directory: epath.Path) -> None:
    """Raises if Orbax left the processes' files without an index.

    Orbax finds their directories by a glob pattern that begins with the item's own path, in which `[` is special: the
    save would end without an error and could not be read.
    """
    if "[" not in os.fspath(directory) or (directory / MANIFEST_FILE).exists():
        return
    if any(entry.name.startswith(PROCESS_PREFIX) for entry in directory.iterdir()):
        message = (
            "Orbax cannot save below a directory whose name holds '[': it does not find its own files again; choose "
            "another path, or pass use_ocdbt=False to the handler"
        )
        raise UnsupportedCheckpointError(message, path=os.fspath(directory))


def sync_tree(directory: Any) -> None:
    """Makes everything below a local directory durable.

    TensorStore syncs its own files; nothing else syncs Orbax's metadata files, ours, and the entries of directories.
    """
    root = os.fspath(directory)
    if url_scheme(root) is None:
        # Each sync waits for the device, 2 ms even where nothing is left to write; together most wait for one flush.
        run_jobs(partial(sync_path, path) for path in _unsynced(root, by_tensorstore=False))


def _unsynced(folder: str, *, by_tensorstore: bool) -> Iterator[str]:
    """Yields the directories and files to sync below a directory.

    TensorStore has not synced these files.
    """
    entries = list(os.scandir(folder))
    names = {entry.name for entry in entries}
    by_tensorstore |= not names.isdisjoint(_ARRAY_FILES)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            is_database = entry.name.startswith(PROCESS_PREFIX) or (entry.name == "d" and MANIFEST_FILE in names)
            yield from _unsynced(entry.path, by_tensorstore=by_tensorstore or is_database)
        elif not by_tensorstore:
            yield entry.path
    yield folder
