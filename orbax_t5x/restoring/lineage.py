"""Lineage of the source of a restore: as its checkpoint records it, and as the run's older steps complete it.

`orbax_t5x.provenance.decision` decides from it whether transforms apply; here the decision is raised and logged.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orbax_t5x.errors import Problem, RestorePlanError
from orbax_t5x.provenance.chains import ChainRecord
from orbax_t5x.provenance.decision import CallerKind, Decision, ResumeContext, combine, decide
from orbax_t5x.provenance.records import UNRECORDED, Records, from_metadata
from orbax_t5x.readers import Checkpoint
from orbax_t5x.restoring.options import PlanOptions
from orbax_t5x.restoring.run_steps import has_older_record
from orbax_t5x.trees.narrow import is_mapping

_logger = logging.getLogger(__name__)


def _unchanged(records: Records) -> Records:
    return records


@dataclasses.dataclass(frozen=True)
class Caller:
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


def recorded_lineages(checkpoints: Mapping[str, Checkpoint]) -> Records:
    """Returns the lineage in the metadata of each item of an open checkpoint, by the item's name; "" for a single one.

    Several checkpoints begin a new lineage: they have none.
    """
    if len(checkpoints) != 1:
        return {"": None}
    (checkpoint,) = checkpoints.values()
    items = checkpoint.metadata.get("items")
    if not is_mapping(items) or len(items) < 2:
        return {"": from_metadata(checkpoint.metadata, path=checkpoint.path)}
    return {name: from_metadata(item, path=os.path.join(checkpoint.path, name)) for name, item in items.items()}


def with_history(records: Records, checkpoints: Mapping[str, Checkpoint]) -> Records:
    """Replaces missing records by `UNRECORDED` where an older step of the same run has a record.

    Reads the metadata of the run's older steps. Nothing is read for items that have a record, and for checkpoints that
    are no steps of a run.
    """
    if len(checkpoints) != 1:
        return records
    (checkpoint,) = checkpoints.values()
    missing = [name for name, lineage in records.items() if lineage is None and checkpoint.format == "orbax"]
    older = [
        name for name in missing if has_older_record(os.path.join(checkpoint.path, name) if name else checkpoint.path)
    ]
    return {**records, **dict.fromkeys(older, (UNRECORDED,))}


def decide_resuming(
    records: Records,
    checkpoints: Mapping[str, Checkpoint],
    transforms: Sequence[Callable[..., Any]],
    options: PlanOptions,
    kind: CallerKind,
) -> Decision:
    """Decides whether the transforms were applied already, and what lineage the restored state has.

    A RestorePlanError where only the caller can decide.
    """
    single = checkpoints.get("") if len(checkpoints) == 1 else None
    paths = {name: checkpoint.path for name, checkpoint in checkpoints.items()}
    context = ResumeContext(
        chain=ChainRecord.of(transforms),
        caller=kind,
        is_resuming=None if options.is_resuming is None else bool(options.is_resuming),
        has_fallback=options.fallback is not None,
        source=paths if single is None else single.path,
        format={name: one.format for name, one in checkpoints.items()} if single is None else single.format,
    )
    decision = combine({item: decide(record, context) for item, record in records.items()})
    path = ", ".join(paths.values()) or None
    if decision.problem is not None:
        message, fix = decision.problem
        raise RestorePlanError([Problem("provenance", None, message, fix)], path=path)
    if decision.warning:
        _logger.warning("%s: %s", path, decision.warning)
    if decision.note:
        _logger.info("%s: %s", path, decision.note)
    return decision
