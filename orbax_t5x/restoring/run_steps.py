"""Finds the run (root and item) of a step directory, and reads the lineage that the run's older steps record.

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
from orbax_t5x.provenance.runs import RunKey, StepMarker
from orbax_t5x.readers.detect.probe import is_file, subdirectories
from orbax_t5x.readers.orbax.metadata import read_custom_metadata
from orbax_t5x.readers.orbax.steps import COMMIT_FILE, STEP_METADATA_FILE, TEMPORARY_MARK, step_of_name

# Steps that are read at the same time. More would read steps in vain, since the newest older step mostly has a record;
# fewer would wait for a bucket more often.
_BATCH_STEPS = 16

# Directory of what one process wrote in one partial save: its number, and the save's.
_PARTIAL_SAVE = re.compile(r"ocdbt\.process_\d+?[0-9a-f]{32}")


class StepItem(NamedTuple):
    """One item of one step of a run."""

    run: RunKey
    step: int
    marker: StepMarker


class _StepDirectory(NamedTuple):
    """A directory whose name is that of a step, finished or not."""

    step: int
    path: str


def step_item(directory: str | os.PathLike[str]) -> StepItem | None:
    """Finds the run of an item's directory, finished or not; None for one that is not an item inside a step."""
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
    # What Orbax renames when it is finished exists then under that name; a step that is written in place has a marker.
    marker = STEP_METADATA_FILE if parent.name != step_name else COMMIT_FILE
    return StepItem(run_of(parent.parent, item), step, StepMarker(os.fspath(parent.parent / step_name), marker))


def run_of(root: str | os.PathLike[str], item: str) -> RunKey:
    """Returns the run in a root, as `step_item` finds it from a directory below; `item` as in `RunKey`."""
    return RunKey(_resolved(root), item)


def _resolved(root: str | os.PathLike[str]) -> str:
    text = os.fspath(root)
    return text if url_scheme(text) is not None else os.path.realpath(text)


def newest_lineage(run: RunKey, *, except_step: int) -> Lineage | None:
    """Returns the lineage of the newest finished step of a run, but for `except_step`; None without a record.

    A newest step without a record, in a run where an older one has one, is unrecorded.
    """
    newest_has_none = False
    with opening():
        steps = [one for one in _steps_below(run.root) if one.step != except_step]
        for index, lineage in _read_lineages(steps, run.item):
            if (lineage is None and newest_has_none) or not _is_finished(steps, index):
                continue
            if lineage is not None:
                return (UNRECORDED,) if newest_has_none else lineage
            newest_has_none = True
    return None


def has_finished_step(run: RunKey, saved: StepMarker | None, *, except_step: int) -> bool:
    """Tests whether the root of a run has a finished step, other than one that is being saved.

    Args:
      run: whose root is listed, but where the step `saved` is still there.
      saved: the step that was saved last, as far as that is known.
      except_step: the one that is being saved.
    """
    with opening():
        if saved is not None and is_file(*saved):
            return True
        steps = [one for one in _steps_below(run.root) if one.step != except_step]
        return any(_is_finished(steps, index) for index in range(len(steps)))


def lacks_record(directory: str | os.PathLike[str]) -> bool:
    """Tests whether an item without a record should have one.

    That is so where an older finished step of the same run has one, and where Orbax merged partial saves, which keep no
    record inside our context either.
    """
    return _has_older_record(directory) or _is_of_partial_saves(os.fspath(directory))


def _is_of_partial_saves(directory: str) -> bool:
    with opening():
        try:
            return any(map(_PARTIAL_SAVE.fullmatch, subdirectories(directory).inside))
        except CheckpointError:
            return False


def _has_older_record(directory: str | os.PathLike[str]) -> bool:
    item = step_item(directory)
    if item is None:
        return False
    with opening():
        steps = [one for one in _steps_below(item.run.root) if one.step < item.step]
        records = _read_lineages(steps, item.run.item)
        return any(lineage is not None and _is_finished(steps, index) for index, lineage in records)


def _steps_below(root: str) -> list[_StepDirectory]:
    """Lists the directories of a root that have the name of a step, newest first."""
    try:
        names = subdirectories(root).inside
    except CheckpointGoneError:
        return []
    steps = [
        _StepDirectory(step, os.path.join(root, name)) for name in names if (step := step_of_name(name)) is not None
    ]
    return sorted(steps, reverse=True)


def _is_finished(steps: Sequence[_StepDirectory], index: int) -> bool:
    """Tests whether a step is finished by the file that Orbax writes last; see `readers.orbax.steps.newest_first`."""
    path = steps[index].path
    if is_file(path, COMMIT_FILE) or not is_file(path, STEP_METADATA_FILE):
        return True
    return not any(is_file(older.path, COMMIT_FILE) for older in steps[index + 1 :])


def _read_lineages(steps: Sequence[_StepDirectory], item: str) -> Iterator[tuple[int, Lineage | None]]:
    """Yields the position and the lineage of each step that has the item, in the order of the steps."""
    for first in range(0, len(steps), _BATCH_STEPS):
        batch = steps[first : first + _BATCH_STEPS]
        # Each thread needs the session of remote stores, and a context can be entered by one thread at a time.
        pending = [
            waiting_pool().submit(contextvars.copy_context().run, _read_lineage, os.path.join(one.path, item))
            for one in batch
        ]
        concurrent.futures.wait(pending)
        for index, lineage in enumerate(pending, first):
            with contextlib.suppress(CheckpointNotFoundError):  # another item, or deleted since the root was listed
                yield index, lineage.result()


def _read_lineage(directory: str) -> Lineage | None:
    """Reads the lineage that an item records; a damaged record counts as an unrecorded save."""
    try:
        return from_metadata(read_custom_metadata(directory), path=directory)
    except CheckpointNotFoundError:
        raise
    except CheckpointError:
        return (UNRECORDED,)
