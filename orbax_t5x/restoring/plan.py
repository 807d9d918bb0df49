"""Restore plan for users: data that `show` prints and `execute` runs."""

from __future__ import annotations

import logging
from typing import Any

from orbax_t5x.concurrency import guarded
from orbax_t5x.lazy import Verify
from orbax_t5x.restoring.executor import execute_plan
from orbax_t5x.restoring.options import BroadcastMode, RestoreOptions
from orbax_t5x.restoring.plan_data import PlanData, RestoreReport
from orbax_t5x.restoring.show.as_data import to_json
from orbax_t5x.restoring.show.compare import plan_diff
from orbax_t5x.restoring.show.explain import explain_leaf
from orbax_t5x.restoring.show.filled import warning_of_filled
from orbax_t5x.restoring.show.log_lines import about_to_restore, has_restored
from orbax_t5x.restoring.show.table import plan_html, plan_table
from orbax_t5x.text.progress_bar import Progress, shown_progress

_logger = logging.getLogger(__name__)


class RestorePlan(PlanData):
    """Plan of a restore; made by `orbax_t5x.plan_restore`, run by `execute`.

    Attributes:
      entries: one per leaf of the target, in its order.
      unused: names of the checkpoint's leaves that no rule took out and that have no place in the target.
      dropped: names that a transform, a placeholder or an `InferenceState` took out.
      warnings: rules that are shadowed, repeated or unused where that is allowed, and what a reader warned of.
      provenance: what was applied to this state, oldest first; handlers write it beside what they save.
      filled: names of the target's leaves that come from the fallback.
      report: after `execute`, what was read and checked.

    Example:
      >>> plan = ot.plan_restore(bundle, None)
      >>> len(plan.entries), plan.unused
      (143, ())
      >>> plan.execute()["shared"]["embedding"].shape
      (128, 16)
    """

    def execute(
        self,
        *,
        verify: Verify = RestoreOptions.verify,
        memory_limit_bytes: int | None = RestoreOptions.memory_limit_bytes,
        progress: Progress | None = RestoreOptions.progress,
        broadcast: BroadcastMode = RestoreOptions.broadcast,
    ) -> Any:
        """Reads what the plan says and returns the target's structure, filled; arguments as for `orbax_t5x.restore`."""
        return self.run(RestoreOptions.among(locals()))

    def place_of_errors(self) -> tuple[str | None, str | None]:
        """Returns the paths of the checkpoints, and no leaf."""
        return ", ".join(checkpoint.path for checkpoint in self.checkpoints.values()) or None, None

    @guarded
    def run(self, options: RestoreOptions) -> Any:
        """Runs `execute` with its keywords as one object."""
        if warning := warning_of_filled(self):
            _logger.warning("%s", warning)
        # The lines count through the whole plan.
        is_logged = _logger.isEnabledFor(logging.INFO)
        if is_logged:
            _logger.info("%s", about_to_restore(self))
        with shown_progress(options.progress, "restoring") as on_progress:
            values, report = execute_plan(self, options, on_progress)
        self.report: RestoreReport | None = report
        restored = self.target.rebuild(values)
        if is_logged:
            _logger.info("%s", has_restored(self, report))
        return restored

    def explain(self, leaf: str) -> str:
        """Explains the source of one target leaf, or the use of one leaf of the checkpoint.

        Raises:
          KeyError: neither the target nor the checkpoint has the name; the text gives the closest ones.
        """
        return explain_leaf(self, leaf)

    def diff(self, other: RestorePlan) -> str:
        """Compares two plans; returns the leaves that they treat differently as text, empty when there are none."""
        return plan_diff(self, other)

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as data that `json.dumps` takes."""
        return to_json(self)

    def __str__(self) -> str:
        return plan_table(self)

    def _repr_html_(self) -> str:
        return plan_html(self)

    def __repr__(self) -> str:
        counts = {
            action: sum(entry.action == action for entry in self.entries)
            for action in ("read", "value", "fallback", "keep")
        }
        actions = ", ".join(f"{count} {action}" for action, count in counts.items() if count)
        return f"<RestorePlan: {actions or 'nothing to do'}; {len(self.unused)} unused, {len(self.dropped)} dropped>"
