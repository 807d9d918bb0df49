"""Removes the files of failed and interrupted saves.

Orbax makes its temporary directories before it calls a handler, and leaves them when the handler fails, so that a full
disk stays full. Here a failed save removes what it wrote at once, and its directories too: those of a refused save once
Orbax has written, in the background, the only metadata that are for them. Where it may write more, because a save
failed later, they stay, empty, until the next save of that step replaces them or the process exits; an interrupted save
is removed at exit as well. Only directories that Orbax has marked as unfinished are touched.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from orbax_t5x.files.paths import url_scheme
from orbax_t5x.handlers.orbax_names import TEMPORARY_MARK, CommitFuture
from orbax_t5x.readers.orbax.steps import COMMIT_FILE, STEP_METADATA_FILE

# Orbax's own files in a step, of version 0 or 1.
_STEP_FILES = frozenset({STEP_METADATA_FILE, "orbax.checkpoint"})
_COMMIT_TIME = "commit_timestamp_nsecs"
# Orbax makes directories in the background, in milliseconds; after this long they are not coming.
_CREATION_TIMEOUT_SECS = 20
# It writes metadata into them in the background, right after; a directory whose metadata are later stays.
_METADATA_TIMEOUT_SECS = 2.0
_POLL_SECS = 0.002

# Saves that have begun and not succeeded, by directory.
_unfinished: dict[str, _UnfinishedSave] = {}


class _UnfinishedSave(NamedTuple):
    """Save that has begun and not succeeded.

    A fork leaves its parent's saves alone. Of one in the background, Orbax may write metadata at any time, and raises
    an error where it cannot.
    """

    process: int
    in_background: bool


def note_begun(directory: Any, *, in_background: bool) -> None:
    """Notes the begin of a save into a directory.

    Unless it succeeds, it is removed when the process exits.
    """
    atexit.unregister(_remove_all)
    atexit.register(_remove_all)
    _unfinished[os.fspath(directory)] = _UnfinishedSave(os.getpid(), in_background)


def note_ended(directory: Any) -> None:
    """Notes that a save has succeeded."""
    _unfinished.pop(os.fspath(directory), None)


def _remove_all() -> None:
    for directory in [one for one, save in _unfinished.items() if save.process == os.getpid()]:
        _remove(directory, with_directories=True)


@contextlib.contextmanager
def removed_on_interrupt(directory: Any) -> Iterator[None]:
    """Removes a save's files if an interrupt ends the block.

    Orbax hands over leaves in asyncio tasks. An interrupt in one of them stops the event loop, and `async_save` does
    not learn of it. Orbax's threads that wait for the directory would then keep the process alive for minutes if it
    exited before the directory is made.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        save = _unfinished.get(os.fspath(directory))
        if save is not None and save.process == os.getpid():
            remove_failed_once_made(directory)
        raise


def remove_failed_once_made(directory: Any) -> None:
    """Calls `remove_failed` after Orbax has made the directory."""

    async def removal() -> None:
        remove_failed(directory)

    coroutine = removal()
    # Orbax replaces what could not be removed; the error of the save matters more.
    with contextlib.suppress(Exception):
        CommitFuture(coroutine, name="orbax_t5x_cleanup").result(timeout=_CREATION_TIMEOUT_SECS)
    # One that never began, because no directory came, would complain when it is collected.
    with contextlib.suppress(ValueError):
        coroutine.close()


def remove_refused(directory: Any) -> None:
    """Removes the directories of a save of which nothing is written."""
    remove_failed_once_made(directory)
    path = Path(os.fspath(directory))
    end = time.monotonic() + _METADATA_TIMEOUT_SECS
    # Orbax's own error, for a directory that is gone when it writes, would be raised by the next save.
    while path.is_dir() and time.monotonic() < end:
        if any((folder / STEP_METADATA_FILE).exists() for folder in (path, path.parent)):
            _remove(directory, with_directories=True)
            return
        time.sleep(_POLL_SECS)


def remove_failed(directory: Any) -> None:
    """Removes the files of a failed local save.

    The directory is removed, too, unless Orbax still uses it.
    """
    save = _unfinished.get(os.fspath(directory))
    in_background = save is not None and save.in_background
    if in_background:
        _await_mark(os.fspath(directory))
    _remove(directory, with_directories=not in_background)


def _await_mark(directory: str) -> None:
    """Waits until Orbax has written its metadata in the background."""
    path, end = Path(directory), time.monotonic() + _METADATA_TIMEOUT_SECS
    while url_scheme(directory) is None and path.is_dir() and not (path / COMMIT_FILE).exists():
        if _is_unfinished(path) or time.monotonic() > end:
            return
        time.sleep(_POLL_SECS)


def _remove(directory: Any, *, with_directories: bool) -> None:
    text = os.fspath(directory)
    path = Path(text)
    if url_scheme(text) is not None or not path.is_dir() or not _is_unfinished(path):
        return
    with contextlib.suppress(OSError):
        for entry in [one for one in path.iterdir() if one.name not in _STEP_FILES]:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        for folder in (path, path.parent) if with_directories else ():
            if _is_unfinished(folder) and {entry.name for entry in folder.iterdir()} <= _STEP_FILES:
                shutil.rmtree(folder, ignore_errors=True)


def _is_unfinished(path: Path) -> bool:
    """Tests for Orbax's unfinished directories.

    They are temporary directories, and steps that Orbax writes in place, with their items.
    """
    if TEMPORARY_MARK in path.name + path.parent.name:
        return True
    return not (path / COMMIT_FILE).exists() and any(map(_lacks_commit_time, (path, path.parent)))


def _lacks_commit_time(step: Path) -> bool:
    try:
        metadata = json.loads((step / STEP_METADATA_FILE).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(metadata, dict) and metadata.get(_COMMIT_TIME) is None and not (step / COMMIT_FILE).exists()
