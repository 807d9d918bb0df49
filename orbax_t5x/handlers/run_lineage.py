"""The lineage of a run's state, around its saves and its restores; see `orbax_t5x.provenance`.

The primary process reads it and writes it; the others learn it when they restore.
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
    """The lineage that a save records.

    Attributes:
      lineage: what goes into the item's metadata.
    """

    def __init__(self, directory: epath.Path, given: Sequence[Mapping[str, Any]] | None, *, primary: bool):
        """Finds it.

        Args:
          directory: of the item that is being saved.
          given: `provenance=` of the save.
          primary: whether this is the process that writes metadata.
        """
        place = step_item(directory) if primary else None
        checked = None if given is None else records.given_lineage(given)
        self._place = place
        self.lineage: records.Lineage = records.extended(None if place is None else _known(place), checked)

    def remember(self) -> None:
        """Makes it the run's: the save is made."""
        if self._place is not None:
            remember(self._place.run, self.lineage)


def _known(place: StepItem) -> records.Lineage | None:
    """What happened to the state of a run, as far as this process, or else its newest step, knows."""
    known = known_lineage(place.run)
    return newest_lineage(place.run, except_step=place.step) if known is None else known


def recorded_lineage(directory: epath.Path, metadata: Mapping[str, Any]) -> records.Lineage:
    """The lineage of what was restored without transforms.

    The record is carried along whoever restored: a run that loses it would be transformed twice.

    Args:
      directory: of the item.
      metadata: the contents of its metadata file.
    """
    recorded = records.from_metadata(metadata.get("custom_metadata"), path=directory)
    place = step_item(directory)
    if recorded is None and place is not None and has_older_record(place):
        return (records.UNRECORDED,)
    if recorded is None:
        return (records.make_entry(os.fspath(directory), "orbax", ChainRecord()),)
    return recorded


def remember_restored(directory: epath.Path, lineage: records.Lineage) -> None:
    """Notes that a step of the run itself was restored: the next save goes on from it."""
    place = step_item(directory)
    if place is not None:
        remember(place.run, lineage)
