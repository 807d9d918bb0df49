"""Decides before an execution, from the shardings of this process's target alone: nothing is read or exchanged."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from orbax_t5x.errors import RestorePlanError
from orbax_t5x.multihost.coordination import has_backend
from orbax_t5x.restoring.broadcast.decision import ReadDecision
from orbax_t5x.restoring.broadcast.needs import is_text, needs_of_shardings
from orbax_t5x.restoring.broadcast.stores import Stores
from orbax_t5x.restoring.options import MEMORY_LIMIT_BYTES
from orbax_t5x.restoring.plan_data import PlanData


def decisions_of(plan: PlanData) -> Mapping[str, ReadDecision]:
    """Returns what `broadcast="auto"` decides about each entry that is read, by name; empty with one process.

    After an execution these are its own decisions, from what all processes needed.
    """
    if plan.decisions is None:
        processes = jax.process_count() if has_backend() else 1
        if processes == 1:
            return {}
        from orbax_t5x.restoring.broadcast.schedule import schedule_broadcast  # noqa: PLC0415  (several processes only)

        arrays = [entry for entry in plan.entries if entry.view is not None and not is_text(entry)]
        needs = needs_of_shardings(arrays, processes)
        try:
            stores = Stores.of_plan(plan)
        except RestorePlanError:  # which an execution raises that has to decide
            return {}
        plan.decisions = schedule_broadcast(needs, processes, MEMORY_LIMIT_BYTES, stores).decisions
    return plan.decisions
