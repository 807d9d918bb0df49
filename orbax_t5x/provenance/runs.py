"""Table of the runs that this process saves and restores: one lineage per root and item.

The lineage belongs to the directory, not to an object: any number of managers and handlers that work on one root and
item share it.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import NamedTuple

from orbax_t5x.provenance.records import Lineage, same_history

EVERY_ITEM = ""


class RunKey(NamedTuple):
    """Key of a run: its resolved root, or the root's URL, and the name of the item in each step.

    `EVERY_ITEM` stands for each item of the root that has no lineage of its own.
    """

    root: str
    item: str


class StepMarker(NamedTuple):
    """File that exists once a step is finished: the step's directory or URL, and the file's name."""

    step: str
    name: str


@dataclasses.dataclass(frozen=True)
class RunState:
    """Entry of the table.

    Attributes:
      lineage: of the state that the next save holds.
      is_begun: the run begins in this process, and no step of it was saved yet.
      is_restored: this process restored a step of the run.
      is_ambiguous: this process restored steps that lead to different lineages: which of the states the next save
        holds is not known.
      is_warned: a warning about that was logged.
      saved: the step that this process saved last.
    """

    lineage: Lineage
    is_begun: bool = False
    is_restored: bool = False
    is_ambiguous: bool = False
    is_warned: bool = False
    saved: StepMarker | None = None


_lock = threading.Lock()
_runs: dict[RunKey, RunState] = {}


def known_run(run: RunKey) -> RunState | None:
    """Returns the entry of a run; None where this process knows no step of it."""
    with _lock:
        return _known_state(run)


def _known_state(run: RunKey) -> RunState | None:
    return _runs.get(run, _runs.get(RunKey(run.root, EVERY_ITEM)))


def note_restored(run: RunKey, lineage: Lineage) -> None:
    """Notes the restore of a step of the run.

    The first one sets the lineage; a later one that leads to another history makes the entry ambiguous, and answers
    that the caller gave in one that leads to the same are added.
    """
    with _lock:
        known = _known_state(run)
        if known is None or not known.is_restored:
            saved = None if known is None else known.saved
            _runs[run] = RunState(tuple(lineage), is_restored=True, saved=saved)
        elif same_history(known.lineage, lineage):
            answers = (entry for entry in lineage if entry.get("is_resuming") and entry not in known.lineage)
            _runs[run] = dataclasses.replace(known, lineage=(*known.lineage, *answers))
        else:
            _runs[run] = dataclasses.replace(known, is_ambiguous=True)


def note_saved(run: RunKey, lineage: Lineage, saved: StepMarker | None = None, *, is_given: bool) -> None:
    """Notes a save; `is_given`: the caller passed the lineage, which ends an ambiguity."""
    with _lock:
        known = _known_state(run) or RunState(())
        ambiguous = known.is_ambiguous and not is_given
        _runs[run] = RunState(tuple(lineage), False, known.is_restored, ambiguous, ambiguous, saved)


def begin_run(run: RunKey, lineage: Lineage) -> None:
    """Sets the lineage of a run that begins, and forgets that of an earlier one at the same path."""
    with _lock:
        for known in [known for known in _runs if known.root == run.root and run.item in (EVERY_ITEM, known.item)]:
            del _runs[known]
        _runs[run] = RunState(tuple(lineage), is_begun=True)


def forget_root(root: str) -> None:
    """Forgets all items of a root that was deleted."""
    with _lock:
        for known in [known for known in _runs if known.root == root]:
            del _runs[known]


def forget_all() -> None:
    """Forgets every run, as a new process would."""
    with _lock:
        _runs.clear()
