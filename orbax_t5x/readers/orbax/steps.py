"""Finds the steps of a root and the items of a step.

By names, and a list or stat inside each.

A finished step is a directory whose name is a number, perhaps padded and perhaps after a prefix and `_`, and that holds
the metadata of at least one item; step 0 is one. A rename makes a local step visible, so a temporary suffix, or a name
that is no number for any other reason, means unfinished; an empty directory or one whose deletion was interrupted has
no item left. Where Orbax writes steps in place, a file that it writes last marks the finished ones. No file is opened
here but a step's own metadata where that file is missing, the record of an item's deletion, and a local file
`checkpoint`, which TensorFlow's directories hold too.

Of a remote step the items are those that its metadata name: web servers list nothing, and a list of a bucket names
every chunk. A bucket cannot rename, so a step in one is finished when it has that mark, or is T5X's own.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from orbax_t5x.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointIOError,
    CorruptCheckpointError,
    Fix,
    UnsupportedCheckpointError,
)
from orbax_t5x.files.interface import Files
from orbax_t5x.files.paths import is_name
from orbax_t5x.files.places import files_at
from orbax_t5x.files.strict_json import parse_object
from orbax_t5x.readers.detect import (
    PathProbe,
    Subdirectories,
    is_bundle_state,
    is_file,
    is_msgpack_map,
    owner_of_file,
    subdirectories,
)
from orbax_t5x.readers.format_table import T5X
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
    """A finished step: its number and its directory's name."""

    step: int
    name: str


def step_of_name(name: str) -> int | None:
    """Parses the step in a directory's name, or returns None."""
    match = _STEP_NAME.fullmatch(name)
    return int(match["step"]) if match and TEMPORARY_MARK not in name else None


def is_temporary(directory: str) -> bool:
    """Tests if a directory or its parent is an unfinished save."""
    parent, name = os.path.split(directory)
    return TEMPORARY_MARK in name or TEMPORARY_MARK in os.path.basename(parent)


def is_item(directory: str) -> bool:
    """Tests if a directory holds the metadata of a saved tree."""
    return is_file(directory, METADATA_FILE)


def is_early_item(root: Files, item: str = "") -> bool:
    """Tests if a directory is an item of the first Orbax versions."""
    if root.has_file(inside(item, METADATA_FILE)):
        return False
    state = PathProbe(root.join(item) if item else root.path, "directory").inside(MSGPACK_FILE)
    return is_msgpack_map(state) and owner_of_file(state, [T5X]) is None


def item_names(directory: str) -> list[str]:
    """Lists the subdirectories of a step that hold arrays, sorted."""
    files = files_at(directory)
    names = list(recorded_items(directory)) if files.is_remote else []
    if not names:
        if not files.can_list:
            raise UnsupportedCheckpointError(
                "web servers do not list their files, and the metadata of this step do not name its items",
                path=directory,
                fix=Fix.any_of(Fix.setting("name one by {}", item=...), Fix("open its own URL")),
            )
        names = files.subdirectories().inside
    names = [name for name in names if TEMPORARY_MARK not in name]
    items = [name for name in names if is_item(os.path.join(directory, name))]
    # Managers alone made steps of such items. Elsewhere they are checkpoints side by side.
    if not items and step_of_name(os.path.basename(directory)) is not None and not files.has_file(STEP_METADATA_FILE):
        items = [name for name in names if step_of_name(name) is None and is_early_item(files, name)]
    return sorted(items)


def recorded_items(directory: str) -> dict[str, Any]:
    """Reads a step's items and the names of their handlers."""
    return items_in(_record_in(directory, STEP_METADATA_FILE) or {})


def _record_in(directory: str, name: str) -> dict[str, Any] | None:
    """Reads a JSON file of a directory, or returns None."""
    files = files_at(directory)
    if not files.has_file(name):
        return None
    return parse_object(files.read_whole(name, limit=_MAX_METADATA_BYTES), files.join(name), allow_nan=True)


def items_in(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the items in the metadata of a step."""
    handlers = metadata.get("item_handlers")
    return {name: handlers[name] for name in handlers if is_name(name)} if isinstance(handlers, dict) else {}


def lost_items(directory: str, recorded: Mapping[str, Any], found: Collection[str]) -> list[str]:
    """Lists recorded items that are missing or unreadable."""
    deleted = _deleted_item_if_known(directory)
    return sorted(
        name
        for name, handler in recorded.items()
        if name not in found
        and name != deleted
        and str(handler).rpartition(".")[2] in _TREE_HANDLERS
        and not is_file(os.path.join(directory, name), MSGPACK_FILE)
    )


def is_step_directory(directory: str, found: Subdirectories | None = None) -> bool:
    """Tests if a directory is a step, by marker or items."""
    if is_file(directory, STEP_METADATA_FILE):
        return True
    if not files_at(directory).can_list:
        return False
    own_name = os.path.basename(directory)
    steps = newest_first(directory, found)
    if step_of_name(own_name) is None and next(steps, None) is not None:
        return False
    items = item_names(directory)

    def is_own_item(name: str) -> bool:
        return name in items and (
            own_name.isdecimal() or not is_file(os.path.join(directory, name), STEP_METADATA_FILE)
        )

    return bool(items) and all(is_own_item(step.name) for step in steps)


def are_checkpoints(directory: str, items: Iterable[str]) -> bool:
    """Tests if items were saved separately, side by side by chance."""
    if is_file(directory, STEP_METADATA_FILE) or step_of_name(os.path.basename(directory)) is not None:
        return False
    return all(is_file(os.path.join(directory, item), STEP_METADATA_FILE) for item in items)


def deleted_item(directory: str) -> str | None:
    """Reads the name of Orbax v1's half-deleted item, or None."""
    record = _record_in(directory, _DELETION_FILE)
    if record is None:
        return None
    name = record.get(_DELETED_NAME)
    if not isinstance(name, str):
        message = f"{_DELETED_NAME!r} is {str(name)[:200]!r}, not the name of an item"
        raise CorruptCheckpointError(message, path=files_at(directory).join(_DELETION_FILE))
    return name


def is_step(directory: str) -> bool:
    """Tests if a step's directory is finished, by its own files."""
    if files_at(directory).is_remote:
        return _is_remote_step(directory)
    try:
        if is_item(directory) or (
            is_file(directory, MSGPACK_FILE)
            and not is_bundle_state(PathProbe(directory, "directory").inside(MSGPACK_FILE))
        ):
            return True
        names = item_names(directory)
        items_are_marked = any(is_file(os.path.join(directory, name), COMMIT_FILE) for name in names)
        if items_are_marked and not is_file(directory, COMMIT_FILE) and _was_begun_by_orbax(directory):
            return False  # its items are finished, and it is not
        return any(name != _deleted_item_if_known(directory) for name in names)
    except CheckpointGoneError:
        return False  # deleted since its parent was listed, by a manager that keeps only the newest steps
    except CheckpointIOError as error:
        if error.errno != errno.EACCES:
            raise
        return False


def _deleted_item_if_known(directory: str) -> str | None:
    """Returns `deleted_item`, or None."""
    try:
        return deleted_item(directory)
    except CheckpointError:
        return None


def _was_begun_by_orbax(directory: str) -> bool:
    """Tests if a step's metadata have the time of its beginning."""
    try:
        record = _record_in(directory, STEP_METADATA_FILE)
    except CheckpointError:
        return False
    return record is not None and record.get(_BEGUN) is not None


def _is_remote_step(directory: str) -> bool:
    if is_file(directory, MSGPACK_FILE):
        return True  # T5X's own, which has no such mark
    committed = is_file(directory, COMMIT_FILE)
    return committed and (is_item(directory) or bool(item_names(directory)))


def newest_first(root: str, found: Subdirectories | None = None) -> Iterator[Step]:
    """Yields the finished steps of a root, newest first.

    An older step costs nothing until it is asked for. A step in place of a rename (where a file system has none, or by
    Orbax's option) looks finished before it is. Orbax wrote the mark from some version on whichever way it takes, so
    the mark is required only after a step with it, and never of T5X's own steps, which have no metadata of Orbax.
    """
    inside, outside = subdirectories(root) if found is None else found
    links = set(steps_named(outside))
    newest = sorted([*steps_named(inside), *links], reverse=True)
    marks = (index for index, step in enumerate(newest) if step not in links and _is_marked_step(root, step))
    mark = -1  # of the marked steps, the newest that is older than the one at hand
    for index, step in enumerate(newest):
        directory = os.path.join(root, step.name)
        if step in links:
            yield step
        elif is_step(directory):
            if not is_file(directory, COMMIT_FILE) and _was_begun_by_orbax(directory):
                while mark <= index:
                    mark = next(marks, len(newest))
                if mark < len(newest):
                    continue
            yield step


def _is_marked_step(root: str, step: Step) -> bool:
    directory = os.path.join(root, step.name)
    return is_file(directory, COMMIT_FILE) and is_step(directory)


def steps_named(names: Iterable[str]) -> list[Step]:
    """Returns the steps that directories of these names may be."""
    return [Step(step, name) for name in names if (step := step_of_name(name)) is not None]


def is_t5x_step(directory: str) -> bool:
    """Tests if a finished step looks like T5X's own."""
    return is_file(directory, MSGPACK_FILE) and not is_item(directory) and not is_file(directory, STEP_METADATA_FILE)


def newest_directory(root: str, steps: Iterator[Step], found: Subdirectories | None = None) -> str | None:
    """Returns the directory of the newest step."""
    newest = next(steps, None)
    if newest is None:
        return None
    inside, outside = subdirectories(root) if found is None else found
    ending = str(newest.step)
    same_ending = [name for name in (*inside, *outside) if name.endswith(ending)]
    if sum(step.step == newest.step for step in steps_named(same_ending)) > 1:
        others = itertools.takewhile(lambda step: step.step == newest.step, steps)
        if same := sorted(step.name for step in others):
            raise UnsupportedCheckpointError(
                f"the directories {', '.join(map(repr, sorted([newest.name, *same])))} are all step {newest.step}; "
                "open one of them by its own path",
                path=root,
            )
    return files_at(root).locate(newest.name)
