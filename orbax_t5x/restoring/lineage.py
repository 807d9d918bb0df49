"""Lineage of a restore's source, from its and older steps' records.

`orbax_t5x.provenance.decision` decides from it which transforms apply; here the decision is raised and logged.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Sequence
from typing import Literal, NamedTuple

from orbax_t5x import on_demand
from orbax_t5x.errors import Problem, RestorePlanError
from orbax_t5x.provenance.decision import Decision, combine_decisions, decide
from orbax_t5x.provenance.records import UNRECORDED, Lineage, Records, from_metadata, has_unrecorded, of_source
from orbax_t5x.provenance.steps import RuleStep
from orbax_t5x.readers import Checkpoint
from orbax_t5x.restoring.options import RestoreOptions
from orbax_t5x.restoring.sources import OpenSources
from orbax_t5x.trees.narrow import is_mapping

# Of checkpoints of runs only.
_lacks_record = on_demand.function("orbax_t5x.restoring.run_steps", "lacks_record")

_logger = logging.getLogger(__name__)

CallerKind = Literal["own step", "start", "restore"]
"""The kinds of callers: a restore of the run's own step (a handler's, without `source=`); the same by
`restore_or_initialize`; any other restore, plan or conversion."""


class Caller(NamedTuple):
    """Caller of a restore.

    Attributes:
      kind: Kind of the caller.
      proposes: Whether transforms that would help are looked for.
      keeps_lineage: Whether the caller's next save records the lineage: the history of the run then counts without
        transforms, too.
    """

    kind: CallerKind = "restore"
    proposes: bool = True
    keeps_lineage: bool = False


ANY_RESTORE = Caller()
"""A restore or a plan that is not a handler's restore of its own step."""


@dataclasses.dataclass(frozen=True, eq=False)
class SourceHistory:
    """Records of sources about transforms applied before."""

    sources: OpenSources

    @functools.cached_property
    def recorded(self) -> Records:
        """The recorded lineage of each item by name; "" for a single item, and for named sources together."""
        return self._records(with_older_steps=False)

    def with_older_steps(self) -> Records:
        """Returns the records, with `UNRECORDED` for a lost record.

        Reads the metadata of the run's older steps, and lists the item. Nothing is read for items that have a record.
        """
        return self._records(with_older_steps=True)

    def _records(self, *, with_older_steps: bool) -> Records:
        checkpoints = self.sources.checkpoints
        if "" in checkpoints:
            return _records_of(checkpoints[""], with_older_steps=with_older_steps)
        lineages: list[Lineage] = []
        for name, checkpoint in checkpoints.items():
            records = _records_of(checkpoint, with_older_steps=with_older_steps)
            lineages += [of_source(name, lineage) for lineage in records.values() if lineage is not None]
        return {"": tuple(entry for lineage in lineages for entry in lineage) if lineages else None}

    def decide(
        self, records: Records, steps: Sequence[RuleStep], options: RestoreOptions, kind: CallerKind
    ) -> Decision:
        """Decides which transforms were applied, and the new lineage.

        Raises:
          RestorePlanError: only the caller can decide.
        """
        decisions = {
            item: decide(
                record,
                steps,
                is_resuming=None if options.is_resuming is None else bool(options.is_resuming),
                has_fallback=options.fallback is not None,
                is_start=kind == "start",
            )
            for item, record in records.items()
        }
        decision = combine_decisions(records, decisions)
        if decision.problem is not None:
            message, fix = decision.problem
            raise RestorePlanError([Problem("provenance", None, message, fix)], path=self.sources.path)
        if decision.note and steps:
            level = logging.WARNING if decision.skipped and kind == "restore" else logging.INFO
            _logger.log(level, "%s: %s", self.sources.path, decision.note)
        return decision


def keeps_found_rules(records: Records, options: RestoreOptions, kind: CallerKind) -> bool:
    """Returns True if `"auto"` stands for the rules that the records mark as found.

    Else it looks for rules: in any other restore, and to apply all rules again or for the first time.
    """
    if kind == "restore":
        return False
    lineages = [lineage for lineage in records.values() if lineage is not None]
    if options.is_resuming is False and (kind == "own step" or any(map(has_unrecorded, lineages))):
        return False
    return kind == "start" or len(lineages) == len(records)


def _records_of(checkpoint: Checkpoint, *, with_older_steps: bool) -> Records:
    items = checkpoint.metadata.get("items")
    if is_mapping(items) and len(items) > 1:
        metadata = {name: (os.path.join(checkpoint.path, name), item) for name, item in items.items()}
    else:
        metadata = {"": (checkpoint.path, checkpoint.metadata)}
    records: Records = {}
    for name, (directory, recorded) in metadata.items():
        lineage = from_metadata(recorded, path=directory)
        if lineage is None and with_older_steps and checkpoint.format == "orbax" and _lacks_record(directory):
            lineage = (UNRECORDED,)
        records[name] = lineage
    return records
