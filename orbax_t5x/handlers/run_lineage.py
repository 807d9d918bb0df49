"""Lineage of a run's state around saves and restores; see `orbax_t5x.provenance`.

The primary process reads and writes it; the others receive it when they restore.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from orbax_t5x.provenance import records
from orbax_t5x.provenance.chains import ChainRecord
from orbax_t5x.provenance.runs import known_lineage, remember
from orbax_t5x.restoring.run_steps import StepItem, has_older_record, newest_lineage, step_item


class SavedLineage:
    """Lineage that a save records.

    Attributes:
      lineage: the entries for the item's metadata.
    """

    def __init__(self, directory: epath.Path, given: Sequence[Mapping[str, Any]] | None, *, primary: bool):
        """Reads the lineage of the run so far.

        Args:
          directory: of the item that is being saved.
          given: `provenance=` of the save.
          primary: whether this is the process that writes metadata.
        """
        item = step_item(directory) if primary else None
        checked = None if given is None else records.given_lineage(given)
        self._item = item
        self.lineage: records.Lineage = records.extended(None if item is None else _known(item), checked)

    def remember(self) -> None:
        """Sets the lineage of the run, once the save is made."""
        if self._item is not None:
            remember(self._item.run, self.lineage)


def _known(item: StepItem) -> records.Lineage | None:
    """Returns the lineage that this process knows of a run, or else that of its newest step."""
    known = known_lineage(item.run)
    return newest_lineage(item.run, except_step=item.step) if known is None else known


def recorded_lineage(directory: epath.Path, metadata: Mapping[str, Any]) -> records.Lineage:
    """Returns the lineage of what was restored without transforms.

    The record is kept after every kind of restore: a run that lost it would be transformed twice.

    Args:
      directory: of the item.
      metadata: the contents of its metadata file.
    """
    recorded = records.from_metadata(metadata.get("custom_metadata"), path=directory)
    if recorded is not None:
        return recorded
    if has_older_record(directory):
        return (records.UNRECORDED,)
    return (records.make_entry(os.fspath(directory), "orbax", ChainRecord()),)


def remember_restored(directory: epath.Path, lineage: records.Lineage) -> None:
    """Sets the lineage of a run to that of its own step that was restored: the next save continues it."""
    item = step_item(directory)
    if item is not None:
        remember(item.run, lineage)
