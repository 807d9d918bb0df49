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
from orbax_t5x.provenance.records import UNRECORDED, Entry, Lineage, Records, from_metadata, make_entry
from orbax_t5x.restoring.options import RestoreOptions
from orbax_t5x.restoring.sources import OneSource, OpenSources
from orbax_t5x.trees.narrow import is_mapping

# Of restores with transforms only.
_decide: Callable[..., Decision] = on_demand.function("orbax_t5x.provenance.named_sources", "decide")
_of_source: Callable[..., Lineage] = on_demand.function("orbax_t5x.provenance.named_sources", "of_source")
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


@dataclasses.dataclass(frozen=True, eq=False)
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
        *,
        once: bool = False,
    ) -> Decision:
        """Decides which transforms were applied, and the new lineage.

        The rules of named sources are decided by the record of each, which a single process of a job reads with `once`.

        A RestorePlanError where only the caller can decide.
        """
        single = self.sources.checkpoints.get("")
        if single is None:
            return self._decide_each(transforms, options, kind, leads, once=once)
        of_sources = {one.source: one for one in transforms if isinstance(one, OneSource)}
        context = ResumeContext(
            chain=record_rules(transforms),
            caller=kind,
            is_resuming=None if options.is_resuming is None else bool(options.is_resuming),
            has_fallback=options.fallback is not None,
            source=single.path,
            format=single.format,
            transforms=tuple(transforms),
            leads_to_target=leads(None),
            source_leads_to_target=lambda name: leads(of_sources[name]),
        )
        decision = combine_decisions({item: _decide(record, context) for item, record in records.items()})
        if decision.problem is not None:
            message, fix = decision.problem
            raise RestorePlanError([Problem("provenance", None, message, fix)], path=single.path)
        for warning in decision.warnings:
            _logger.warning("%s: %s", single.path, warning)
        if decision.note:
            _logger.info("%s: %s", single.path, decision.note)
        return decision

    def _decide_each(
        self,
        transforms: Sequence[Callable[..., Any]],
        options: RestoreOptions,
        kind: CallerKind,
        leads: LeadsOf,
        *,
        once: bool,
    ) -> Decision:
        checkpoints = self.sources.checkpoints
        places = {one.source: (at, one) for at, one in enumerate(transforms) if isinstance(one, OneSource)}
        lineage, unmatched, warnings, parts = list[Entry](), list[Entry](), list[str](), dict[int, Sequence[int]]()
        rest, has_history = list(transforms), False
        for name, checkpoint in checkpoints.items():
            at, one = places.get(name, (None, None))
            steps, own = () if one is None else one.steps, SourceHistory(OpenSources({"": checkpoint}))
            records = own.with_older_steps_once() if once else own.with_older_steps()
            found = own.decide(records, steps, options, kind, lambda _, one=one: None if one is None else leads(one))
            if at is not None:
                parts[at] = range(len(steps)) if found.is_resuming else found.skipped
            rules = record_rules(steps)
            has_history |= any(_of_source(name, record or (), rules) for record in records.values())
            lineage += _of_source(name, found.lineage, rules)
            unmatched += _of_source(name, found.lineage if found.unmatched is None else found.unmatched, rules)
            warnings += [f"source {name!r}: {warning}" for warning in found.warnings]
        answer = options.is_resuming
        if has_history:
            rest = [one for one in transforms if not isinstance(one, OneSource)]
        else:  # it begins with this restore
            lineage, unmatched = [], []
        paths = {name: checkpoint.path for name, checkpoint in checkpoints.items()}
        formats = {name: checkpoint.format for name, checkpoint in checkpoints.items()}
        entry = make_entry(paths, formats, record_rules(rest), is_resuming=answer if rest else None)
        return Decision(
            answer is True,
            (*lineage, entry),
            warnings=tuple(warnings),
            unmatched=(*unmatched, make_entry(paths, formats, ())) if answer is None else None,
            parts=parts,
        )
