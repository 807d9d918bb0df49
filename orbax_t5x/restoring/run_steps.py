"""Records in the other steps of a run's root.

The root is listed once. Steps are read newest first, a batch at a time, until one has a record; of each item's metadata
only the end is read, which holds the record. A root may be in a bucket.
"""

from __future__ import annotations

import contextvars
import os
import re
from typing import NamedTuple

from etils import epath

from orbax_t5x.concurrency.process_threads import waiting_pool
from orbax_t5x.errors import CheckpointError, CheckpointGoneError, CheckpointNotFoundError
from orbax_t5x.files.interface import Files
from orbax_t5x.files.paths import url_scheme
from orbax_t5x.files.places import files_at, opening
from orbax_t5x.provenance.records import from_metadata
from orbax_t5x.readers.orbax.metadata import read_custom_metadata
from orbax_t5x.readers.orbax.steps import (
    COMMIT_FILE,
    STEP_METADATA_FILE,
    TEMPORARY_MARK,
    Step,
    step_of_name,
    steps_named,
)

SINGLE_ITEMS = ("default", "state")
"""Names of a single item, of Orbax's managers and of Orbax v1: a run may go from either to the other."""

# Steps that are read at the same time. More would read steps in vain, since the newest older step mostly has a record;
# fewer would wait for a bucket more often.
_BATCH_STEPS = 16

# Directory of what one process wrote in one partial save: its number, and the save's.
_PARTIAL_SAVE = re.compile(r"ocdbt\.process_\d+?[0-9a-f]{32}")


class StepItem(NamedTuple):
    """Item of a step in a root."""

    root: str
    item: str
    step: int


def step_item(directory: str | os.PathLike[str]) -> StepItem | None:
    """Finds the step of an item's directory, or returns None."""
    if url_scheme(os.fspath(directory)) in ("http", "https"):
        return None  # read-only URLs belong to no run
    path = epath.Path(os.fspath(directory))
    parent = path.parent
    item, step_name = (part.name.partition(TEMPORARY_MARK)[0] for part in (path, parent))
    step = step_of_name(step_name)
    if step is None or not item or not step_name:
        return None
    # Other directories than steps have names such as `run_2024`; a step of such a name is being written by Orbax, or
    # has its marker.
    is_certain = step_name.isdecimal() or parent.name != step_name or url_scheme(os.fspath(path)) is not None
    if not is_certain and not (parent / STEP_METADATA_FILE).exists():
        return None
    return StepItem(os.fspath(parent.parent), item, step)


def has_other_steps(item: StepItem) -> bool:
    """Returns True if the root has another finished step."""
    with opening():
        root = files_at(item.root)
        steps = _steps_in(root)
        return any(step.step != item.step and _is_finished(root, steps, index) for index, step in enumerate(steps))


def lacks_record(directory: str | os.PathLike[str]) -> bool:
    """Returns True if an item without a record should have one.

    An older finished step has one, or Orbax merged partial saves.
    """
    item = step_item(directory)
    with opening():
        if item is not None and _has_older_record(item):
            return True
        try:
            return any(map(_PARTIAL_SAVE.fullmatch, files_at(os.fspath(directory)).subdirectories().inside))
        except CheckpointError:
            return False


def _has_older_record(item: StepItem) -> bool:
    root = files_at(item.root)
    steps = _steps_in(root)
    older = [index for index, step in enumerate(steps) if step.step < item.step]
    for first in range(0, len(older), _BATCH_STEPS):
        batch = older[first : first + _BATCH_STEPS]
        # Each thread needs the session of remote stores, and a context can be entered by one thread at a time.
        pending = [
            waiting_pool().submit(
                contextvars.copy_context().run, _has_record, os.path.join(item.root, steps[index].name), item.item
            )
            for index in batch
        ]
        with_record = [index for index, future in zip(batch, pending, strict=True) if future.result()]
        if any(_is_finished(root, steps, index) for index in with_record):
            return True
    return False


def _steps_in(root: Files) -> list[Step]:
    """Lists the directories with names of steps in a root, newest first, finished or not."""
    try:
        return sorted(steps_named(root.subdirectories().inside), reverse=True)
    except CheckpointGoneError:
        return []


def _is_finished(root: Files, steps: list[Step], index: int) -> bool:
    """Returns True if the file is there that Orbax writes last; see `readers.orbax.steps.finished_steps`."""
    name = steps[index].name
    if root.has_file(f"{name}/{COMMIT_FILE}") or not root.has_file(f"{name}/{STEP_METADATA_FILE}"):
        return True
    return not any(root.has_file(f"{older.name}/{COMMIT_FILE}") for older in steps[index + 1 :])


def _has_record(step: str, item: str) -> bool:
    """Returns True if an item has a record; a damaged one counts."""
    names = [item, *(name for name in SINGLE_ITEMS if name != item)] if item in SINGLE_ITEMS else [item]
    for name in names:
        directory = os.path.join(step, name)
        try:
            return from_metadata(read_custom_metadata(directory), path=directory) is not None
        except CheckpointNotFoundError:  # another item, or deleted since the root was listed
            continue
        except CheckpointError:
            return True
    return False
