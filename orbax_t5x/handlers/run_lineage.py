"""Lineages of the states that a handler restored and saved, for the record of its next save.

They belong to the handler object (of Orbax v1: to the context's handler class). A save is of the state that was last
restored or saved in its root, if its tree has the same names, shapes and dtypes.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from orbax_t5x.provenance.records import UNRECORDED, Lineage, from_metadata, given_lineage
from orbax_t5x.restoring.plan import ExecutedPlans
from orbax_t5x.restoring.run_steps import SINGLE_ITEMS, has_other_steps, lacks_record, step_item
from orbax_t5x.trees.named_leaves import leaves_digest

_logger = logging.getLogger(__name__)

EVERY_ITEM = ""

_FIX = (
    "save with provenance= (plan.provenance, or handler.provenance after the restore that the state comes from; () "
    "where nothing was applied)"
)


class _RunItem(NamedTuple):
    """Item of a root."""

    root: str
    item: str


class _State(NamedTuple):
    """A restored or saved tree.

    Attributes:
      leaves: Digest of its names, shapes and dtypes; None for any tree.
      lineage: Rules behind it.
      plans: Number of executed plans in the process up to then.
    """

    leaves: str | None
    lineage: Lineage
    plans: int


class RestoredHistory:
    """Lineages of a handler's states.

    Attributes:
      last: Lineage of the last restore.
    """

    def __init__(self) -> None:
        self.last: Lineage = ()
        # By place: of each tree the last save, and the restores since.
        self._states: dict[_RunItem, list[_State]] = {}
        # By item: all restores, in whatever root.
        self._restored: dict[str, list[_State]] = {}
        self._own_plans: set[int] = set()
        self._lock = threading.Lock()

    @classmethod
    def of_registry(cls, registry: Any) -> RestoredHistory:
        """Returns a registry's only history, or a new history without one."""
        return cls() if registry is None else _OF_REGISTRIES.setdefault(registry, cls())

    def note(self, directory: str | os.PathLike[str], lineage: Sequence[Mapping[str, Any]], tree: Any) -> None:
        """Notes a restore of an item's directory, which `ExecutedPlans` has noted."""
        self.last = tuple(lineage)
        place, state = _place_of(directory), _State(leaves_digest(tree), self.last, len(ExecutedPlans.states))
        with self._lock:
            if lineage:
                self._own_plans.add(state.plans)
            item = EVERY_ITEM if place is None else place.item
            self._restored[item] = _appended(self._restored.get(item, []), state)
            if place is not None:
                self._states[place] = _appended(self._states.get(place, []), state)

    def note_stock(self, directory: epath.Path, metadata: Mapping[str, Any], tree: Any) -> None:
        """Notes a restore by stock Orbax, without transforms, by the item's metadata."""
        recorded = from_metadata(metadata.get("custom_metadata"), path=directory)
        if recorded is None:
            recorded = (UNRECORDED,) if lacks_record(directory) else ()
        ExecutedPlans.note(tree, recorded)
        self.note(directory, recorded, tree)

    def begin(self, root: str, item: str, lineage: Lineage) -> None:
        """Sets the lineage of a run that begins; `EVERY_ITEM` for all items."""
        name = _history_name(item)
        with self._lock:
            for place in [place for place in self._states if place.root == root and name in (EVERY_ITEM, place.item)]:
                del self._states[place]
            if name == EVERY_ITEM:
                self._restored.clear()
            self._restored[name] = [_State(None, lineage, 0)]

    def to_save(
        self, directory: epath.Path, provenance: Sequence[Mapping[str, Any]] | None, tree: Any, *, primary: bool
    ) -> Lineage:
        """Returns the lineage that a save records; `provenance` is the argument of the save."""
        if provenance is not None:
            return given_lineage(provenance)
        place, leaves = _place_of(directory), leaves_digest(tree)
        with self._lock:
            states = [] if place is None else self._states.get(place, [])
            states = [state for state in states if state.leaves == leaves]
        if states and not _has_other_plan(states[-1]):
            if not _are_equal([state.lineage for state in states]):
                _logger.warning(
                    "%s: this handler restored or saved such states with different transforms behind them, and the "
                    "last one is recorded. Fix, if another one is saved: %s",
                    directory,
                    _FIX,
                )
            return states[-1].lineage
        lineages: list[Lineage] = []
        step = step_item(directory) if primary else None
        if not states and (step is None or not has_other_steps(step)):
            lineages = self._lineages_of_restores(place, leaves)
        if lineages and _are_equal(lineages):
            return lineages[-1]
        _logger.warning(
            "%s: nobody knows which transforms the saved state has behind it: it is none that this handler restored or "
            "saved here, or another one was restored since. The save is unrecorded, and the next restore with "
            "transforms asks. Fix: %s",
            directory,
            _FIX,
        )
        return (UNRECORDED,)

    def _lineages_of_restores(self, place: _RunItem | None, leaves: str) -> list[Lineage]:
        """Returns the lineages of restores in any root; none if another plan may have made the state."""
        with self._lock:
            items = list(self._restored) if place is None else [place.item, EVERY_ITEM]
            restored = [state for item in items for state in self._restored.get(item, [])]
            has_other_plans = len(ExecutedPlans.states) > len(self._own_plans)
        lineages = [state.lineage for state in restored if state.leaves in (None, leaves)]
        if lineages or has_other_plans:
            return lineages
        return [state.lineage for state in restored] or [()]

    def note_saved(self, directory: epath.Path, lineage: Sequence[Mapping[str, Any]], tree: Any) -> None:
        """Notes a save: the next one of such a tree has the same lineage, unless it is told another."""
        place = _place_of(directory)
        if place is None:
            return
        saved = _State(leaves_digest(tree), tuple(lineage), len(ExecutedPlans.states))
        with self._lock:
            states = [state for state in self._states.get(place, []) if state.leaves != saved.leaves]
            self._states[place] = [*states, saved]


# A registry that is given a class makes a handler for saves and another for restores.
_OF_REGISTRIES: weakref.WeakKeyDictionary[Any, RestoredHistory] = weakref.WeakKeyDictionary()


def _place_of(directory: str | os.PathLike[str]) -> _RunItem | None:
    step = step_item(directory)
    return None if step is None else _RunItem(step.root, _history_name(step.item))


def _appended(states: list[_State], state: _State) -> list[_State]:
    return [*(earlier for earlier in states if earlier[:2] != state[:2]), state]


def _has_other_plan(state: _State) -> bool:
    """Returns True if a plan led to such a tree since, with other transforms behind it."""
    later = ExecutedPlans.states[state.plans :]
    return any(leaves == state.leaves and lineage != state.lineage for leaves, lineage in later)


def _are_equal(lineages: Sequence[Lineage]) -> bool:
    return all(lineage == lineages[0] for lineage in lineages)


def _history_name(item: str) -> str:
    return SINGLE_ITEMS[0] if item in SINGLE_ITEMS else item
