"""Lineage of a run's state around saves and restores; see `orbax_t5x.provenance`.

The primary process reads and writes it; the others receive it when they restore.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from orbax_t5x.provenance import records
from orbax_t5x.provenance.chains import ChainRecord
from orbax_t5x.provenance.runs import forget_root, known_run, note_restored, note_saved
from orbax_t5x.restoring.run_steps import StepItem, has_finished_step, lacks_record, newest_lineage, step_item

_logger = logging.getLogger(__name__)


class SavedLineage:
    """Lineage that a save records; `lineage` are the entries for the item's metadata."""

    def __init__(self, directory: epath.Path, given: Sequence[Mapping[str, Any]] | None, *, primary: bool):
        """Reads the lineage of the run so far; `given` is the `provenance=` of the save."""
        self._item = step_item(directory) if primary else None
        self._is_given = given is not None
        checked = None if given is None else records.given_lineage(given)
        known = None if self._item is None else _known_lineage(self._item, is_given=self._is_given)
        self.lineage: records.Lineage = records.extended_lineage(known, checked)

    def remember(self) -> None:
        """Sets the lineage of the run, once the save is made."""
        if self._item is not None:
            note_saved(self._item.run, self.lineage, self._item.marker, is_given=self._is_given)


def _known_lineage(item: StepItem, *, is_given: bool) -> records.Lineage | None:
    """Returns the lineage that this process knows of a run, or else that of its newest step."""
    known = known_run(item.run)
    if known is not None and not known.is_begun:
        saved = None if known.saved == item.marker else known.saved
        if not has_finished_step(item.run, saved, except_step=item.step):
            forget_root(item.run.root)  # it was deleted: another run begins here
            known = None
    if known is None:
        return newest_lineage(item.run, except_step=item.step)
    if not known.is_ambiguous:
        return known.lineage
    if not is_given and not known.is_warned:
        _logger.warning(
            "%s: this process restored steps with different histories of transforms, and which of them step %d holds "
            "(item %r) is not known: it is recorded as unrecorded, and the next restore with transforms asks. "
            "Fix: save with provenance= (handler.provenance after the restore that the state comes from, or "
            "plan.provenance; () where nothing was applied)",
            item.run.root,
            item.step,
            item.run.item,
        )
    return None


def recorded_lineage(directory: epath.Path, metadata: Mapping[str, Any]) -> records.Lineage:
    """Returns the lineage of what was restored without transforms.

    The record is kept after every kind of restore: a run that lost it would be transformed twice.
    """
    recorded = records.from_metadata(metadata.get("custom_metadata"), path=directory)
    if recorded is not None:
        return recorded
    if lacks_record(directory):
        return (records.UNRECORDED,)
    return (records.make_entry(os.fspath(directory), "orbax", ChainRecord()),)


def remember_restored(directory: epath.Path, lineage: records.Lineage) -> None:
    """Notes that a step of the run was restored: the next save continues its lineage, if it is the only one."""
    item = step_item(directory)
    if item is not None:
        note_restored(item.run, lineage)
