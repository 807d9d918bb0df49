"""History of a handler's restores, for the record of its saves.

It belongs to the handler object (of Orbax v1: to the context's handler class), by item.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from orbax_t5x.provenance import records
from orbax_t5x.restoring.run_steps import SINGLE_ITEMS, StepItem, lacks_record, newest_lineage, step_item

_logger = logging.getLogger(__name__)

EVERY_ITEM = ""


class RestoredHistory:
    """Histories that the restores of a handler led to.

    Attributes:
      last: the lineage of the last restore.
    """

    def __init__(self) -> None:
        self.last: records.Lineage = ()
        # By item; None after restores that led to different histories.
        self._led_to: dict[str, records.Lineage | None] = {}
        # The last save of each item: a job saves often, and its root is listed then, but no record is read again.
        self._saved: dict[str, tuple[StepItem, records.Lineage]] = {}
        self._lock = threading.Lock()

    @classmethod
    def of_registry(cls, registry: Any) -> RestoredHistory:
        """Returns a registry's only history, or a new history without one."""
        return cls() if registry is None else _OF_REGISTRIES.setdefault(registry, cls())

    def note(self, directory: str | os.PathLike[str], lineage: records.Lineage) -> None:
        """Notes a restore; `directory` is an item's."""
        self.last = tuple(lineage)
        self.note_item(_item_name(directory), self.last)

    def note_item(self, item: str, lineage: records.Lineage) -> None:
        """Notes a restore of an item."""
        item = _history_of(item)
        with self._lock:
            known = self._led_to.setdefault(item, lineage)
            if known is None:
                return
            if records.same_history(known, lineage):
                answers = (entry for entry in lineage if entry.get("is_resuming") and entry not in known)
                self._led_to[item] = (*known, *answers)
            else:
                self._led_to[item] = None

    def begin(self, item: str, lineage: records.Lineage) -> None:
        """Sets the lineage of a run that begins."""
        with self._lock:
            if item == EVERY_ITEM:
                self._led_to.clear()
            self._led_to[_history_of(item)] = lineage

    def to_save(
        self, directory: epath.Path, given: Sequence[Mapping[str, Any]] | None, *, primary: bool
    ) -> records.Lineage:
        """Returns the lineage that a save records; `given` is its `provenance=`."""
        checked = None if given is None else records.given_lineage(given)
        item = _item_name(directory)
        with self._lock:
            keys = self._led_to.keys() if item == EVERY_ITEM else self._led_to.keys() & {item, EVERY_ITEM}
            led_to = [self._led_to[key] for key in sorted(keys, reverse=True)]
        known = led_to[0] if led_to else None
        if any(one is None or known is None or not records.same_history(known, one) for one in led_to):
            known = None
        if not led_to:
            step = step_item(directory) if primary else None
            known = None if step is None else newest_lineage(step, known=self._saved.get(item))
        elif known is None and checked is None:
            _logger.warning(
                "%s: this handler restored states with different histories of transforms, and which of them is saved "
                "is not known: the save is unrecorded, and the next restore with transforms asks. "
                "Fix: save with provenance= (handler.provenance after the restore that the state comes from, or "
                "plan.provenance; () where nothing was applied)",
                directory,
            )
        elif checked == () and any(map(records.applied_rules, known or ())):
            _logger.warning(
                "%s: provenance=() records that nothing was applied, and this handler's restores led to a state with "
                "transforms: if it is the state that is saved, the next restore applies them again. "
                "Fix: save without provenance=, or with handler.provenance",
                directory,
            )
        return records.extended_lineage(known, checked)

    def note_saved(self, directory: epath.Path, lineage: Sequence[Mapping[str, Any]], *, is_given: bool) -> None:
        """Notes a save, so that the root's newest step has a record."""
        if (step := step_item(directory)) is not None:
            with self._lock:
                self._saved[_item_name(directory)] = step, tuple(lineage)
        if not is_given and tuple(lineage) != (records.UNRECORDED,):
            return
        item = _item_name(directory)
        with self._lock:
            for key in [key for key in self._led_to if EVERY_ITEM in (item, key) or key == item]:
                del self._led_to[key]


# A registry that is given a class makes a handler for saves and another for restores.
_OF_REGISTRIES: weakref.WeakKeyDictionary[Any, RestoredHistory] = weakref.WeakKeyDictionary()


def _item_name(directory: str | os.PathLike[str]) -> str:
    step = step_item(directory)
    return EVERY_ITEM if step is None else _history_of(step.item)


def _history_of(item: str) -> str:
    return SINGLE_ITEMS[0] if item in SINGLE_ITEMS else item


def recorded_lineage(directory: epath.Path, metadata: Mapping[str, Any]) -> records.Lineage:
    """Returns the lineage of a state that was restored without transforms."""
    recorded = records.from_metadata(metadata.get("custom_metadata"), path=directory)
    if recorded is not None:
        return recorded
    if lacks_record(directory):
        return (records.UNRECORDED,)
    return (records.make_entry(os.fspath(directory), "orbax", ()),)
