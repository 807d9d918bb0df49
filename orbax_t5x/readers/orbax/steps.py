"""Finds the steps of a root and the items of a step.

A finished step is a directory whose name is a number, perhaps padded and perhaps after a prefix and `_`, and that holds
the metadata of at least one item; step 0 is a step. A rename makes a local step visible, so a temporary suffix, or a
name that is no number for any other reason, means unfinished; an empty directory or one whose deletion was interrupted
has no item left. Where Orbax writes steps in place, a file that it writes last marks the finished steps. A bucket
cannot rename, so a step in a bucket is finished when it has that mark, or is T5X's own.

No file is opened here but a step's own metadata, the record of an item's deletion, and the first bytes of a file
`checkpoint`, which TensorFlow's directories hold too. Web servers list nothing: a step's items are those that its
metadata name.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointIOError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    Fix,
    UnsupportedCheckpointError,
)
from orbax_t5x.files.interface import Files
from orbax_t5x.files.paths import is_name
from orbax_t5x.files.places import files_at
from orbax_t5x.files.strict_json import parse_object
from orbax_t5x.readers.detect import PathProbe
from orbax_t5x.readers.format_table import BUNDLE_STATE, MSGPACK_MAP, T5X
from orbax_t5x.readers.orbax.metadata import METADATA_FILE, inside

STEP_METADATA_FILE = "_CHECKPOINT_METADATA"
MANIFEST_FILE = "manifest.ocdbt"
# The beginning of the names of the directories in which processes write.
PROCESS_PREFIX = "ocdbt.process_"
# What Orbax writes last into a step, and into each item of it.
COMMIT_FILE = "commit_success.txt"
# Orbax v1 writes it into a step before it deletes one item, and removes it when the item is gone.
_DELETION_FILE = "_CHECKPOINT_DELETION"
_DELETED_NAME = "checkpointable_name"
_BEGUN = "init_timestamp_nsecs"
_MAX_METADATA_BYTES = 64 << 20  # of a step's metadata, and of a deletion's record, which repeats them
# T5X's own step directories and the first Orbax items keep their tree in a msgpack file of this name.
MSGPACK_FILE = "checkpoint"
# Handlers whose items have a list of names, by the last part of the name that a step's metadata has for them.
_TREE_HANDLERS = frozenset({"PyTreeCheckpointHandler", "PyTreeHandler", "StandardCheckpointHandler"})
_STEP_NAME = re.compile(r"(?:.+_)?(?P<step>[0-9]{1,18})", re.ASCII | re.DOTALL)
# What Orbax appends to the names of directories that it has not finished.
TEMPORARY_MARK = ".orbax-checkpoint-tmp"


class Step(NamedTuple):
    """A step: its number and its directory's name."""

    step: int
    name: str


def step_of_name(name: str) -> int | None:
    """Parses the step in a directory's name, or returns None."""
    match = _STEP_NAME.fullmatch(name)
    return int(match["step"]) if match and TEMPORARY_MARK not in name else None


def steps_named(names: Iterable[str]) -> list[Step]:
    """Returns the steps that directories of these names may be."""
    steps = ((step_of_name(name), name) for name in names)
    return [Step(step, name) for step, name in steps if step is not None]


def is_temporary(directory: str) -> bool:
    """Returns True if a directory or its parent is an unfinished save."""
    parent, name = os.path.split(directory)
    return TEMPORARY_MARK in name or TEMPORARY_MARK in os.path.basename(parent)


# -- the items of a step


def is_item(root: Files, item: str = "") -> bool:
    """Returns True if a directory holds the metadata of a saved tree."""
    return root.has_file(inside(item, METADATA_FILE))


def is_early_item(root: Files, item: str = "") -> bool:
    """Returns True if a directory is an item of the first Orbax versions."""
    if is_item(root, item):
        return False
    probe, name = PathProbe(root), inside(item, MSGPACK_FILE)
    return probe.has_bytes(MSGPACK_MAP, name) and not any(probe.has_bytes(mark, name) for mark in T5X.files)


def item_names(step: Files) -> list[str]:
    """Lists the subdirectories of a step that hold arrays, sorted."""
    names = step.subdirectories().inside if step.can_list else list(recorded_items(step))
    if not names and not step.can_list:
        raise UnsupportedCheckpointError(
            "web servers do not list their files, and the metadata of this step do not name its items",
            path=step.path,
            fix=Fix.any_of(Fix.setting("name one by {}", item=...), Fix("open its own URL")),
        )
    names = sorted(name for name in names if TEMPORARY_MARK not in name)
    items = _holding(step, names, METADATA_FILE)
    # Managers alone made steps of early items. Elsewhere they are checkpoints side by side.
    if not items and step_of_name(os.path.basename(step.path)) is not None and not step.has_file(STEP_METADATA_FILE):
        return [name for name in names if step_of_name(name) is None and is_early_item(step, name)]
    return items


def _holding(root: Files, directories: Sequence[str], name: str) -> list[str]:
    """Lists the directories that hold a file; of a remote store in one batch."""
    paths = [inside(directory, name) for directory in directories]
    presence = root.has_files(paths) if root.is_remote else [root.has_file(path) for path in paths]
    return list(itertools.compress(directories, presence))


def recorded_items(step: Files) -> dict[str, Any]:
    """Reads a step's items and the names of their handlers."""
    return items_in(_read_record(step, STEP_METADATA_FILE) or {})


def _read_record(step: Files, name: str) -> dict[str, Any] | None:
    """Reads a JSON file of a step, or returns None."""
    if not step.has_file(name):
        return None
    return parse_object(step.read_whole(name, limit=_MAX_METADATA_BYTES), step.join(name), allow_nan=True)


def items_in(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the items in the metadata of a step."""
    handlers = metadata.get("item_handlers")
    return {name: handlers[name] for name in handlers if is_name(name)} if isinstance(handlers, dict) else {}


def lost_items(step: Files, recorded: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Lists recorded items that are missing or unreadable."""
    deleted = _readable_deleted_item(step)
    trees = [name for name, handler in recorded.items() if str(handler).rpartition(".")[2] in _TREE_HANDLERS]
    missing = [name for name in sorted(trees) if name not in names and name != deleted]
    return [name for name in missing if not step.has_file(inside(name, MSGPACK_FILE))]


def deleted_item(step: Files) -> str | None:
    """Reads the name of Orbax v1's half-deleted item, or None."""
    record = _read_record(step, _DELETION_FILE)
    if record is None:
        return None
    name = record.get(_DELETED_NAME)
    if not isinstance(name, str):
        message = f"{_DELETED_NAME!r} is {str(name)[:200]!r}, not the name of an item"
        raise CorruptCheckpointError(message, path=step.join(_DELETION_FILE))
    return name


def _readable_deleted_item(step: Files) -> str | None:
    with contextlib.suppress(CheckpointError):
        return deleted_item(step)
    return None


def are_checkpoints(directory: Files, items: Iterable[str]) -> bool:
    """Returns True if items were saved separately and are side by side by chance."""
    if directory.has_file(STEP_METADATA_FILE) or step_of_name(os.path.basename(directory.path)) is not None:
        return False
    return all(directory.has_file(inside(item, STEP_METADATA_FILE)) for item in items)


# -- the steps of a root


def finished_steps(root: Files) -> Iterator[Step]:
    """Yields the finished steps of a root, newest first, and links that lead out.

    An older step costs nothing until it is asked for. A step in place of a rename (where a file system has none, or by
    Orbax's option) looks finished before it is. Orbax wrote the mark from some version on whichever way it takes, so
    the mark is required only after a step with it, and never of T5X's own steps, which have no metadata of Orbax.
    """
    names, links = root.subdirectories()
    steps = sorted(steps_named([*names, *links]), reverse=True)

    @functools.cache
    def oldest_marked() -> Step | None:
        for step in reversed(steps):
            if step.name not in links and _is_committed(root, step.name) and is_finished(root, step.name):
                return step
        return None

    for step in steps:
        if step.name in links:
            yield step
        elif is_finished(root, step.name):
            if _is_unmarked_save(root, step.name) and (marked := oldest_marked()) is not None and marked < step:
                continue
            yield step


def newest_step(root: Files, steps: Iterator[Step]) -> Step | None:
    """Returns the first of a root's finished steps, or None.

    Raises:
      UnsupportedCheckpointError: two directories are that step.
    """
    newest = next(steps, None)
    if newest is None:
        return None
    same = sorted(step.name for step in steps_named(root.subdirectories().inside) if step.step == newest.step)
    if len(same) > 1:
        same = [name for name in same if is_finished(root, name)]
    if len(same) > 1:
        message = f"the directories {', '.join(map(repr, same))} are all step {newest.step}"
        raise UnsupportedCheckpointError(f"{message}; open one of them by its own path", path=root.path)
    return newest


def is_finished(root: Files, name: str) -> bool:
    """Returns True if a step of a root is finished, by its own files."""
    tree = inside(name, MSGPACK_FILE)
    try:
        if root.has_file(tree) and not PathProbe(root).has_bytes(BUNDLE_STATE, tree):
            return True
        if root.is_remote and not _is_committed(root, name):
            return False
        if is_item(root, name):
            return True
        step = files_at(root.locate(name))
        items = item_names(step)
        if any(_is_committed(step, item) for item in items) and _is_unmarked_save(root, name):
            return False  # its items are finished, and it is not
        deleted = _readable_deleted_item(step)
        return any(item != deleted for item in items)
    except (CheckpointGoneError, CheckpointNotFoundError):
        return False  # deleted since its parent was listed, by a manager that keeps only the newest steps
    except CheckpointIOError as error:
        if error.errno != errno.EACCES or root.is_remote:
            raise
        return False


def _is_committed(root: Files, name: str) -> bool:
    return root.has_file(inside(name, COMMIT_FILE))


def _is_unmarked_save(root: Files, name: str) -> bool:
    """Returns True if a step has the time of its beginning, and no mark that it is finished."""
    if _is_committed(root, name):
        return False
    with contextlib.suppress(CheckpointError):
        record = _read_record(root, inside(name, STEP_METADATA_FILE))
        return record is not None and record.get(_BEGUN) is not None
    return False


def is_t5x_step(root: Files, name: str) -> bool:
    """Returns True if a step is T5X's own."""
    probe, tree = PathProbe(root), inside(name, MSGPACK_FILE)
    if is_item(root, name) or root.has_file(inside(name, STEP_METADATA_FILE)):
        return False
    return any(probe.has_bytes(mark, tree) for mark in T5X.directory)


def is_step_directory(directory: Files) -> bool:
    """Returns True if a directory is a step, by its metadata or by its items."""
    if directory.has_file(STEP_METADATA_FILE):
        return True
    if not directory.can_list:
        return False
    own_name = os.path.basename(directory.path)
    steps = finished_steps(directory)
    if step_of_name(own_name) is None and next(steps, None) is not None:
        return False
    items = item_names(directory)
    # Items whose names end in numbers look like steps; steps of a root have metadata of their own.
    for step in steps:
        has_metadata = directory.has_file(inside(step.name, STEP_METADATA_FILE))
        if step.name not in items or (has_metadata and not own_name.isdecimal()):
            return False
    return bool(items)
