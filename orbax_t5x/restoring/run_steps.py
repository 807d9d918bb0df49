"""Reads the lineage that the steps of a root record.

The root is listed once. Steps are read newest first, a batch at a time, and only until the answer is known; of each
item's metadata only the end is read, which holds the record. A root may be in a bucket.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import os
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from etils import epath

from orbax_t5x.concurrency.process_threads import waiting_pool
from orbax_t5x.errors import CheckpointError, CheckpointGoneError, CheckpointNotFoundError
from orbax_t5x.files.paths import url_scheme
from orbax_t5x.files.places import opening
from orbax_t5x.provenance.records import UNRECORDED, Lineage, from_metadata
from orbax_t5x.readers.detect import is_file, subdirectories
from orbax_t5x.readers.orbax.metadata import read_custom_metadata
from orbax_t5x.readers.orbax.steps import COMMIT_FILE, STEP_METADATA_FILE, TEMPORARY_MARK, step_of_name

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


class _StepDirectory(NamedTuple):
    """A directory with the name of a step, finished or not."""

    step: int
    path: str


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
    certain = step_name.isdecimal() or parent.name != step_name or url_scheme(os.fspath(path)) is not None
    if not certain and not (parent / STEP_METADATA_FILE).exists():
        return None
    return StepItem(os.fspath(parent.parent), item, step)


def newest_lineage(
    item: StepItem, *, is_older: bool = False, known: tuple[StepItem, Lineage] | None = None
) -> Lineage | None:
    """Returns the lineage of the newest other finished step, or None.

    It is unrecorded if only an older step has a record; `is_older` looks at earlier steps only. `known` is the lineage
    of a step: if that is the newest, nothing is read.
    """
    newest_has_none = False
    with opening():
        steps = [
            one for one in _steps_below(item.root) if (one.step < item.step if is_older else one.step != item.step)
        ]
        if known is not None and steps and known[0] == item._replace(step=steps[0].step):
            return known[1]
        for index, lineage in _read_lineages(steps, item.item):
            if (lineage is None and newest_has_none) or not _is_finished(steps, index):
                continue
            if lineage is not None:
                return (UNRECORDED,) if newest_has_none else lineage
            newest_has_none = True
    return None


def lacks_record(directory: str | os.PathLike[str]) -> bool:
    """Tests if an item without a record should have one.

    An older finished step has one, or Orbax merged partial saves.
    """
    item = step_item(directory)
    if item is not None and newest_lineage(item, is_older=True) is not None:
        return True
    with opening():
        try:
            return any(map(_PARTIAL_SAVE.fullmatch, subdirectories(os.fspath(directory)).inside))
        except CheckpointError:
            return False


def _steps_below(root: str) -> list[_StepDirectory]:
    """Lists the directories of steps in a root, newest first."""
    try:
        names = subdirectories(root).inside
    except CheckpointGoneError:
        return []
    steps = [
        _StepDirectory(step, os.path.join(root, name)) for name in names if (step := step_of_name(name)) is not None
    ]
    return sorted(steps, reverse=True)


def _is_finished(steps: Sequence[_StepDirectory], index: int) -> bool:
    """Tests for the file that Orbax writes last; see `readers.orbax.steps.newest_first`."""
    path = steps[index].path
    if is_file(path, COMMIT_FILE) or not is_file(path, STEP_METADATA_FILE):
        return True
    return not any(is_file(older.path, COMMIT_FILE) for older in steps[index + 1 :])


def _read_lineages(steps: Sequence[_StepDirectory], item: str) -> Iterator[tuple[int, Lineage | None]]:
    """Yields position and lineage of each step with the item, in order."""
    for first in range(0, len(steps), _BATCH_STEPS):
        batch = steps[first : first + _BATCH_STEPS]
        # Each thread needs the session of remote stores, and a context can be entered by one thread at a time.
        pending = [
            waiting_pool().submit(contextvars.copy_context().run, _read_lineage, one.path, item) for one in batch
        ]
        concurrent.futures.wait(pending)
        for index, lineage in enumerate(pending, first):
            with contextlib.suppress(CheckpointNotFoundError):  # another item, or deleted since the root was listed
                yield index, lineage.result()


def _read_lineage(step: str, item: str) -> Lineage | None:
    """Reads an item's lineage; a damaged record counts as unrecorded."""
    names = [item, *(name for name in SINGLE_ITEMS if name != item)] if item in SINGLE_ITEMS else [item]
    for name in names:
        directory = os.path.join(step, name)
        try:
            return from_metadata(read_custom_metadata(directory), path=directory)
        except CheckpointNotFoundError:
            if name == names[-1]:
                raise
        except CheckpointError:
            break
    return (UNRECORDED,)
