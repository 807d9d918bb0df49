"""What is left of a save that failed: nothing, and one typed error.

Orbax makes its temporary directories before it calls a handler, and leaves them behind when the handler fails, until
a manager is made anew on that root. A full disk then stays full. So a failed save here takes its own item directory
away, and the step's with it where no other item is in there. Only directories that carry Orbax's marks of unfinished
ones are ever removed. An interrupt may end a save where no code of ours is told; what that leaves goes when the process
exits.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from etils import epath

from orbax_t5x.concurrency import first_failure, run_jobs
from orbax_t5x.errors import CheckpointError, CheckpointIOError, UnsupportedCheckpointError
from orbax_t5x.handlers.orbax_names import TEMPORARY_MARK, CommitFuture
from orbax_t5x.readers.orbax.steps import COMMIT_FILE, MANIFEST_FILE, STEP_METADATA_FILE
from orbax_t5x.storage.paths import url_scheme

# What Orbax itself, of version 0 or 1, writes into a step beside its items.
_STEP_FILES = {STEP_METADATA_FILE, "orbax.checkpoint"}
_COMMITTED = "commit_timestamp_nsecs"
_ITEM_HANDLERS = "item_handlers"
# Orbax's own writers may still be finishing when we remove; what they create after us is removed on the next round.
_ROUNDS = 50
_ROUND_SECS = 0.1
_METADATA_ROUNDS = 100
_METADATA_SECS = 1.0
# Directories are made in the background, in milliseconds; without an answer by then they are not coming.
_CREATION_TIMEOUT_SECS = 20
# So long the interpreter is left to Orbax, which opens its arrays then, and to the caller, whom `save` returns to.
_HEAD_START_SECS = 0.2
# TensorStore reports the system's errors as text.
_ERRNO_TEXTS = {
    "No space left on device": errno.ENOSPC,
    "Disk quota exceeded": errno.EDQUOT,
    "Read-only file system": errno.EROFS,
    "Permission denied": errno.EACCES,
    "Too many open files": errno.EMFILE,
    "Input/output error": errno.EIO,
    "File too large": errno.EFBIG,
}
# How the errors of a store begin that no change of the arguments mends.
_STORE_FAILURE = re.compile(
    "UNAVAILABLE|PERMISSION_DENIED|UNAUTHENTICATED|RESOURCE_EXHAUSTED|DATA_LOSS|ABORTED|CANCELLED|DEADLINE_EXCEEDED"
    "|NOT_FOUND|FAILED_PRECONDITION|OUT_OF_RANGE|INTERNAL|UNKNOWN"
)


# What the directories begin with in which processes write.
_PARTS_PREFIX = "ocdbt.process_"


def as_checkpoint_error(error: BaseException, directory: Any, *, leaf: str | None = None) -> BaseException:
    """A failure to write as `CheckpointIOError` with its `errno`; every other error stays as it is."""
    if isinstance(error, CheckpointError) or not isinstance(error, Exception):
        return error
    text = " ".join(str(error).split()) or type(error).__name__
    number = error.errno if isinstance(error, OSError) else None
    if number is None:
        number = next((number for part, number in _ERRNO_TEXTS.items() if part in text), None)
    if number is None and not isinstance(error, OSError) and not _STORE_FAILURE.match(text):
        return error
    return CheckpointIOError(f"could not be written: {text}", path=os.fspath(directory), leaf=leaf, errno=number)


def raise_as_checkpoint_error(error: BaseException, directory: Any, *, leaf: str | None = None) -> NoReturn:
    """Raises what `as_checkpoint_error` makes of an error of writing."""
    typed = as_checkpoint_error(error, directory, leaf=leaf)
    if typed is not error:
        raise typed from error
    if leaf is not None and not isinstance(error, CheckpointError):
        error.add_note(f"while the leaf {leaf!r} was written to {os.fspath(directory)}")
    raise error


class _UnfinishedSaves:
    """The directories of saves that this process has begun and not ended; they are removed when it exits."""

    def __init__(self) -> None:
        self._directories: dict[str, int] = {}

    def begin(self, directory: Any) -> None:
        if not self._directories:
            atexit.register(self.remove)
        self._directories[os.fspath(directory)] = os.getpid()

    def end(self, directory: Any) -> None:
        self._directories.pop(os.fspath(directory), None)
        if not self._directories:
            atexit.unregister(self.remove)

    def __contains__(self, directory: Any) -> bool:
        return self._directories.get(os.fspath(directory)) == os.getpid()

    def remove(self) -> None:
        # A fork has the saves of its parent, and leaves them alone.
        for directory in [one for one, process in self._directories.items() if process == os.getpid()]:
            remove_temporary(directory)


_unfinished = _UnfinishedSaves()


def begin(directory: Any) -> None:
    """Notes that a save into a directory has begun: unless it ends, it is removed when the process exits."""
    _unfinished.begin(directory)


def end(directory: Any) -> None:
    """Notes that a save has been finished, or that nothing is left of it."""
    _unfinished.end(directory)


@contextlib.contextmanager
def removed_on_interrupt(directory: Any) -> Iterator[None]:
    """Runs a part of a save; where an interrupt ends it, the save's temporary directory is removed first.

    Orbax hands over leaves in asyncio tasks of their own. An interrupt in one of them stops the event loop, so that
    `async_save` is not told of it. Orbax's threads that wait for the directory would then keep the process from ending,
    for minutes, where it exits before the directory is made.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if directory in _unfinished:
            discard(directory)
        raise


def discard(directory: Any, *, saved: bool = False) -> None:
    """Removes the temporary directory of a failed save, after Orbax has made it.

    Args:
      saved: see `remove_once_described`.
    """
    removal = CommitFuture(_remove(directory, saved), name="orbax_t5x_discard")
    # What it could not remove, Orbax will at the next start; the error of the save matters more.
    with contextlib.suppress(Exception):
        removal.result(timeout=_CREATION_TIMEOUT_SECS)
        end(directory)


async def _remove(directory: Any, saved: bool) -> None:
    remove_once_described(directory, saved=saved)


def remove_once_described(directory: Any, *, saved: bool = False) -> None:
    """Removes the temporary directory of a failed save once Orbax has written the step's metadata file.

    Orbax writes that file in a thread of its own, when it makes a step and again when the items are saved. Where the
    directory is gone before, that write fails, and Orbax raises its error at the next save. It is waited for a second
    at most.

    Args:
      directory: of the item.
      saved: whether the items were saved, and Orbax notes their handlers in the step.
    """
    path = _local(directory)
    if path is not None:
        for _ in range(_METADATA_ROUNDS):
            places = path, path.parent
            if not path.exists() or any(_is_described(place / STEP_METADATA_FILE, saved) for place in places):
                break
            time.sleep(_METADATA_SECS / _METADATA_ROUNDS)
    remove_temporary(directory)


def _is_described(file: Path, saved: bool) -> bool:
    """Whether Orbax has written a step's metadata, with the handlers of its items where these were saved."""
    try:
        metadata = json.loads(file.read_bytes())
    except (OSError, ValueError):  # not there, or not written to its end
        return False
    return not saved or not isinstance(metadata, dict) or bool(metadata.get(_ITEM_HANDLERS))


def remove_temporary(directory: Any) -> None:
    """Removes a local directory of an unfinished save, and its parent where that is one, and holds nothing else."""
    path = _local(directory)
    if path is None:
        return
    parent = path.parent
    is_in_place = _is_unfinished_step(path) or (_is_unfinished_step(parent) and not (path / COMMIT_FILE).exists())
    if TEMPORARY_MARK not in path.name + parent.name and not is_in_place:
        return
    remove_tree(path)
    with contextlib.suppress(OSError):
        is_unfinished = TEMPORARY_MARK in parent.name or _is_unfinished_step(parent)
        if is_unfinished and all(entry.name in _STEP_FILES for entry in parent.iterdir()):
            remove_tree(parent)


def _is_unfinished_step(path: Path) -> bool:
    """Whether this is a step that Orbax writes under its final name: a file will mark it as finished."""
    try:
        metadata = json.loads((path / STEP_METADATA_FILE).read_bytes())
    except (OSError, ValueError):
        return False
    committed = metadata.get(_COMMITTED) if isinstance(metadata, dict) else True
    return committed is None and not (path / COMMIT_FILE).exists()


def remove_tree(path: Path) -> None:
    """Removes a directory that others may still be writing into, for a few seconds at most."""
    for _ in range(_ROUNDS):
        shutil.rmtree(path, ignore_errors=True)
        time.sleep(_ROUND_SECS / _ROUNDS)
        if not path.exists():
            return
        time.sleep(_ROUND_SECS)


def _local(directory: Any) -> Path | None:
    """The directory as a local path; None for a remote one."""
    text = os.fspath(directory)
    return None if url_scheme(text) is not None else Path(text)


class GuardedCommit:
    """Orbax's commit futures as one that, where they fail, leaves nothing behind and raises a typed error.

    Attributes:
      meanwhile: called by whoever waits, while what the futures stand for goes on, or is done.
      finish: called once all have succeeded.
    """

    def __init__(self, futures: Sequence[Any], directory: epath.Path, remove: bool):
        """Args: `remove`: whether this process removes the directory."""
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
                self._give_a_head_start()
                self.meanwhile()
            for future in self._futures:
                future.result(timeout=None if deadline is None else max(0.001, deadline - time.monotonic()))
            if self.finish is not None:
                self.finish()
        except TimeoutError:
            raise
        except BaseException as error:
            self.cancel()
            if self._remove:
                remove_once_described(self._directory)
                end(self._directory)
            raise_as_checkpoint_error(first_failure(error), self._directory)

    def _give_a_head_start(self) -> None:
        begun = time.monotonic()
        with contextlib.suppress(TimeoutError):
            for future in self._futures:
                future.result(timeout=max(0.001, begun + _HEAD_START_SECS - time.monotonic()))

    def cancel(self) -> None:
        """Cancels what still runs."""
        for future in self._futures:
            with contextlib.suppress(Exception):
                future.cancel()


def check_merged(directory: epath.Path) -> None:
    """Raises where Orbax did not find what the processes wrote, and so has left it without an index.

    It looks for that by a pattern that begins with the directory's own path, in which `[` means something else; the
    save would end without an error and could not be read.
    """
    if "[" not in os.fspath(directory) or (directory / MANIFEST_FILE).exists():
        return
    if any(entry.name.startswith(_PARTS_PREFIX) for entry in directory.iterdir()):
        message = (
            "Orbax cannot save below a directory whose name holds '[': it does not find its own files again; choose "
            "another path, or pass use_ocdbt=False to the handler"
        )
        raise UnsupportedCheckpointError(message, path=os.fspath(directory))


def sync_tree(directory: Any) -> None:
    """Makes everything below a local directory durable: what it holds survives a power loss from here on.

    TensorStore syncs its own files; Orbax's metadata files and the directories' entries are not synced by anyone.
    """
    root = _local(directory)
    if root is None:
        return
    paths = [path for folder, _, names in os.walk(root) for path in (*(os.path.join(folder, n) for n in names), folder)]
    # Each waits for the device, 2 ms also where nothing is left to write; together most wait for the same flush.
    run_jobs(partial(sync, path) for path in paths)


def sync_directory(directory: Path) -> None:
    """Makes the entries of a local directory, and the files right in it, durable."""
    for entry in os.scandir(directory):
        if entry.is_file(follow_symlinks=False):
            sync(entry.path)
    sync(directory)


def sync(path: str | Path) -> None:
    """Makes one file, or one directory's entries, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
