"""Asks, for one restore, whether its transforms were applied already, and turns the answer into diagnostics.

What decides is `orbax_t5x.provenance.decision`; here are the source's records, per item, and what a person sees.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orbax_t5x.errors import Fix, Problem, RestorePlanError
from orbax_t5x.provenance.chains import ChainRecord
from orbax_t5x.provenance.decision import Asker, Decision, Question, combine, decide
from orbax_t5x.provenance.records import UNRECORDED, Lineage, Records, from_metadata
from orbax_t5x.readers import Checkpoint
from orbax_t5x.restoring.options import PlanOptions
from orbax_t5x.restoring.run_steps import has_older_record, step_item
from orbax_t5x.trees.narrow import is_mapping

_logger = logging.getLogger(__name__)


def _unchanged(records: Records) -> Records:
    return records


@dataclasses.dataclass(frozen=True)
class Asking:
    """Who restores.

    Attributes:
      asker: see `orbax_t5x.provenance.decision`.
      agree: what all processes of a collective restore take the records to be; each calls it once, with what it read.
      proposes: whether transforms that would help are looked for where leaves are missing.
    """

    asker: Asker = "restore"
    agree: Callable[[Records], Records] = _unchanged
    proposes: bool = True


ANY_RESTORE = Asking()
"""A restore or a plan that is not a handler's restore of its own step."""


def decide_resuming(
    checkpoints: Mapping[str, Checkpoint],
    transforms: Sequence[Callable[..., Any]],
    options: PlanOptions,
    asking: Asking,
) -> Decision:
    """Whether the transforms of a restore were applied already, and the lineage of what is restored.

    Raises:
      RestorePlanError: with one problem, where only the caller can decide.
    """
    # A mixture of several sources is a new beginning.
    records = asking.agree(_records(next(iter(checkpoints.values()))) if len(checkpoints) == 1 else {"": None})
    single = checkpoints.get("") if len(checkpoints) == 1 else None
    named = checkpoints.items()
    question = Question(
        chain=ChainRecord.of(transforms),
        asker=asking.asker,
        answer=None if options.is_resuming is None else bool(options.is_resuming),
        has_fallback=options.fallback is not None,
        source=single.path if single is not None else {name: one.path for name, one in named},
        format=single.format if single is not None else {name: one.format for name, one in named},
    )
    decision = combine({item: decide(record, question) for item, record in records.items()})
    where = ", ".join(checkpoint.path for checkpoint in checkpoints.values()) or None
    if decision.problem is not None:
        message, fix = decision.problem
        raise RestorePlanError([Problem("provenance", None, message, Fix(fix))], path=where)
    if decision.warning:
        _logger.warning("%s: %s", where, decision.warning)
    if decision.note:
        _logger.info("%s: %s", where, decision.note)
    return decision


def _records(checkpoint: Checkpoint) -> Records:
    """The lineage of each item of a checkpoint; of one that is no mixture, under the empty name."""
    items = checkpoint.metadata.get("items")
    if is_mapping(items) and len(items) > 1:
        return {
            name: _record(item, os.path.join(checkpoint.path, name), checkpoint.format) for name, item in items.items()
        }
    return {"": _record(checkpoint.metadata, checkpoint.path, checkpoint.format)}


def _record(metadata: Mapping[str, Any], path: str, format: str) -> Lineage | None:
    lineage = from_metadata(metadata, path=path)
    if lineage is not None or format != "orbax":
        return lineage
    place = step_item(path)
    # Whoever saved this step knew less than whoever saved an older one.
    return (UNRECORDED,) if place is not None and has_older_record(place) else None
