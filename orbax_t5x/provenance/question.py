"""Facts of a decision about transforms, and its outcome."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from orbax_t5x.provenance.chains import Rules
from orbax_t5x.provenance.records import Entry, Lineage, make_entry
from orbax_t5x.text.fix import Fix

CallerKind = Literal["own step", "start", "restore", "convert"]
"""The kinds of callers: a restore of the run's own step (a handler's, without `source=`); the same by
`restore_or_initialize`; any other restore or plan; and conversions (`convert`, the command line)."""

LeadsToTarget = Callable[[Sequence[int], bool], bool]
"""Tests if a chain without some of its transforms leads to the target; with True exactly, else as far as the restore's
options permit."""


@dataclasses.dataclass(frozen=True, eq=False)
class ResumeContext:
    """Facts of a restore for a decision, beside the record.

    Attributes:
      chain: the transforms that are given.
      caller: the kind of the caller.
      is_resuming: as the caller passed it; None decides by the record.
      has_fallback: whether leaves that are missing are filled.
      source: path of the source, or name -> path.
      format: of the source, or name -> format.
      transforms: that the chain records, for fixes.
      leads_to_target: None without a target.
      source_leads_to_target: of the rules of a named source, by its name.
    """

    chain: Rules
    caller: CallerKind
    is_resuming: bool | None
    has_fallback: bool
    source: str | Mapping[str, str]
    format: str | Mapping[str, str]
    transforms: tuple[Any, ...] = ()
    leads_to_target: LeadsToTarget | None = None
    source_leads_to_target: Callable[[str], LeadsToTarget | None] = lambda name: None

    def entry(self, chain: Rules, *, is_resuming: bool | None = None, continues: bool = False) -> Entry:
        """Makes the entry of this restore for some of its transforms."""
        answer = is_resuming if chain else None
        return make_entry(self.source, self.format, chain, is_resuming=answer, continues=continues)


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """Outcome of a decision.

    Attributes:
      is_resuming: whether they were applied already.
      skipped: positions of the transforms that were applied already.
      parts: of the rules of named sources the same, by position.
      lineage: of the state that is restored.
      problem: why nothing can be decided, and what the caller can pass; None where it is decided.
      warnings: what a person should see.
      note: what was applied to the source before, where other transforms are applied on top; else empty.
      unmatched: the lineage where the transforms that are applied match nothing; None for `lineage` itself.
    """

    is_resuming: bool
    lineage: Lineage
    problem: tuple[str, Fix] | None = None
    warnings: tuple[str, ...] = ()
    note: str = ""
    unmatched: Lineage | None = None
    skipped: Sequence[int] = ()
    parts: Mapping[int, Sequence[int]] = dataclasses.field(default_factory=dict[int, Sequence[int]])


def combine_decisions(decisions: Mapping[str, Decision]) -> Decision:
    """Combines the decisions for several items."""
    first, *others = every = list(decisions.values())
    if not others:
        return first
    lineage = _union(decision.lineage for decision in every)
    if len({(one.problem is None, one.is_resuming, tuple(one.skipped), str(one.parts)) for one in every}) > 1:
        answers = "; ".join(f"{name!r}: {_answer_text(decision)}" for name, decision in decisions.items())
        what = f"the items of this step have differing records of what was applied to them: {answers}"
        return Decision(False, lineage, problem=(what, Fix.setting("restore one item at a time with {}", item=...)))
    without = [decision.unmatched for decision in every if decision.unmatched is not None]
    return dataclasses.replace(
        first,
        lineage=lineage,
        warnings=_union(decision.warnings for decision in every),
        note="; ".join(filter(None, _union([decision.note] for decision in every))),
        unmatched=_union(without) if len(without) == len(every) else None,
    )


def _answer_text(decision: Decision) -> str:
    if decision.problem is not None:
        return "not decided"
    if decision.skipped:
        return f"{len(decision.skipped)} of them applied already"
    return "applied already" if decision.is_resuming else "to be applied"


def _union(several: Iterable[Iterable[Any]]) -> tuple[Any, ...]:
    """Returns all items, each once, in order."""
    found: list[Any] = []
    for items in several:
        found.extend(item for item in items if item not in found)
    return tuple(found)
