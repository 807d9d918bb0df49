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

import jax
from etils import epath

from orbax_t5x.provenance.records import UNRECORDED, Lineage, from_metadata, given_lineage
from orbax_t5x.restoring.plan import ExecutedPlans
from orbax_t5x.restoring.run_steps import SINGLE_ITEMS, has_other_steps, lacks_record, step_item
from orbax_t5x.trees.named_leaves import is_train_state
from orbax_t5x.trees.pytree_names import leaf_name

_logger = logging.getLogger(__name__)

EVERY_ITEM = ""

_FIX = (
    "save with provenance= (plan.provenance, or handler.provenance after the restore that the state comes from; () "
    "where nothing was applied)"
)

_Leaves = frozenset[tuple[str, tuple[int, ...], str]]


class _Place(NamedTuple):
    """Item of a root."""

    root: str
    item: str


class _State(NamedTuple):
    """Names, shapes and dtypes of a restored or saved tree, and the rules behind it."""

    leaves: _Leaves
    lineage: Lineage


class RestoredHistory:
    """Lineages of a handler's states.

    Attributes:
      last: Lineage of the last restore.
    """

    def __init__(self) -> None:
        self.last: Lineage = ()
        # Of each tree the last save, and the restores since.
        self._states: dict[_Place, list[_State]] = {}
        self._restored: dict[str, list[Lineage]] = {}
        self._plans = 0
        self._lock = threading.Lock()

    @classmethod
    def of_registry(cls, registry: Any) -> RestoredHistory:
        """Returns a registry's only history, or a new history without one."""
        return cls() if registry is None else _OF_REGISTRIES.setdefault(registry, cls())

    def note(
        self,
        directory: str | os.PathLike[str],
        lineage: Sequence[Mapping[str, Any]],
        tree: Any,
        *,
        is_planned: bool = True,
    ) -> None:
        """Notes a restore.

        Args:
          directory: the item's.
          lineage: rules behind the restored state.
          tree: the restored state.
          is_planned: whether a plan of this package restored it.
        """
        self.last = tuple(lineage)
        place = _place_of(directory)
        with self._lock:
            self._plans += bool(lineage) and is_planned
            self._restored.setdefault(_item_of(place), []).append(self.last)
            if place is not None:
                self._states.setdefault(place, []).append(_State(_leaves_of(tree), self.last))

    def begin(self, root: str, item: str, lineage: Lineage) -> None:
        """Sets the lineage of a run that begins; `EVERY_ITEM` for all items."""
        name = _history_name(item)
        with self._lock:
            for place in [place for place in self._states if place.root == root and name in (EVERY_ITEM, place.item)]:
                del self._states[place]
            if name == EVERY_ITEM:
                self._restored.clear()
            self._restored[name] = [lineage]

    def to_save(
        self, directory: epath.Path, provenance: Sequence[Mapping[str, Any]] | None, tree: Any, *, primary: bool
    ) -> Lineage:
        """Returns the lineage that a save records; `provenance` is the argument of the save."""
        if provenance is not None:
            return given_lineage(provenance)
        lineages = self._lineages_of(_place_of(directory), _leaves_of(tree))
        step = step_item(directory) if primary and not lineages else None
        if not lineages and (step is None or not has_other_steps(step)):
            lineages = self._restored_lineages(_place_of(directory))
            lineages = lineages if _are_equal(lineages) else []
        if not lineages:
            _logger.warning(
                "%s: nobody knows which transforms the saved state has behind it: this handler neither restored nor "
                "saved such a state here, or it restored several. The save is unrecorded, and the next restore with "
                "transforms asks. Fix: %s",
                directory,
                _FIX,
            )
            return (UNRECORDED,)
        if not _are_equal(lineages):
            _logger.warning(
                "%s: this handler restored or saved states of this form with different transforms behind them, and "
                "the last one is recorded. Fix, if another one is saved: %s",
                directory,
                _FIX,
            )
        return lineages[-1]

    def _lineages_of(self, place: _Place | None, leaves: _Leaves) -> list[Lineage]:
        with self._lock:
            states = [] if place is None else self._states.get(place, [])
            return [state.lineage for state in states if state.leaves == leaves]

    def _restored_lineages(self, place: _Place | None) -> list[Lineage]:
        """Returns the lineages to which restores led; none of a state that another plan may have made."""
        with self._lock:
            items = self._restored if place is None else (place.item, EVERY_ITEM)
            lineages = [lineage for item in items for lineage in self._restored.get(item, ())]
            has_other_plans = ExecutedPlans.with_rules > self._plans
        return lineages if lineages or has_other_plans else [()]

    def note_saved(self, directory: epath.Path, lineage: Sequence[Mapping[str, Any]], tree: Any) -> None:
        """Notes a save: the next one of such a tree has the same lineage, unless it is told another."""
        place = _place_of(directory)
        if place is None:
            return
        leaves = _leaves_of(tree)
        with self._lock:
            others = [state for state in self._states.get(place, ()) if state.leaves != leaves]
            self._states[place] = [*others, _State(leaves, tuple(lineage))]


# A registry that is given a class makes a handler for saves and another for restores.
_OF_REGISTRIES: weakref.WeakKeyDictionary[Any, RestoredHistory] = weakref.WeakKeyDictionary()


def _place_of(directory: str | os.PathLike[str]) -> _Place | None:
    step = step_item(directory)
    return None if step is None else _Place(step.root, _history_name(step.item))


def _item_of(place: _Place | None) -> str:
    return EVERY_ITEM if place is None else place.item


def _are_equal(lineages: Sequence[Lineage]) -> bool:
    return all(lineage == lineages[0] for lineage in lineages)


def _history_name(item: str) -> str:
    return SINGLE_ITEMS[0] if item in SINGLE_ITEMS else item


def _leaves_of(tree: Any) -> _Leaves:
    tree = tree.state_dict() if is_train_state(tree) else tree
    return frozenset(
        (leaf_name(path), tuple(getattr(leaf, "shape", ())), str(getattr(leaf, "dtype", type(leaf).__name__)))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    )


def recorded_lineage(directory: epath.Path, metadata: Mapping[str, Any]) -> Lineage:
    """Returns the lineage of a state that was restored without transforms."""
    recorded = from_metadata(metadata.get("custom_metadata"), path=directory)
    if recorded is None:
        return (UNRECORDED,) if lacks_record(directory) else ()
    return recorded
