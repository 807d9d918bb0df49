"""Table of the runs that this process saves and restores: one lineage per root and item.

The lineage belongs to the directory, not to an object: any number of managers and handlers that work on one root and
item share it.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from orbax_t5x.provenance.records import Lineage

EVERY_ITEM = ""


class RunKey(NamedTuple):
    """Key of a run.

    Attributes:
      root: the resolved root directory, or its URL.
      item: the item's name in each step; `EVERY_ITEM` for each item of the root that has no lineage of its own.
    """

    root: str
    item: str


_lock = threading.Lock()
_lineages: dict[RunKey, Lineage] = {}


def known_lineage(run: RunKey) -> Lineage | None:
    """Returns the lineage of a run's state; None where this process knows no step of it."""
    with _lock:
        return _lineages.get(run, _lineages.get(RunKey(run.root, EVERY_ITEM)))


def remember(run: RunKey, lineage: Lineage) -> None:
    """Sets the lineage of a run's state."""
    with _lock:
        _lineages[run] = tuple(lineage)


def begin(run: RunKey, lineage: Lineage) -> None:
    """Sets the lineage of a run that begins, and forgets that of an earlier one at the same path."""
    with _lock:
        for known in [known for known in _lineages if known.root == run.root and run.item in (EVERY_ITEM, known.item)]:
            del _lineages[known]
        _lineages[run] = tuple(lineage)


def forget_all() -> None:
    """Forgets every run, as a new process would."""
    with _lock:
        _lineages.clear()
