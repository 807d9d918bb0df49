"""Decides whether transforms are applied to a state: a pure function of its record, the transforms and the caller.

Transforms happen once within a run. The first row that fits decides, unless the caller answers with `is_resuming`:

| the source's record | own step of the run | restore of anything else | convert |
|---|---|---|---|
| none, or nothing was applied | apply | apply | apply |
| unrecorded, and no later entry has the same digest | ask | ask | apply, one warning |
| an entry has the same digest | applied already | the same, and a warning | the same, and a warning |
| no digest on one side | ask | ask | apply, one warning |
| other digests | a problem: what differs | apply | apply |

Where a row asks, or other digests are a problem, transforms that only select or cast are applied all the same, as long
as there is no `fallback` that would fill what they take out: no value that is restored can be wrong by that.

A run that is resumed whatever is recorded is in no row: nothing is applied, nothing is asked, and other digests are a
warning.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Literal

from orbax_t5x.provenance.chains import ChainRecord
from orbax_t5x.provenance.records import (
    Entry,
    Lineage,
    applied_rules,
    has_digest,
    has_same_digest,
    make_entry,
    since_unrecorded,
)
from orbax_t5x.text.fix import Fix
from orbax_t5x.text.wording import listed
from orbax_t5x.trees.narrow import is_mapping

CallerKind = Literal["own step", "resumed run", "restore", "convert"]
"""The kinds of callers: a restore of the run's own step (a handler's, without `source=`); the same where the run is
resumed whatever is recorded (`restore_or_initialize`); any other restore or plan; and calls that make a new checkpoint
or a new run (`convert`, `init_from=`, the command line)."""

_SHOWN_DIFFERENCES = 8

_ANSWERS = Fix.any_of(
    Fix.setting("pass {} (they were applied already: the run goes on)", is_resuming=True),
    Fix.setting("pass {} (apply them now)", is_resuming=False),
)
_NEW_OR_SAME_RUN = Fix.any_of(
    Fix.setting("pass {} (a new run: apply them now)", is_resuming=False),
    Fix.setting("pass {} (the same run, edited rules)", is_resuming=True),
)


@dataclasses.dataclass(frozen=True)
class ResumeContext:
    """Facts of a restore that a decision depends on, in addition to the record.

    Attributes:
      chain: the transforms that are given.
      caller: the kind of the caller.
      is_resuming: as the caller passed it; None decides by the record.
      has_fallback: whether leaves that are missing are filled.
      source: path of the source, or name -> path.
      format: of the source, or name -> format.
    """

    chain: ChainRecord
    caller: CallerKind
    is_resuming: bool | None
    has_fallback: bool
    source: str | Mapping[str, str]
    format: str | Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Decision:
    """Outcome of a decision.

    Attributes:
      is_resuming: whether they were applied already.
      lineage: of the state that is restored.
      problem: why nothing can be decided, and what the caller can pass; None where it is decided.
      warning: what a person should see; empty where nothing is.
      note: what was applied to the source before, where other transforms are applied on top; else empty.
      unmatched: the lineage where the transforms that are applied match nothing; None for `lineage` itself.
    """

    is_resuming: bool
    lineage: Lineage
    problem: tuple[str, Fix] | None = None
    warning: str = ""
    note: str = ""
    unmatched: Lineage | None = None


def decide(record: Lineage | None, context: ResumeContext) -> Decision:
    """Decides whether transforms are applied; `record` is the source's lineage, or None."""
    lineage = record or ()
    if not context.chain:
        return Decision(context.is_resuming is True, lineage or (_entry(context),))
    if context.caller == "resumed run":
        return _decide_to_resume(lineage, context)
    if context.is_resuming is not None:
        return _decide_by_answer(lineage, context)
    applied = [entry for entry in lineage if applied_rules(entry)]
    since = since_unrecorded(lineage)
    if since is not None and not any(has_same_digest(entry, context.chain) for entry in since):
        what = "nothing records what was applied to this state before it was saved"
        return _decide_unrecorded(lineage, context, what, _ANSWERS)
    if not applied:
        return _decide_to_apply(lineage, context)
    same = next((entry for entry in reversed(applied) if has_same_digest(entry, context.chain)), None)
    if same is not None:
        warning = "" if context.caller == "own step" else _already_applied(same)
        return Decision(True, lineage, warning=warning)
    opaque = [entry for entry in applied if not has_digest(entry)]
    if context.chain.digest is None or opaque:
        whose = "those given" if context.chain.digest is None else f"those recorded ({_brief(opaque[-1])})"
        what = (
            f"{_brief(applied[-1])} was applied to this state before, and whether that is what is given now cannot be "
            f"told: {whose} hold a lambda, a closure, a callable object or too much data, and so have no digest"
        )
        return _decide_unrecorded(lineage, context, what, _ANSWERS)
    if context.caller == "own step" and not _changes_no_value(context):
        what = f"the run began with other transforms than those given: {_rule_differences(applied[-1], context.chain)}"
        return Decision(False, lineage, problem=(what, _NEW_OR_SAME_RUN))
    if context.caller == "own step":
        return Decision(False, lineage)
    before = "; ".join(_brief(entry) for entry in applied)
    return dataclasses.replace(_decide_to_apply(lineage, context), note=f"applied to this state before: {before}")


def _decide_by_answer(lineage: Lineage, context: ResumeContext) -> Decision:
    """Follows the caller's `is_resuming`, which the next save records."""
    known = any(has_same_digest(entry, context.chain) for entry in lineage)
    if context.is_resuming:
        since = since_unrecorded(lineage)
        found = known if since is None else any(has_same_digest(entry, context.chain) for entry in since)
        # Without a digest the entry could not be found again.
        remembered = found or context.chain.digest is None
        return Decision(True, lineage if remembered else (*lineage, _entry(context)))
    if known and context.caller == "own step":
        what = "transforms would be applied again that the run's own record says were applied already"
        return Decision(False, lineage, problem=(what, Fix.setting("remove {}", is_resuming=False)))
    return _decide_to_apply(lineage, context)


def _decide_to_resume(lineage: Lineage, context: ResumeContext) -> Decision:
    """Resumes a run: nothing is applied, nothing is asked; other rules than recorded are a warning and are recorded."""
    decision = _decide_by_answer(lineage, dataclasses.replace(context, is_resuming=True))
    applied = [entry for entry in lineage if applied_rules(entry)]
    known = any(has_same_digest(entry, context.chain) for entry in applied)
    if known or decision.lineage == lineage or not applied or not all(map(has_digest, applied)):
        return decision
    what = f"the run began with other transforms than those given: {_rule_differences(applied[-1], context.chain)}"
    return dataclasses.replace(decision, warning=f"{what}; it goes on without those given, which are recorded")


def _decide_to_apply(lineage: Lineage, context: ResumeContext) -> Decision:
    """Applies the transforms; they are recorded where they match something, or where the caller said so."""
    if context.is_resuming is not None:
        return Decision(False, (*lineage, _entry(context)))
    without = lineage or (_entry(dataclasses.replace(context, chain=ChainRecord.of(()))),)
    return Decision(False, (*lineage, _entry(context)), unmatched=without)


def _entry(context: ResumeContext) -> Entry:
    answer = context.is_resuming if context.chain else None
    return make_entry(context.source, context.format, context.chain, is_resuming=answer)


def _decide_unrecorded(lineage: Lineage, context: ResumeContext, what: str, fix: Fix) -> Decision:
    """Decides a row that asks: a problem, but not for `convert`, nor for transforms that change no value."""
    if context.caller == "convert":
        return dataclasses.replace(_decide_to_apply(lineage, context), warning=f"{what}; the transforms are applied")
    if _changes_no_value(context):
        # Not recorded: it does not concern the given transforms.
        return Decision(False, lineage)
    return Decision(False, lineage, problem=(what, fix))


def _changes_no_value(context: ResumeContext) -> bool:
    return context.chain.only_selects and not context.has_fallback


# -- texts


def _brief(entry: Entry) -> str:
    rules = applied_rules(entry)
    return listed(rules, 1)


def _already_applied(entry: Entry) -> str:
    source = entry["source"]
    where = ", ".join(source.values()) if is_mapping(source) else source
    return (
        f"the transforms are not applied: by the checkpoint's record they were applied already, to {where!r}: "
        f"{_brief(entry)}; is_resuming=False applies them again"
    )


def _rule_differences(entry: Entry, chain: ChainRecord) -> str:
    """Lists the differences, rule by rule."""
    recorded, given = list(applied_rules(entry)), chain.recorded_rules()
    lines = [
        f"{'recorded' if line[0] == '-' else 'given'} {line[2:]}"
        for line in difflib.ndiff(recorded, given)
        if line[0] in "-+"
    ]
    if not lines:
        return f"the rules read the same ({_brief(entry)}), but their data or functions differ"
    return listed(lines, _SHOWN_DIFFERENCES, separator="; ")


# -- several items


def combine_decisions(decisions: Mapping[str, Decision]) -> Decision:
    """Combines the decisions for several items, each of which has its own record."""
    first = next(iter(decisions.values()))
    if len(decisions) == 1:
        return first
    answers = {name: _answer_text(decision) for name, decision in decisions.items()}
    lineage = _union_of_lineages([decision.lineage for decision in decisions.values()])
    if len(set(answers.values())) > 1:
        answer_texts = "; ".join(f"{name!r}: {answer}" for name, answer in answers.items())
        what = f"the items of this step have differing records of what was applied to them: {answer_texts}"
        return Decision(False, lineage, problem=(what, Fix.setting("restore one item at a time with {}", item=...)))
    warnings = dict.fromkeys(decision.warning for decision in decisions.values() if decision.warning)
    notes = dict.fromkeys(decision.note for decision in decisions.values() if decision.note)
    without = [decision.unmatched for decision in decisions.values() if decision.unmatched is not None]
    unmatched = _union_of_lineages(without) if len(without) == len(decisions) else None
    return Decision(first.is_resuming, lineage, first.problem, "; ".join(warnings), "; ".join(notes), unmatched)


def _answer_text(decision: Decision) -> str:
    if decision.problem is not None:
        return "not decided"
    return "applied already" if decision.is_resuming else "to be applied"


def _union_of_lineages(lineages: Sequence[Lineage]) -> Lineage:
    """Returns all entries, each once, in the order of the items."""
    entries: list[Entry] = []
    for lineage in lineages:
        entries.extend(entry for entry in lineage if entry not in entries)
    return tuple(entries)
