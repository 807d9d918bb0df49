"""Lineage of a restore's source, from its and older steps' records.

`orbax_t5x.provenance.decision` decides from it whether transforms apply; here the decision is raised and logged.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from orbax_t5x import on_demand
from orbax_t5x.errors import Problem, RestorePlanError
from orbax_t5x.provenance.chains import record_rules
from orbax_t5x.provenance.question import CallerKind, Decision, LeadsToTarget, ResumeContext, combine_decisions
from orbax_t5x.provenance.records import UNRECORDED, Records, from_metadata
from orbax_t5x.restoring.chains import OneSource
from orbax_t5x.restoring.options import RestoreOptions
from orbax_t5x.restoring.sources import OpenSources
from orbax_t5x.trees.narrow import is_mapping

# Of restores with transforms only.
_decide: Callable[..., Decision] = on_demand.function("orbax_t5x.provenance.named_sources", "decide")
# Of checkpoints of runs only.
_lacks_record = on_demand.function("orbax_t5x.restoring.run_steps", "lacks_record")
_opened_once = on_demand.function("orbax_t5x.multihost.openings", "opened_once")  # several processes only

_logger = logging.getLogger(__name__)


LeadsOf = Callable[[OneSource | None], LeadsToTarget | None]
"""Returns whether transforms lead to the target: those of a named source on its own leaves, or with None all."""


def _unchanged(records: Records) -> Records:
    return records


def _without_target(one: OneSource | None) -> None:
    return None


class Caller(NamedTuple):
    """Caller of a restore; see `orbax_t5x.provenance.decision` for its kind.

    `agree` returns the records that all processes of a collective restore use; each process calls it once, with what it
    read. `proposes` where transforms that would help are looked for. With `keeps_lineage` the lineage of what is
    restored is recorded with what the caller saves next: the history of the run then counts without transforms, too.
    """

    kind: CallerKind = "restore"
    agree: Callable[[Records], Records] = _unchanged
    proposes: bool = True
    keeps_lineage: bool = False


ANY_RESTORE = Caller()
"""A restore or a plan that is not a handler's restore of its own step."""


@dataclasses.dataclass(frozen=True)
class SourceHistory:
    """Records of sources about transforms applied before."""

    sources: OpenSources

    @functools.cached_property
    def recorded(self) -> Records:
        """The recorded lineage of each item by name; "" for a single item."""
        checkpoint = self.sources.checkpoints.get("")
        if checkpoint is None:
            return {"": None}  # named sources begin a new lineage
        items = checkpoint.metadata.get("items")
        if not is_mapping(items) or len(items) < 2:
            return {"": from_metadata(checkpoint.metadata, path=checkpoint.path)}
        return {name: from_metadata(item, path=os.path.join(checkpoint.path, name)) for name, item in items.items()}

    def with_older_steps(self) -> Records:
        """Returns the records, with `UNRECORDED` for a lost record.

        Reads the metadata of the run's older steps, and lists the item. Nothing is read for items that have a record.
        """
        checkpoint = self.sources.checkpoints.get("")
        if checkpoint is None or checkpoint.format != "orbax":
            return self.recorded
        missing = [name for name, lineage in self.recorded.items() if lineage is None]
        directories = {name: os.path.join(checkpoint.path, name) if name else checkpoint.path for name in missing}
        older = [name for name, directory in directories.items() if _lacks_record(directory)]
        return {**self.recorded, **dict.fromkeys(older, (UNRECORDED,))}

    def with_older_steps_once(self) -> Records:
        """Returns the same; a single process of a job reads."""
        if not jax.distributed.is_initialized():
            return self.with_older_steps()
        paths = [checkpoint.shared_path for checkpoint in self.sources.checkpoints.values()]
        return _opened_once(["history", *paths], ", ".join(paths), self.with_older_steps)

    def decide(
        self,
        records: Records,
        transforms: Sequence[Callable[..., Any]],
        options: RestoreOptions,
        kind: CallerKind,
        leads: LeadsOf = _without_target,
    ) -> Decision:
        """Decides which transforms were applied, and the new lineage.

        Those of open named sources are decided by the record of each.

        A RestorePlanError where only the caller can decide.
        """
        checkpoints = self.sources.checkpoints
        single = checkpoints.get("")
        of_sources = {one.source: one for one in transforms if isinstance(one, OneSource)}
        context = ResumeContext(
            chain=record_rules(transforms),
            caller=kind,
            is_resuming=None if options.is_resuming is None else bool(options.is_resuming),
            has_fallback=options.fallback is not None,
            source={name: one.path for name, one in checkpoints.items()} if single is None else single.path,
            format={name: one.format for name, one in checkpoints.items()} if single is None else single.format,
            transforms=tuple(transforms),
            leads_to_target=leads(None),
            source_leads_to_target=lambda name: leads(of_sources[name]) if name in of_sources else None,
        )
        decision = combine_decisions({item: _decide(record, context) for item, record in records.items()})
        path = self.sources.path
        if decision.problem is not None:
            message, fix = decision.problem
            raise RestorePlanError([Problem("provenance", None, message, fix)], path=path)
        for warning in decision.warnings:
            _logger.warning("%s: %s", path, warning)
        if decision.note:
            _logger.info("%s: %s", path, decision.note)
        if single is not None or decision.is_resuming or options.is_resuming is not None:
            return decision
        parts, warnings = dict[int, Sequence[int]](), list(decision.warnings)
        for at, one in enumerate(transforms):
            if isinstance(one, OneSource):
                own = SourceHistory(OpenSources({"": checkpoints[one.source]}))
                found = own.decide(own.with_older_steps_once(), one.steps, options, kind, lambda _, one=one: leads(one))
                parts[at] = range(len(one.steps)) if found.is_resuming else found.skipped
                warnings += [f"source {one.source!r}: {warning}" for warning in found.warnings]
        # The lineage has all of them, of which some may have been applied before.
        unmatched = None if any(parts.values()) else decision.unmatched
        return dataclasses.replace(decision, parts=parts, warnings=tuple(warnings), unmatched=unmatched)
