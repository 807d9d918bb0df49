"""Where the run is that a directory belongs to, and what its finished steps record about their lineage.

A run is a root with steps in it, and one item of each step. Only names are listed and metadata files read here; a root
may be in a bucket.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from etils import epath

from orbax_t5x.errors import CheckpointError, CheckpointGoneError, CheckpointNotFoundError
from orbax_t5x.provenance.records import KEY, UNRECORDED, Lineage, from_metadata
from orbax_t5x.provenance.runs import RunKey
from orbax_t5x.readers.detect.probe import is_file, subdirectories
from orbax_t5x.readers.orbax.metadata import METADATA_FILE
from orbax_t5x.readers.orbax.steps import COMMIT_FILE, STEP_METADATA_FILE, committed, step_of_name
from orbax_t5x.storage.limits import Limits
from orbax_t5x.storage.locations import open_store
from orbax_t5x.storage.paths import url_scheme
from orbax_t5x.storage.remote.connection import remote_session
from orbax_t5x.storage.strict_json import parse_object

# What Orbax appends to the names of directories that it has not finished.
_TEMPORARY_MARK = ".orbax-checkpoint-tmp"


class StepItem(NamedTuple):
    """One item of one step of a run.

    Attributes:
      run: the root and the item's name.
      step: the number of the step.
    """

    run: RunKey
    step: int


def step_item(directory: str | os.PathLike[str]) -> StepItem | None:
    """The run that an item's directory belongs to; None for a directory that is not an item inside a step.

    Args:
      directory: as Orbax hands it to a handler: finished, or with the suffixes of an unfinished save.
    """
    if url_scheme(os.fspath(directory)) in ("http", "https"):
        return None  # nobody's run: a web server cannot be written to
    path = epath.Path(os.fspath(directory))
    parent = path.parent
    item, step_name = (part.name.partition(_TEMPORARY_MARK)[0] for part in (path, parent))
    step = step_of_name(step_name)
    if step is None or not item or not step_name:
        return None
    # Other directories than steps have names such as `run_2024`; a step of such a name is being written by Orbax, or
    # has its marker.
    certain = step_name.isdecimal() or parent.name != step_name or url_scheme(os.fspath(path)) is not None
    if not certain and not (parent / STEP_METADATA_FILE).exists():
        return None
    return StepItem(run_of(parent.parent, item), step)


def run_of(root: str | os.PathLike[str], item: str) -> RunKey:
    """The run in a root, as `step_item` finds it from a directory below; `item` as in `RunKey`."""
    return RunKey(_resolved(root), item)


def _resolved(root: str | os.PathLike[str]) -> str:
    text = os.fspath(root)
    return text if url_scheme(text) is not None else os.path.realpath(text)


def newest_lineage(run: RunKey, *, except_step: int) -> Lineage | None:
    """The lineage of the newest finished step of a run; None where no step has a record.

    Args:
      run: whose steps.
      except_step: one that is being saved.
    """
    newest = True
    with remote_session():
        for step, path in _items(run):
            if step == except_step:
                continue
            lineage = _recorded(path)
            if lineage is not None:
                # A step without a record, in a run where an older one has one, is unrecorded.
                return lineage if newest else (UNRECORDED,)
            newest = False
    return None


def has_older_record(place: StepItem) -> bool:
    """Whether an older step of the run has a record."""
    with remote_session():
        return any(_recorded(path) is not None for step, path in _items(place.run) if step < place.step)


def _items(run: RunKey) -> Iterator[tuple[int, str]]:
    """The item's directories in the finished steps, newest first."""
    try:
        names = subdirectories(run.root).inside
    except CheckpointGoneError:
        return
    numbered = [(step, name) for name in names if (step := step_of_name(name)) is not None]
    finished = committed(
        [(step, os.path.join(run.root, name)) for step, name in sorted(numbered)],
        is_marked=lambda numbered: is_file(numbered[1], COMMIT_FILE),
        is_orbax=lambda numbered: is_file(numbered[1], STEP_METADATA_FILE),
    )
    for step, directory in reversed(finished):
        item = os.path.join(directory, run.item)
        if is_file(item, METADATA_FILE):
            yield step, item


def _recorded(item: str) -> Lineage | None:
    """The lineage that an item records.

    A step that was deleted since it was listed has none. A damaged record says no more than that there was one.
    """
    store = open_store(item)
    try:
        data = store.read_whole(METADATA_FILE, limit=Limits().index_bytes)
        if KEY.encode() not in data:  # the metadata of a large tree takes long to parse
            return None
        return from_metadata(parse_object(data, store.join(METADATA_FILE), allow_nan=True), path=item)
    except CheckpointNotFoundError:
        return None
    except CheckpointError:
        return (UNRECORDED,)
